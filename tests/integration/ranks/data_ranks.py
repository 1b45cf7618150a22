"""Functions of ranks in test_data: `Ranks.run("data_ranks:name", ...)`. Every rank has the unmodified model too."""

import copy
import logging
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from data_models import Tokens, rows, tokens
from floored_error import floored_error, rms
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.api import parallelize
from autopar.errors import AutoparError
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.model.shape_cache import MAX_SHAPES

LENGTH = 8
Batch = dict[str, torch.Tensor]


def made(world_size: int, wish: Mapping[str, Any], local: int, **options: Any) -> tuple[ParallelModel, Tokens]:
    """A parallel model whose plan is for `local` sequences of a rank, and its reference."""
    model = tokens(**options)
    example = rows(local, LENGTH, 0)
    return parallelize(copy.deepcopy(model), f"{world_size}xcpu", example_inputs=example, plan=wish), model


def own_rows(parallel: ParallelModel, counts: Sequence[int], length: int, seed: int, **options: Any) -> Any:
    """This rank's rows, and those of all data-parallel ranks together; `counts` is by data-parallel rank."""
    every = [rows(count, length, 100 * seed + k, **options) for k, count in enumerate(counts)]
    whole = {name: torch.cat([part[name] for part in every]) for name in every[0]}
    return every[parallel.rank_mesh.sample_ranks.coordinate], whole


def largest(errors: Iterable[float]) -> float:
    return max(math.inf if math.isnan(e) else e for e in errors)


def gradient_error(parallel: ParallelModel, reference: nn.Module) -> float:
    held = {n for n, _ in parallel.named_parameters()}  # in a pipeline those of this rank's stages
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None and n in held}
    found = {n: g for n, g in parallel.whole_gradients().items() if g.numel() or n in expected}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    if not any(g.numel() for g in expected.values()):
        return 0.0  # this rank's stages train nothing
    scale = rms(g for g in expected.values() if g.numel())
    return largest(floored_error(found[n], g, scale) for n, g in expected.items() if g.numel())


def on_any_rank(names: Iterable[str]) -> set[str]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, list(names))
    return {name for own in every for name in own}


def whole(parallel: ParallelModel) -> dict[str, torch.Tensor]:
    state = parallel.state_dict()
    return {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach() for n, v in state.items()}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of an optimizer, built from names."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "norm" in n or "bias" in n], "lr": 3e-3, "weight_decay": 0.0},
        {"params": [p for n, p in named if not ("norm" in n or "bias" in n)], "lr": 1e-2, "weight_decay": 0.1},
    ]


def training(
    rank: int, world_size: int, wish: Mapping[str, Any], local: int, steps: Sequence[Any], **options: Any
) -> Any:
    """Worst errors of loss, gradients and final weights over steps of (sequences by data-parallel rank, length)."""
    parallel, reference = made(world_size, wish, local, **options)
    assert on_any_rank(n for n, _ in parallel.named_parameters()) == {n for n, _ in reference.named_parameters()}
    ours, theirs = torch.optim.AdamW(groups(parallel)), torch.optim.AdamW(groups(reference))
    worst = {"loss": 0.0, "gradients": 0.0}
    for index, (counts, length) in enumerate(steps):
        own, every = own_rows(parallel, counts, length, index, ignore=not reference.weighted)
        loss = reference(**every)["loss"]
        loss.backward()
        found = parallel.forward_backward(own)
        worst["loss"] = largest((worst["loss"], floored_error(found, loss.detach(), 0.0)))
        worst["gradients"] = largest((worst["gradients"], gradient_error(parallel, reference)))
        for optimizer, model in ((ours, parallel), (theirs, reference)):
            optimizer.step()
            model.zero_grad()
    weights = whole(parallel)
    assert on_any_rank(weights) == reference.state_dict().keys()
    pairs = [(weights[n], v) for n, v in reference.state_dict().items() if n in weights]
    assert all(a.shape == b.shape for a, b in pairs)
    worst["weights"] = largest(floored_error(a, b, 0.0) for a, b in pairs if b.numel())
    return worst


