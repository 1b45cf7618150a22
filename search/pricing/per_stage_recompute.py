"""Cuts and recomputed blocks of every stage, chosen together: one number for all stages recomputes more than it must.

The first ranks of a pipeline hold most micro-batches at once, so that they must recompute more than the last ones; with
fewer blocks they recompute less and the others wait less for them. A stage takes what its blocks take and what of them
it must compute again to fit, which is known for any blocks in any place: the cut that makes the slowest stage fastest
is found by the same recursion as without recomputation (`autopar.search.pricing.stage_partition`). Then every rank
recomputes the fewest blocks that let it fit, first in those of its stages that hold most micro-batches.

The cut takes a rank's stages to be alike; how many blocks recompute is counted on the stages as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.pipeline.simulator import most_held
from autopar.cost_model.pipeline.stages import ENDS, MOST_ACTIONS, Stages
from autopar.ir.arrays import Floats
from autopar.ir.schedules.registry import SCHEDULES
from autopar.search.pricing.stage_partition import partition_with


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCosts:
    """Of every call in its place: seconds of a micro-batch, those of computing it again, bytes of its parameters'
    state, bytes that it keeps of a micro-batch, and those of them that are not kept where it is computed again."""

    seconds: Floats
    again_s: Floats
    state_bytes: Floats
    saved_bytes: Floats
    freed_bytes: Floats


def live_micro_batches(stages: Stages) -> Floats:
    """Micro-batches of every stage that its rank holds when it holds most stages' micro-batches."""
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
    calls: Sequence[str], costs: CallCosts, stages: Stages, *, room_bytes: float
) -> tuple[int, ...] | None:
    """The calls, by their roles, before which stages begin, as each of them may hold `room_bytes`; None where nothing
    fits. `stages` say how many there are and how they run."""
    live, virtual = live_micro_batches(stages), stages.virtual
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

    can_be_alone = [bool(role) for role in calls]
    parts, seconds = len(stages.roles), costs.seconds.tolist()
    found = partition_with(seconds, parts, more, max(1, min(longest, len(calls))), can_be_alone=can_be_alone)
    if found is None or slowest(found) > most:  # what does not fit elsewhere may make a part longer
        found = partition_with(seconds, parts, more, len(calls), can_be_alone=can_be_alone)
    return found


def fewest_blocks(
    stages: Stages, needed_bytes: Callable[[tuple[int, ...]], Floats], capacity_bytes: float
) -> tuple[int, ...]:
    """The fewest blocks of every stage that let its rank fit, or all of those of a rank that cannot. `needed_bytes` are
    those of every rank where stages recompute so many blocks."""
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
    """For every rank, the stages of its blocks in the order in which these recompute: those with most micro-batches
    first, in turns where stages hold as many."""
    live, ranks = live_micro_batches(stages), stages.ranks
    found: list[list[int]] = [[] for _ in range(stages.pp)]
    every = [(-live[s], at, s) for s, own in enumerate(stages.repeated) for at in range(len(own))]
    for _, _, stage in sorted(every):
        found[ranks[stage]].append(stage)
    return found


def _of_stages(stages: Stages, orders: Sequence[Sequence[int]], counts: NDArray[np.int64]) -> tuple[int, ...]:
    """How many blocks of every stage recompute where ranks recompute so many."""
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
    """What calls cost: `seconds` each, and by their roles those of the forward pass and bytes."""

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
