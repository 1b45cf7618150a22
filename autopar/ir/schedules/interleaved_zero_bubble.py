"""Interleaved zero bubble: interleaved 1F1B whose backward passes are split, so that weights' parts fill the bubble.

    idle = (p-1)·max(F, I, F+I-W)/v   for n ≥ p

With one stage on a rank this is ZB-H1: (p-1)(F+B-2W) where W ≤ F, I, and p micro-batches in flight on every rank
(Qi et al., table 2, whose T_B is I here).
"""

from typing import Any

from autopar.ir.schedules.elementwise import maximum, where
from autopar.ir.schedules.interleaved_1f1b import interleaved_order, round_size, uneven_rounds
from autopar.ir.schedules.schedule import PassCounts, Schedule


def _critical_paths(p: Any, v: Any, n: Any) -> list[PassCounts]:
    """The order is fixed: rank r runs its weights' parts r backward passes later, and gains W only where W ≤ F, I.

    F alone: the last rank begins (p-1) forward passes late. I alone: the first rank gets its last gradient so late.
    """
    missing = maximum(0, p - n)
    late = p - 1 + (v - 1) * missing
    saved = where(n < p, v * n - 1, p - 1)
    return [
        PassCounts(late, missing, 0),
        PassCounts(v * missing, p - 1, 0),
        PassCounts(late, late, -saved),
        PassCounts(late, p - 1, 1 - n),
    ]


SCHEDULE = Schedule(
    name="interleaved-zero-bubble",
    torch_name="InterleavedZeroBubble",
    source='Qi et al. 2024, "Zero bubble pipeline parallelism", ZB1P, tables 1 and 2',
    published=(2024, 1),
    most_stages=None,
    splits_backward=True,
    rank_order=lambda rank, p, v, n: interleaved_order(rank, p, v, n, splits=True),
    refusal=uneven_rounds,
    critical_paths=_critical_paths,
    is_exact=lambda p, v, n, is_balanced: n >= p or v == 1,
    in_flight=lambda p, v, n, r: (v - 1) * round_size(p, n) + p,
    warm_up=lambda p, v, n, r: (v - 1) * round_size(p, n) + p - r,
)
