"""Cuts and recomputed blocks of every stage, chosen together. One number for all stages recomputes too much.

The first ranks of a pipeline hold the most micro-batches, so they must recompute more than the last ranks. A rank with
fewer blocks recomputes less, and the other ranks wait less for it. A stage takes the seconds of its blocks, plus the
seconds of the recomputation that it needs to fit. Both are known for any blocks in any place. Therefore the recursion
of `autopar.search.pricing.stage_partition` finds the cut that makes the slowest stage fastest. Then every rank
recomputes the fewest blocks that let it fit, first in the stages that hold the most micro-batches.

The cut assumes that all stages of a rank are alike. The number of recomputed blocks is counted on the real stages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    """Costs of every call in its place, per micro-batch.

    Seconds are of the call and of its recomputation. Bytes are of its parameters' state and of its saved activations.
    `freed_bytes` is the part of the saved bytes that recomputation avoids.
    """

    seconds: Floats
    again_s: Floats
    state_bytes: Floats
    saved_bytes: Floats
    freed_bytes: Floats


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
    """The calls before which stages begin if each stage may hold `room_bytes`. None if nothing fits.

    `stages` says how many stages there are and how they run.
    """
    live, virtual, calls = live_micro_batches(stages), stages.virtual, works.calls
    is_block = np.array([bool(role) and role not in ENDS for role in calls])
    blocks, of_ends, of_blocks, saved = (
        np.concatenate([[0.0], np.cumsum(one)])
        for one in (is_block, costs.state_bytes * ~is_block, costs.state_bytes * is_block, costs.saved_bytes)
    )
    again_s, freed = (float(np.mean(one[is_block])) for one in (costs.again_s, costs.freed_bytes))
    working = float(np.max(costs.saved_bytes))

    def more(stage: int, begins: NDArray[np.int64], stops: NDArray[np.int64]) -> Floats:
        def own(sums: Floats) -> Floats:
            return np.asarray(sums[stops] - sums[begins])

        held = own(of_ends) + virtual * (own(of_blocks) + live[stage] * own(saved))
        saves = max(virtual * live[stage] * freed, 1e-9)
        count = np.where(held > room_bytes, np.ceil((held + working - room_bytes) / saves), 0.0)
        return np.where(count <= own(blocks), count * again_s, np.inf)

    whole = costs.seconds + costs.again_s
    most = (whole.sum() / len(stages.roles) + whole.max()) * (1 + 1e-9)
    sums = np.concatenate([[0.0], np.cumsum(costs.seconds)])
    longest = int((np.searchsorted(sums, sums + most, side="right") - 1 - np.arange(len(sums))).max())

    def slowest(cuts: tuple[int, ...]) -> float:
        bounds = enumerate(pairwise((0, *cuts, len(calls))))
        return max(float(sums[b] - sums[a] + more(at, np.array(a), np.array(b))) for at, (a, b) in bounds)

    parts, seconds = len(stages.roles), costs.seconds.tolist()
    found = partition_with(seconds, parts, more, max(1, min(longest, len(calls))), can_be_alone=works.can_be_stage)
    if found is None or slowest(found) > most:  # elements that do not fit elsewhere may make a part longer
        found = partition_with(seconds, parts, more, len(calls), can_be_alone=works.can_be_stage)
    return found


def fewest_blocks(
    stages: Stages, needed_bytes: Callable[[tuple[int, ...]], Floats], capacity_bytes: float
) -> tuple[int, ...]:
    """The fewest recomputed blocks of every stage that let its rank fit; all blocks of a rank that cannot fit.

    `needed_bytes` gives the bytes of every rank for numbers of recomputed blocks.
    """
    orders = _orders(stages)
    least = np.zeros(stages.pp, dtype=np.int64)  # blocks with which a rank fits, once known
    most = np.array([len(order) for order in orders])
    least[needed_bytes(_of_stages(stages, orders, least)) > capacity_bytes] = 1
    most = np.where(least > 0, most, 0)
    while np.any(least < most):
        middle = (least + most) // 2
        fits = needed_bytes(_of_stages(stages, orders, middle)) <= capacity_bytes
        least, most = np.where(fits, least, np.minimum(middle + 1, most)), np.where(fits, middle, most)
    return _of_stages(stages, orders, most)


def _orders(stages: Stages) -> list[list[int]]:
    """For every rank, the order in which its stages recompute blocks.

    Stages with the most micro-batches come first. Stages with equally many take turns.
    """
    live, ranks = live_micro_batches(stages), stages.ranks
    found: list[list[int]] = [[] for _ in range(stages.pp)]
    every = [(-live[s], at, s) for s, own in enumerate(stages.repeated) for at in range(len(own))]
    for _, _, stage in sorted(every):
        found[ranks[stage]].append(stage)
    return found


def _of_stages(stages: Stages, orders: Sequence[Sequence[int]], counts: NDArray[np.int64]) -> tuple[int, ...]:
    """The recomputed blocks of every stage, from the recomputed blocks of every rank."""
    found = [0] * len(stages.roles)
    for order, count in zip(orders, counts.tolist(), strict=True):
        for stage in order[:count]:
            found[stage] += 1
    return tuple(found)


def costs_of(
    calls: Sequence[str],
    seconds: Sequence[float],
    forward_s: Mapping[str, float],
    state_bytes: Mapping[str, float],
    saved_bytes: Mapping[str, float],
    input_bytes: Mapping[str, float],
) -> CallCosts:
    """The costs of calls: `seconds` of each, and by their roles the seconds of the forward pass and the bytes."""

    def each(values: Mapping[str, float]) -> Floats:
        return np.array([values.get(role, 0.0) for role in calls])

    saved = each(saved_bytes)
    return CallCosts(
        seconds=np.array(seconds),
        again_s=each({role: forward for role, forward in forward_s.items() if role not in ENDS}),
        state_bytes=each(state_bytes),
        saved_bytes=saved,
        freed_bytes=saved - each(input_bytes),
    )
