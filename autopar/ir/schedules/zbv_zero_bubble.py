"""ZBV: two stages on a rank in v order and split backward passes; no rank pauses between its passes if F = I = W.

    idle = the largest of a few sums

The papers on zero bubbles count only the pauses between a rank's first and last pass. *Idle* here is the time in a step
in which the slowest rank does not compute. With F = I = W it is (p-1)F/2, because the last rank begins so much later.
Qi et al. hide that in the next step.
"""

from typing import Any

from autopar.ir.schedules.action import pass_number
from autopar.ir.schedules.elementwise import maximum, minimum, where
from autopar.ir.schedules.schedule import PassCounts, Schedule


def _rank_order(rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[int]:
    """torch plans for at least ``2·pp - 1`` micro-batches and leaves out the missing ones."""
    first, second = rank, 2 * pp - 1 - rank
    planned = max(2 * pp - 1, micro_batches)
    (f, i, w), (f2, i2, w2) = ([pass_number(stage, kind) for kind in ("F", "I", "W")] for stage in (first, second))
    order = [f] * (2 * (pp - rank) - 1) + [f2, f] * rank + [f2, i2, w2] * (pp - rank)
    late = planned - (2 * pp - 1 - rank)  # forward passes of the first stage that are left
    order += [f, i, w, f2, i2, w2] * late + [i, w, f2, i2, w2] * (planned - pp - late)
    order += [i, i2] * rank + [i, w] * (pp - rank)
    order += [w2] * (planned - order.count(w2)) + [w] * (planned - order.count(w))
    done, numbers = dict.fromkeys(order, 0), list[int]()
    for each in order:
        if done[each] < micro_batches:
            numbers.append(each * micro_batches + done[each])
        done[each] += 1
    return numbers


def _critical_paths(p: Any, v: Any, n: Any) -> list[PassCounts]:
    """torch's order is made for F = I = W and kept whatever they are, so that every imbalance opens other gaps.

    Eight paths bind if n ≥ 2p-1. With fewer micro-batches k = 2p-1-n of the warm-up's passes are missing, and the paths
    given are lower bounds. Of these (k, k, 0) is exact for F = I = W.
    """
    d, k = p - 1, maximum(0, 2 * p - 1 - n)
    steady = [
        (0, 1, p - 2),
        (1, 0, p - 2),
        (0, d, 0),
        (2 * d - 1, 2 - p, 0),
        (0, 2 * d, -2 * d),
        (2 * d, -d, -1),
        (2 * d, 0, -2 * d - 1),
        (2 * d - 1, 1, -2 * d),
    ]
    short = [(d, 0, 0), (0, d, 0), (k, k, 0), (2 * maximum(0, k - d), 2 * d, -2 * maximum(0, d - k))]
    short += short[:1] * (len(steady) - len(short))
    return [
        PassCounts(*(where(k > 0, few, many) for few, many in zip(a, b, strict=True)))
        for a, b in zip(short, steady, strict=True)
    ]


SCHEDULE = Schedule(
    name="zbv-zero-bubble",
    torch_name="ZBVZeroBubble",
    source='Qi et al. 2024, "Zero bubble pipeline parallelism", section 6',
    published=(2024, 1),
    least_stages=2,
    most_stages=2,
    placement="v",
    splits_backward=True,
    rank_order=_rank_order,
    critical_paths=_critical_paths,
    is_exact=lambda p, v, n, is_balanced: n >= 2 * p - 1 or is_balanced,
    in_flight=lambda p, v, n, r: minimum(2 * p, n + r + 1),
    warm_up=lambda p, v, n, r: minimum(n, 2 * p - r - 1) + minimum(n, r + 1),
)
