"""Functions of ranks in test_indices: `Ranks.run("index_ranks:name", ...)`. Every rank has the unmodified model too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from data_ranks import message
from lookup_models import batch_of, built, corrupted

from autopar.api import parallelize
from autopar.runtime.model.index_check import IndexCheck
from autopar.runtime.model.module import ParallelModel

SEQUENCES = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A global batch with one number changed in the rows of one data-parallel rank, and what runs it."""

    name: str
    place: tuple[int, ...]
    value: int
    dp: int = 0
    length: int | None = None
    sequences: int = SEQUENCES  # of the data-parallel rank `dp`; the others have as planned
    method: str = "forward_backward"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The message that a rank got, or the difference of its loss to one device's. And whether one device refuses."""

    message: str
    difference: float
    is_refused_by_one_device: bool
    num_checks: int  # how often all ranks computed the indices


def outcomes(
    rank: int, world_size: int, wish: Mapping[str, Any], name: str, cases: Sequence[Case]
) -> tuple[list[Outcome], bool]:
    """The outcome of every case, in order, and whether a table's rows are split."""
    example = batch_of(name, SEQUENCES)
    parallel = parallelize(built(name), f"{world_size}xcpu", example_inputs=example, plan=wish)
    reference = built(name)
    found = [_outcome(parallel, reference, name, case) for case in cases]
    return found, any("vocab_parallel_embedding" in parallel.code(i) for i in range(len(parallel.program.blocks)))


def _outcome(parallel: ParallelModel, reference: torch.nn.Module, name: str, case: Case) -> Outcome:
    options = {} if case.length is None else {"length": case.length}
    counts = [case.sequences if k == case.dp else SEQUENCES for k in range(parallel.plan.degrees.dp)]
    every = [batch_of(name, count, seed=10 * k, **options) for k, count in enumerate(counts)]
    if case.sequences:
        every[case.dp] = corrupted(every[case.dp], case.name, case.place, case.value)
    own = every[parallel.rank_mesh.sample_ranks.coordinate]
    expected = _loss_on_one_device(reference, {n: torch.cat([part[n] for part in every]) for n in own})
    losses: list[float] = []

    def run() -> None:
        parallel.train(case.method != "eval mode")
        if case.method == "forward_backward":
            losses.append(float(parallel.forward_backward(own)))
        else:
            losses.append(float(parallel.evaluate(own)["loss"]))

    with mock.patch.object(IndexCheck, "check", autospec=True, side_effect=IndexCheck.check) as checks:
        text = message(run)
    return Outcome(
        message=text,
        difference=abs(losses[0] - expected) if losses and expected is not None else 0.0,
        is_refused_by_one_device=expected is None,
        num_checks=checks.call_count,
    )


def _loss_on_one_device(reference: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> float | None:
    try:
        return float(reference(**batch)["loss"].detach())
    except IndexError:
        return None
