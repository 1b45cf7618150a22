"""Cuts and recomputed blocks of every stage, chosen together. One number for all stages recomputes too much.

The first ranks of a pipeline hold the most micro-batches, so they must recompute more than the last ranks. A rank with
fewer blocks recomputes less, and the other ranks wait less for it. A stage takes the seconds of its blocks, plus the
seconds of the recomputation that it needs to fit. Both are known for any blocks in any place. Therefore the recursion
of `autopar.search.pricing.stage_partition` finds the cut that makes the slowest stage fastest. Then every rank takes
the fewest steps of recomputation that let it fit, first in the stages that hold the most micro-batches. A step makes
another block selective, until all blocks of the rank are, and then another block full.

The cut assumes that all stages of a rank are alike. The number of recomputed blocks is counted on the real stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.pipeline.simulator import most_held
from autopar.cost_model.pipeline.stages import ENDS, MOST_ACTIONS, Stages
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.arrays import Floats
from autopar.ir.schedules.registry import SCHEDULES
from autopar.search.pricing.stage_partition import partition_with


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCosts:
    """Costs of every call in its place, per micro-batch."""

    seconds: Floats
    selective_s: Floats  # of recomputation
    full_s: Floats  # of recomputation
    state_bytes: Floats  # of its parameters
    saved_bytes: Floats  # of activations without recomputation
    selective_bytes: Floats
    full_bytes: Floats


def live_micro_batches(stages: Stages) -> Floats:
    """The micro-batches of every stage at the moment when its rank holds the most."""
    pp, ranks = stages.pp, np.array(stages.ranks)
    if stages.num_actions > MOST_ACTIONS:
        most = SCHEDULES[stages.schedule].most_in_flight(
            pp=pp, virtual_stages=stages.virtual, micro_batches=stages.micro_batches, rank=np.arange(pp)
        )
        live = np.asarray(most, dtype=np.float64)
        return np.asarray(live[ranks] / stages.virtual)
    rows = most_held(stages.schedule, pp, stages.virtual, stages.micro_batches)
    fullest = [each[np.argmax(each.sum(axis=1))] for each in rows]
    return np.array([float(fullest[rank][stage]) for stage, rank in enumerate(stages.ranks)])


def cuts_by_stage(
    works: ProgramWorks, costs: CallCosts, stages: Stages, *, room_bytes: float
) -> tuple[int, ...] | None:
    """The calls before which `stages` begin if each stage may hold `room_bytes`. None if nothing fits."""
    live, virtual, calls = live_micro_batches(stages), stages.virtual, works.calls
    is_block = np.array([bool(role) and role not in ENDS for role in calls])
    blocks, of_ends, of_blocks, saved = (
        np.concatenate([[0.0], np.cumsum(column)])
        for column in (is_block, costs.state_bytes * ~is_block, costs.state_bytes * is_block, costs.saved_bytes)
    )
    steps = _Steps.of(costs, is_block)

    def more(stage: int, begins: NDArray[np.int64], stops: NDArray[np.int64]) -> Floats:
        def own(sums: Floats) -> Floats:
            return np.asarray(sums[stops] - sums[begins])

        held = own(of_ends) + virtual * (own(of_blocks) + live[stage] * own(saved))
        return steps.seconds(held - room_bytes, own(blocks), virtual * live[stage])

    whole = costs.seconds + costs.full_s
    most = (whole.sum() / len(stages.roles) + whole.max()) * (1 + 1e-9)
    sums = np.concatenate([[0.0], np.cumsum(costs.seconds)])
    longest = int((np.searchsorted(sums, sums + most, side="right") - 1 - np.arange(len(sums))).max())

    def slowest(cuts: tuple[int, ...]) -> float:
        bounds = enumerate(pairwise((0, *cuts, len(calls))))
        return max(float(sums[b] - sums[a] + more(at, np.array(a), np.array(b))) for at, (a, b) in bounds)

    parts, seconds = len(stages.roles), costs.seconds.tolist()
    partition = partition_with(seconds, parts, more, max(1, min(longest, len(calls))), can_be_alone=works.can_be_stage)
    if partition is None or slowest(partition) > most:  # elements that do not fit elsewhere may make a part longer
        partition = partition_with(seconds, parts, more, len(calls), can_be_alone=works.can_be_stage)
    return partition


@dataclass(frozen=True, slots=True)
class _Steps:
    """The mean steps of a block, to selective and from there to full recomputation: seconds, bytes that a step frees,
    and bytes that exist besides while a block runs backward."""

    seconds_of: tuple[float, float]
    freed: tuple[float, float]
    working: tuple[float, float]

    @staticmethod
    def of(costs: CallCosts, is_block: NDArray[np.bool_]) -> "_Steps":
        selective_s, full_s = (float(np.mean(column[is_block])) for column in (costs.selective_s, costs.full_s))
        none, selective, full = (
            float(np.mean(column[is_block])) for column in (costs.saved_bytes, costs.selective_bytes, costs.full_bytes)
        )
        working = float(np.max(costs.saved_bytes - costs.selective_bytes)), float(np.max(costs.saved_bytes))
        return _Steps((selective_s, full_s - selective_s), (none - selective, selective - full), working)

    def seconds(self, excess: Floats, blocks: Floats, live: float) -> Floats:
        """Seconds of the fewest steps of so many blocks that free `excess` bytes. Infinite if there are none."""
        if not np.any(excess > 0):
            return np.zeros_like(excess)
        saves = [max(live * freed, 1e-9) for freed in self.freed]
        first = np.ceil((excess + self.working[0]) / saves[0])
        count = np.where(excess > 0, first * self.seconds_of[0], 0.0)
        more = (excess > 0) & (first > blocks)
        if np.any(more):
            second = np.ceil((excess + self.working[1] - blocks * live * self.freed[0]) / saves[1])
            fully = blocks * self.seconds_of[0] + np.maximum(second, 1.0) * self.seconds_of[1]
            count = np.where(more, np.where(second <= blocks, fully, np.inf), count)
        return count


class StageRecompute(NamedTuple):
    """The numbers of fully and of selectively recomputed blocks of every stage. The full ones come first."""

    full: tuple[int, ...]
    selective: tuple[int, ...]


def fewest_blocks(
    stages: Stages,
    peak_bytes: Callable[[StageRecompute], Floats],
    capacity_bytes: float,
    levels: Sequence[int] = (0, 2),
    most_level: int = 2,
) -> StageRecompute:
    """The fewest steps of recomputation of every stage that let its rank fit; all steps of a rank that cannot fit."""
    orders = _orders(stages)
    phases = [level for level in levels[1:] if level <= most_level]
    size = np.array([len(order) for order in orders])

    def fits(steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        return peak_bytes(_of_stages(stages, orders, steps, phases)) <= capacity_bytes

    least, most = np.where(fits(0 * size), 0, 1), size
    for phase in range(1, len(phases)):  # within a phase more steps need less memory
        is_enough = (least == 0) | fits(np.where(least > 0, most, 0))
        least, most = np.where(is_enough, least, phase * size + 1), np.where(is_enough, most, (phase + 1) * size)
    most = np.where(least > 0, most, 0)
    while np.any(least < most):
        middle = (least + most) // 2
        does = fits(middle)
        least, most = np.where(does, least, np.minimum(middle + 1, most)), np.where(does, middle, most)
    return _of_stages(stages, orders, most, phases)


def _orders(stages: Stages) -> list[list[int]]:
    """For every rank, the order in which its stages recompute: most micro-batches first, equal ones in turns."""
    live, ranks = live_micro_batches(stages), stages.ranks
    orders: list[list[int]] = [[] for _ in range(stages.pp)]
    every = [(-live[s], at, s) for s, blocks in enumerate(stages.repeated) for at in range(len(blocks))]
    for _, _, stage in sorted(every):
        orders[ranks[stage]].append(stage)
    return orders


def _of_stages(
    stages: Stages, orders: Sequence[Sequence[int]], steps: NDArray[np.int64], phases: Sequence[int]
) -> StageRecompute:
    """The recomputed blocks of every stage, from the steps of every rank. A phase is the level that its steps reach."""
    reached = {level: [0] * len(stages.roles) for level in (1, 2)}
    for order, count in zip(orders, steps.tolist(), strict=True):
        for phase, level in enumerate(phases):
            for stage in order[: max(0, count - phase * len(order))]:
                reached[level][stage] += 1
    full = tuple(reached[2])
    return StageRecompute(full, tuple(max(0, n - done) for n, done in zip(reached[1], full, strict=True)))