def training_anyhow(
    rank: int, world_size: int, wish: Mapping[str, Any], steps: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    return training(rank, world_size, wish, 4, steps, **options)


def training_weighted(rank: int, world_size: int, wish: Mapping[str, Any], steps: Sequence[Any]) -> Any:
    return training(rank, world_size, wish, 4, steps, weighted=True)


def training_tied(rank: int, world_size: int, wish: Mapping[str, Any]) -> Any:
    """As `training`, with one table for tokens and logits."""
    steps = [((4,) * wish["dp"], LENGTH), ((3, 4)[: wish["dp"]], LENGTH)]
    return training(rank, world_size, wish, 4, steps, tied=True)


def message(action: Any) -> str:
    try:
        action()
    except AutoparError as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""


def refusals(rank: int, world_size: int, wish: Mapping[str, Any]) -> dict[str, str]:
    """What every rank is told of batches that ranks do not agree on; a batch that fits runs afterwards."""
    parallel, _ = made(world_size, wish, 2)
    coordinate, at_tp = (parallel.rank_mesh.dims[name].coordinate for name in ("dp", "tp"))
    good = rows(2, LENGTH, coordinate)

    def step(batch: Any) -> str:
        return message(lambda: parallel.forward_backward(batch))

    other = rows(2, LENGTH, 50)
    found = {
        "other data": step(good | {"labels": other["labels"]} if at_tp else good),
        "rows swapped": step({n: v.flip(0) for n, v in good.items()} if at_tp else good),
        "other length": step(rows(2, LENGTH + 4, coordinate) if coordinate else good),
        "unfit": step({**good, "labels": good["labels"].int()} if rank == 1 else good),
        "mode": message(lambda: parallel.evaluate(good) if rank else parallel.forward_backward(good)),
        "cannot be split": step(rows(2, LENGTH + 1, coordinate)),
    }
    parallel.train(rank != 2)
    found["eval"] = message(lambda: parallel.evaluate(good))
    parallel.train()
    assert torch.isfinite(parallel.forward_backward(good))
    return found


def per_micro_batch(rank: int, world_size: int, wish: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    """Errors of steps against the mean loss of the global micro-batches, and the refusal of a short batch."""
    count = wish["accumulate"]
    parallel, reference = made(world_size, wish, 2 * count)
    dp = parallel.plan.degrees.dp
    worst = {"loss": 0.0, "gradients": 0.0}
    for seed, length in ((0, LENGTH), (1, LENGTH), (2, LENGTH + 4)):
        own, every = own_rows(parallel, (2 * count,) * dp, length, seed)
        for labels in (own["labels"], every["labels"].view(dp, 2 * count, length)):
            labels[..., :2, 3:] = -100  # the first micro-batch has fewer targets
        micro_batches = [{n: torch.cat(v.chunk(dp * count)[k::count]) for n, v in every.items()} for k in range(count)]
        losses = [reference(**values)["loss"] for values in micro_batches]
        loss = torch.stack(losses).mean()
        assert abs(loss.item() - reference(**every)["loss"].item()) > 1e-4
        loss.backward()
        worst["loss"] = largest((worst["loss"], floored_error(parallel.forward_backward(own), loss.detach(), 0.0)))
        worst["gradients"] = largest((worst["gradients"], gradient_error(parallel, reference)))
        parallel.zero_grad()
        reference.zero_grad()
    short, _ = own_rows(parallel, (2 * count - 1,) * dp, LENGTH, 3)
    return worst, message(lambda: parallel.forward_backward(short))


def not_masked(rank: int, world_size: int, wish: Mapping[str, Any]) -> dict[str, str]:
    """Short batches of a model whose loss has no mask."""
    parallel, reference = made(world_size, wish, 4, masked=False)
    found = {}
    for name, counts in (("unequal", (4, 3)), ("too many", (5, 3)), ("odd", (3, 3)), ("equal", (2, 2))):
        own, every = own_rows(parallel, counts, LENGTH, 0, ignore=False)
        found[name] = message(lambda own=own: parallel.forward_backward(own))
        if not found[name]:
            reference(**every)["loss"].backward()
            assert gradient_error(parallel, reference) < 1e-9
    return found


def iterated(rank: int, world_size: int, wish: Mapping[str, Any], lengths: Sequence[int]) -> tuple[int, str]:
    """How many batches of a loader of `lengths[rank]` a rank sees, and the error after them."""
    parallel, _ = made(world_size, wish, 2)
    seen = 0
    try:
        for _ in parallel.batches(range(lengths[rank])):
            seen += 1
    except AutoparError as caught:
        return seen, str(caught)
    return seen, ""


def evaluations(rank: int, world_size: int, wish: Mapping[str, Any], **options: Any) -> dict[str, float]:
    """Errors of evaluation in eval mode: a full batch, short ones, another length; then of a training step."""
    parallel, reference = made(world_size, wish, 2, dropout=0.4, **{"drops": True, **options})
    worst: dict[str, float] = {}
    cases = {"full": ((2, 2), LENGTH), "equal": ((1, 1), LENGTH), "unequal": ((2, 1), LENGTH), "long": ((2, 2), 12)}
    parallel.eval()
    reference.eval()
    for name, (counts, length) in cases.items():
        counts = counts[: parallel.plan.degrees.dp]
        own, every = own_rows(parallel, counts, length, 3)
        found, expected = parallel.evaluate(own), reference(**every)
        errors = [floored_error(found["loss"], expected["loss"].detach(), 0.0)]
        if len(set(counts)) == 1 and "logits" not in found:
            assert parallel.plan.degrees.pp > 1  # another stage's
        elif len(set(counts)) == 1:
            logits: Any = found["logits"]
            logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
            errors.append(floored_error(logits, expected["logits"].detach(), 0.0))
        else:
            assert found.keys() == {"loss"}
        worst[name] = largest(errors)
    parallel.train()
    own, _ = own_rows(parallel, (2, 2)[: parallel.plan.degrees.dp], LENGTH, 4)
    first, second = (float(parallel.evaluate(own)["loss"]) for _ in range(2))
    drawn = [float(parallel.forward_backward(own)) for _ in range(2)]
    assert first == second and drawn[0] != drawn[1]
    gained = {n for n, p in parallel.named_parameters() if p.grad is not None}
    assert "gain" in gained or parallel.plan.degrees.pp > 1
    assert "temperature" not in gained
    parallel.zero_grad()
    parallel.eval()
    own, every = own_rows(parallel, (2, 2)[: parallel.plan.degrees.dp], LENGTH, 5)
    reference(**every)["loss"].backward()
    worst["step in eval mode"] = floored_error(parallel.forward_backward(own), reference(**every)["loss"].detach(), 0.0)
    worst["gradients in eval mode"] = gradient_error(parallel, reference)
    return worst


def evaluations_in_stages(rank: int, world_size: int, wish: Mapping[str, Any]) -> dict[str, float]:
    return evaluations(rank, world_size, wish, drops=False, warm=False)


def refused_evaluation(rank: int, world_size: int, wish: Mapping[str, Any]) -> str:
    """The message where eval mode takes a parameter that another stage holds."""
    parallel, _ = made(world_size, wish, 2)
    parallel.eval()
    own, _ = own_rows(parallel, (2,) * parallel.plan.degrees.dp, LENGTH, 0)
    return message(lambda: parallel.evaluate(own))


def recomputed(rank: int, world_size: int, wish: Mapping[str, Any]) -> float:
    """Largest difference of gradients with dropout between keeping activations and recomputing every block."""
    gradients = []
    for recomputes in (False, True):
        parallel, _ = made(world_size, wish, 4, dropout=0.4)
        for segment in parallel.segments if recomputes else ():
            segment.forward = partial(checkpoint, segment.forward, use_reentrant=False, preserve_rng_state=False)
        own, _ = own_rows(parallel, (4, 4)[: parallel.plan.degrees.dp], LENGTH, 0)
        parallel.forward_backward(own)
        gradients.append(parallel.whole_gradients())
    assert gradients[0].keys() == gradients[1].keys()
    return max(float((a - gradients[1][n]).abs().max()) for n, a in gradients[0].items() if a.numel())


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def announced(
    rank: int, world_size: int, wish: Mapping[str, Any], lengths: Sequence[int], room: int = MAX_SHAPES
) -> tuple[list[str], list[str]]:
    """The messages of the log and the warnings of steps with the given lengths, with room for some shapes.

    Here every rank captures by itself, as in training.
    """
    handler, logger = Lines(), logging.getLogger("autopar")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    parallel, _ = made(world_size, wish, 2)
    with (
        mock.patch("autopar.runtime.model.shape_cache.MAX_SHAPES", room),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for length in lengths:
            parallel.forward_backward(rows(2, length, parallel.rank_mesh.sample_ranks.coordinate))
    logger.removeHandler(handler)
    logger.setLevel(level)
    return handler.lines, [str(w.message) for w in caught if "shapes" in str(w.message)]
