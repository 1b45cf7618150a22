"""Lower bounds of a pipelined step for many candidates at once, tight enough to rank them.

A step is at least as long as the time of any rank. The rank first waits for the first micro-batch. Then it runs its own
passes and waits for messages. Last, the last micro-batch goes back to the first rank.

    all        one micro-batch goes through every stage and back, after or before all others in the first stage
    in loops   the last rank waits for the forward passes of the stages before it; if backward passes are whole, the
               backward passes of these stages follow its last pass
    in v       the last rank holds the turn; the forward passes of the stages before it come first
    some       the schedule has a bound of its own (`step_bound` of `autopar.ir.schedules.schedule.Schedule`)

If ranks share cores, a computing rank is faster while others wait. The bound takes the largest possible gain, and the
work of all ranks together. Blocks of several roles count as their mean. The bounds therefore hold for models whose
repeated blocks are alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.step.assembly import Pipeline, PipelineTimes
from autopar.cost_model.step.context import Passes
from autopar.cost_model.step.unique_rows import Distinct, spread
from autopar.ir.arrays import Floats
from autopar.ir.schedules.registry import SCHEDULES
from autopar.ir.schedules.schedule import PassSeconds
from autopar.search.bounds.uniform_partition import EvenCuts, even_cuts

IS_V = np.array([kind.placement == "v" for kind in SCHEDULES.values()])
SPLITS_BACKWARD = np.array([kind.splits_backward for kind in SCHEDULES.values()])


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """Candidates as arrays: schedule (a position in `SCHEDULE_NAMES`), ranks, stages per rank, micro-batches."""

    schedule: NDArray[np.int64]
    pp: Floats
    virtual: Floats
    micro_batches: Floats
    counts: tuple[tuple[str, int], ...]  # repeated blocks by role
    ranks_per_core: float = 1.0

    @property
    def blocks(self) -> float:
        """All repeated blocks."""
        return float(sum(count for _, count in self.counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """One rank: the seconds of its passes of one micro-batch, its repeated blocks, and the ends that it holds."""

    forward: Floats
    backward: Floats
    blocks: Floats
    head: Floats
    tail: Floats

    @property
    def busy(self) -> Floats:
        return np.asarray(self.forward + self.backward)


def lower_bound(
    run: PipelineRun, *, waits: float, used: list[EvenCuts] | None = None, groups: Distinct | None = None
) -> Pipeline:
    """A pipeline for `autopar.cost_model.step.step.step_seconds` that is never longer than the pipeline that runs."""

    def bounded(passes: Mapping[str, Passes], message: Floats) -> PipelineTimes:
        block = _mean([(count / run.blocks, passes[role]) for role, count in run.counts])
        ends = [_mean([(1.0, passes[end])] if end in passes else []) for end in ("first", "last")]
        sums = [passes[0] + passes[1] for passes in (block, *ends)]
        cuts = _cuts(run, sums, groups)
        if used is not None:
            used.append(cuts)
        return _longest(run, cuts, block, ends, waits * np.asarray(message))

    return bounded


def _cuts(run: PipelineRun, sums: Sequence[Floats], groups: Distinct | None) -> EvenCuts:
    """The cuts of all candidates, computed once for candidates that are alike."""
    blocks, stages = np.asarray(run.blocks), run.pp * run.virtual
    if groups is None or groups.index is None:
        return even_cuts(blocks, stages, *sums)
    rows, index = groups.rows, groups.index
    few = even_cuts(blocks, stages[rows], *(spread(seconds, rows) for seconds in sums))
    alone = blocks * sums[0] + sums[1] + sums[2]  # one stage: a micro-batch of it may differ between its candidates
    return replace(spread(few, index), largest=np.where(stages <= 1, alone, few.largest[index]))


def _mean(shares: Sequence[tuple[float, Passes]]) -> list[Floats]:
    """Forward, backward and weight seconds."""
    names = ("forward", "backward", "weight")
    return [np.asarray(sum((w * np.asarray(getattr(cost, name)) for w, cost in shares), np.zeros(1))) for name in names]


def _longest(
    run: PipelineRun, cuts: EvenCuts, block: Sequence[Floats], ends: Sequence[Sequence[Floats]], message: Floats
) -> PipelineTimes:
    n, staged = run.micro_batches, run.pp > 1
    is_v, splits = IS_V[run.schedule], SPLITS_BACKWARD[run.schedule]
    paths = _paths(run, cuts, block, ends, message)
    # of the first and the last rank; under v order they pass on to themselves at one end
    sent = np.where(staged, np.where(is_v, 2.0, 2 * run.virtual - 1), 0.0) * message
    total = [run.blocks * block[i] + ends[0][i] + ends[1][i] for i in (0, 1, 2)]
    back = total[1] - np.where(splits, total[2], 0.0)
    hops = 2 * (run.virtual * run.pp - np.where(is_v, run.virtual, 1)) * message
    first = [cuts.first * block[i] + ends[0][i] for i in (0, 1, 2)]
    others = np.maximum(first[0], first[1] - np.where(splits, first[2], 0.0))
    whole = np.maximum(n * (total[0] + total[1]) / run.pp, total[0] + back + hops + (n - 1) * others)
    for path in paths:
        whole = np.maximum(whole, path.head + n * (path.busy + sent) + path.tail)
    ends_s = [np.maximum(cuts.first * block[i] + ends[0][i], cuts.last * block[i] + ends[1][i]) for i in (0, 1)]
    seconds = PassSeconds(
        pp=run.pp,
        micro_batches=n,
        forward=total[0],
        backward=total[1],
        slowest_forward=np.maximum(ends_s[0], cuts.most * block[0]),
        slowest_backward=np.maximum(ends_s[1], cuts.most * block[1]),
        first_forward=paths[0].forward,
        first_backward=paths[0].backward,
        messages=hops,
    )
    for position, kind in enumerate(SCHEDULES.values()):
        if kind.step_bound is not None:
            whole = np.where(run.schedule == position, np.maximum(whole, kind.step_bound(seconds)), whole)
    if run.ranks_per_core > 1:
        return _sharing(run, whole, total[0] + total[1], sent)
    busy = paths[0].busy
    blocks = paths[0].blocks
    for path in paths[1:]:
        blocks = np.where(path.busy > busy, path.blocks, blocks)
        busy = np.maximum(busy, path.busy)
    return PipelineTimes(
        busy=np.where(staged, busy, total[0] + total[1]),
        blocks=np.where(staged, blocks, run.blocks),
        idle=np.where(staged, np.maximum(whole - n * (busy + sent), 0.0), 0.0),
        messages=n * sent,
    )


def _sharing(run: PipelineRun, whole: Floats, total: Floats, sent: Floats) -> PipelineTimes:
    """Seconds of the mean rank. `autopar.cost_model.pipeline.stages` counts ranks that share cores in the same way."""
    n, staged = run.micro_batches, run.pp > 1
    mean = total / run.pp
    idle = np.maximum(whole / run.ranks_per_core - n * mean, 0.0)
    return PipelineTimes(
        busy=mean,
        blocks=run.blocks / run.pp,
        idle=np.where(staged, idle, 0.0),
        messages=np.zeros(1) * sent,
    )


def _paths(
    run: PipelineRun, cuts: EvenCuts, block: Sequence[Floats], ends: Sequence[Sequence[Floats]], message: Floats
) -> list[_Path]:
    """The first rank, the last rank, and one between. If the cuts leave its stages open, it gets the emptiest ones."""
    p, v, none = run.pp, run.virtual, np.zeros(1)
    is_v, splits = IS_V[run.schedule], SPLITS_BACKWARD[run.schedule]

    def path(blocks: Floats, has: Sequence[Any], head: Floats, tail: Floats) -> _Path:
        forward, backward = (blocks * block[i] + sum(ends[e][i] * has for e, has in enumerate(has)) for i in (0, 1))
        return _Path(forward=forward, backward=backward, blocks=blocks, head=head, tail=tail)

    # of the stages before the last rank's first one
    before = [cuts.first * block[i] + ends[0][i] + np.maximum(p - 2, 0) * cuts.least * block[i] for i in (0, 1)]
    head = before[0] + (p - 1) * message
    tail = np.where(splits, 0.0, before[1] + np.maximum(p - 2, 0) * message)
    others = (v - 1) * cuts.least
    between = np.where(p > 2, np.where(v == 1, cuts.most, v * cuts.least), 0.0)
    return [
        path(cuts.first + np.where(is_v, cuts.last, others), (1, is_v), none, none),
        path(np.where(is_v, 2 * cuts.least, cuts.last + others), (0, ~is_v), head, tail),
        path(between, (0, 0), none, none),
    ]
