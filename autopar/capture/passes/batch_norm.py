"""Batch norm in training as ordinary operators: mean, variance, normalisation, and new running statistics.

Mean and variance over the batch become ordinary reductions. So a batch that is split over ranks keeps the statistics of
the whole batch, forward and backward.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import argument, cast_to, compute, operator_name, replace_node, value
from autopar.rules.operators import BATCH_STATISTIC

_HALVES = (torch.bfloat16, torch.float16)
FUNCTIONAL = aten._native_batch_norm_legit_functional.default
NO_TRAINING = aten._native_batch_norm_legit_no_training.default
NO_STATS = aten._native_batch_norm_legit.no_stats
_TRAINS: Mapping[Any, str] = {aten.batch_norm.default: "training", aten.instance_norm.default: "use_input_stats"}
Changed = list[tuple[fx.Node, fx.Node]]


def replace_batch_norm(node: fx.Node) -> Changed:
    """Rewrite a batch norm (or instance norm) in training. Returns the changed buffers with their new values."""
    if node.target in (FUNCTIONAL, NO_TRAINING, NO_STATS):
        _spell(node)
    if node.target not in _TRAINS or not argument(node, _TRAINS[node.target]):
        return []
    out, statistics = normalised(node, over_batch=node.target is aten.batch_norm.default)
    running = [argument(node, name) for name in ("running_mean", "running_var")]
    replace_node(node, out)
    return [(old, new) for old, new in zip(running, statistics, strict=False) if isinstance(old, fx.Node)]


def _spell(node: fx.Node) -> None:
    """Rewrite the forms that export's decomposition makes. Their outputs 3 and 4 are the new statistics."""
    assert not {1, 2} & {user.args[1] for user in node.users if user.users}, node
    if node.target is NO_TRAINING:
        x, weight, bias, mean, var, momentum, eps = node.args
        out = compute(node, aten.batch_norm.default, x, weight, bias, mean, var, False, momentum, eps, False)
        statistics: list[fx.Node] = []
    else:
        out, statistics = normalised(node, over_batch=True)
    replace_node(node, [out, out, out, *statistics])


def normalised(node: fx.Node, *, over_batch: bool) -> tuple[fx.Node, list[fx.Node]]:
    """``(x - mean) / sqrt(var + eps) * weight + bias``, and the new running mean and variance if they exist."""
    new = partial(compute, node)
    x, dtype = node.args[0], value(node.args[0]).dtype
    shape = value(x).shape
    x = cast_to(new, x, torch.float32 if dtype in _HALVES else dtype)  # torch computes statistics in float32
    over = [*([0] if over_batch else []), *range(2, len(shape))]
    affine = [1, shape[1], *[1] * (len(shape) - 2)]
    has_running = operator_name(node) != "_native_batch_norm_legit"
    recorded = [argument(node, name) if has_running else None for name in ("running_mean", "running_var")]

    def statistic(of: Any, running: Any) -> tuple[fx.Node, fx.Node]:
        """A mean over the batch, and the statistic to use: this mean in training, `running` in evaluation."""
        mean = new(aten.mean.dim, of, over, True)
        if running is None:
            return mean, mean
        wide = new(aten.reshape.default, running, affine)
        if over_batch is False:
            wide = new(aten.expand.default, wide, list(value(mean).shape))
        return mean, new(BATCH_STATISTIC, mean, cast_to(new, wide, value(mean).dtype))

    mean, used_mean = statistic(x, recorded[0])
    centred = new(aten.sub.Tensor, x, used_mean)
    variance, used_variance = statistic(new(aten.mul.Tensor, centred, centred), recorded[1])
    inverse = new(aten.rsqrt.default, new(aten.add.Tensor, used_variance, argument(node, "eps")))
    out = new(aten.mul.Tensor, centred, inverse)
    for name, target in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        parameter = argument(node, name)
        if parameter is not None:
            out = new(target, out, new(aten.reshape.default, parameter, affine))
    out = cast_to(new, out, dtype)
    count = value(x).numel() // value(mean).numel()
    statistics = []
    for running, now, factor in zip(recorded, (mean, variance), (1.0, count / max(count - 1, 1)), strict=True):
        if running is not None:
            momentum = argument(node, "momentum")
            now = new(aten.mean.dim, new(aten.detach.default, now), [0, *range(2, len(shape))], False)
            now = cast_to(new, now, value(running).dtype)
            kept = new(aten.mul.Tensor, running, 1 - momentum)
            statistics.append(new(aten.add.Tensor, kept, new(aten.mul.Tensor, now, momentum * factor)))
    return out, statistics
