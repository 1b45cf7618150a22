"""Losses as sums, counts and divisions, which ranks and micro-batches add up separately."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar._torch.operators import aten
from autopar.capture.nodes import Compute, Rewrite, argument, inlined, is_random, put, replace_node, value
from autopar.capture.passes.aliases import one_name
from autopar.capture.passes.in_place import functionalise
from autopar.errors import CaptureError
from autopar.ir.precision import is_low
from autopar.rules.registry import has_rule

NONE, MEAN, SUM = 0, 1, 2


def open_composites(graph: fx.Graph) -> None:
    """Replace every operator that has no rule by the operators that torch makes of it, such as those of a loss."""
    for node in list(graph.nodes):
        target: Any = node.target
        can_decompose = getattr(target, "_can_decompose", None)
        if can_decompose is None or target.namespace == "autopar" or has_rule(target) or not can_decompose():
            continue
        if is_random(node) or not isinstance(value(node), torch.Tensor):
            continue
        opened = _decomposed(node)
        if opened is None:
            continue
        outer = {key: of_node for key, of_node in node.meta.items() if key != "val"}
        replace_node(node, inlined(node, opened, node.all_input_nodes, outer, {}))


def _decomposed(node: fx.Node) -> fx.Graph | None:
    """The graph of an operator's own decomposition. None if torch cannot trace it, or it holds tensors of its own."""
    operands = node.all_input_nodes

    def run(*tensors: torch.Tensor) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), dict(zip(operands, tensors, strict=True)).__getitem__)
        return node.target.decompose(*args, **kwargs)  # type: ignore[union-attr]

    try:
        graph = make_fx(run)(*(value(operand) for operand in operands)).graph
        functionalise(graph, {})
        one_name(graph)
    except (RuntimeError, NotImplementedError, CaptureError):
        return None
    ops = {inner.op for inner in graph.nodes}
    return graph if ops <= {"placeholder", "call_function", "output"} else None


def _split_loss(emit: Compute, node: fx.Node) -> fx.Node | None:
    """Sum, count and division for a mean over classes, in float32 for 16 bits, which hold no count above 256."""
    reduction = argument(node, "reduction")
    if reduction == NONE:
        return None
    logits, target = node.args[0], node.args[1]
    by_id, is_mean = not value(target).dtype.is_floating_point, reduction == MEAN
    low = value(node).dtype
    wide = torch.float32 if is_low(low) else low
    weight = argument(node, "weight")
    if wide != low:
        logits = emit(aten.to.dtype, logits, wide)
        weight = weight if weight is None else emit(aten.to.dtype, weight, wide)
    if by_id or not is_mean:
        total = _reduced(node, logits, weight, SUM, value(node).to(wide))
        if is_mean:
            total = emit(aten.div.Tensor, total, _count(emit, node, target, weight, wide))
    else:  # probabilities: torch divides by the number of rows
        rows = value(target).to(wide).select(1 if value(target).dim() > 1 else 0, 0)
        total = emit(aten.mean.default, _reduced(node, logits, weight, NONE, rows))
    if wide != low and any(user.op != "output" for user in node.users):
        total = emit(aten.to.dtype, total, low)
    return total


def _reduced(node: fx.Node, logits: Any, weight: Any, reduction: int, result: torch.Tensor) -> fx.Node:
    """The loss with another reduction. Its value is not computed: logits and targets may lie on different devices."""
    named = [declared.name for declared in node.target._schema.arguments[4:]]  # type: ignore[union-attr]
    rest = (argument(node, name) for name in named)
    return put(node, node.target, (logits, node.args[1], weight, reduction, *rest), result)


def _count(emit: Compute, node: fx.Node, target: Any, weight: Any, dtype: torch.dtype) -> fx.Node:
    """The number of targets that count, or the sum of their class weights."""
    valid = emit(aten.ne.Scalar, target, argument(node, "ignore_index"))
    if weight is None:
        return emit(aten.to.dtype, emit(aten.sum.default, valid), dtype)
    classes = emit(aten.masked_fill.Scalar, target, emit(aten.logical_not.default, valid), 0)
    picked = emit(aten.index.Tensor, weight, [classes])
    return emit(aten.sum.default, emit(aten.mul.Tensor, picked, valid))


_CLASSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
LOSSES: Mapping[Any, Rewrite] = dict.fromkeys(_CLASSES, _split_loss)
