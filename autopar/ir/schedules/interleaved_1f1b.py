"""Interleaved 1F1B: several stages on a rank, through which micro-batches go in rounds of about p.

    idle = (p-1 + (v-1)·max(0, p-n)) (F+B)/v

On the first rank p(1 + (p-1)/(pv)) micro-batches are in flight (Korthikanti et al. 2022, section 4.2).
"""

from collections.abc import Sequence
from typing import Any

from autopar.ir.schedules.action import Pass, in_turns, pass_number
from autopar.ir.schedules.elementwise import maximum
from autopar.ir.schedules.schedule import PassCounts, Schedule


def interleaved_order(rank: int, pp: int, virtual_stages: int, micro_batches: int, *, splits: bool) -> list[int]:
    """Rounds of micro-batches through each of the rank's stages. If split, weights' parts come `rank` passes later."""
    size = micro_batches // max(1, micro_batches // pp)
    ahead = (virtual_stages - 1) * size + (1 if splits else 2) * (pp - 1 - rank)
    warm_up = min(ahead, virtual_stages * micro_batches)
    rounds = [range(begin, begin + size) for begin in range(0, micro_batches, size)]
    mine = range(rank, virtual_stages * pp, pp)

    def passes(kind: Pass, stages: Sequence[int]) -> list[int]:
        each = [pass_number(stage, kind) * micro_batches for stage in stages]
        return [number + micro_batch for part in rounds for number in each for micro_batch in part]

    forward, back = (0, passes("F", mine)), mine[::-1]
    if not splits:
        return in_turns(forward, (warm_up, passes("B", back)))
    return in_turns(forward, (warm_up, passes("I", back)), (warm_up + rank, passes("W", back)))


def round_size(pp: Any, micro_batches: Any) -> Any:
    """Micro-batches of a round."""
    return micro_batches // maximum(1, micro_batches // pp)


def uneven_rounds(pp: int, micro_batches: int) -> tuple[str, str] | None:
    """Why rounds are not of equal size, and the nearest numbers of micro-batches with which they are."""
    if _rounds_fit(pp, micro_batches):
        return None
    near = [n for n in range(1, 2 * micro_batches + pp) if _rounds_fit(pp, n)]
    close = sorted(sorted(near, key=lambda n: abs(n - micro_batches))[:2])
    rule = f"takes micro-batches in {micro_batches // pp} rounds of equal size over {pp} ranks"
    return rule, f"nearest: {' or '.join(str(n) for n in close)}"


def _rounds_fit(pp: int, micro_batches: int) -> bool:
    return micro_batches % max(1, micro_batches // pp) == 0


def _critical_paths(p: Any, v: Any, n: Any) -> list[PassCounts]:
    """With fewer micro-batches than ranks, each further turn of the pipeline waits for the p-n that are missing."""
    late = p - 1 + (v - 1) * maximum(0, p - n)
    return [PassCounts(late, late, late)]


def _warm_up(p: Any, v: Any, n: Any, r: Any) -> Any:
    return (v - 1) * round_size(p, n) + 2 * (p - 1 - r) + 1


SCHEDULE = Schedule(
    name="interleaved-1f1b",
    torch_name="Interleaved1F1B",
    source='Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2.2',
    published=(2021, 4),
    least_stages=2,
    most_stages=None,
    rank_order=lambda rank, p, v, n: interleaved_order(rank, p, v, n, splits=False),
    refusal=uneven_rounds,
    critical_paths=_critical_paths,
    in_flight=_warm_up,
    warm_up=_warm_up,
)
