"""The order that predictions give to the layouts of the same work, compared with the measured order.

Runs of the same model, devices, batch, sequence and precision differ only in their layout: degrees, ZeRO stage,
micro-batch and recomputation. A group has at least `MIN_LAYOUTS` measured and predicted layouts, and two figures:

    rank correlation   Spearman's: Pearson's correlation of the ranks, equal values sharing the mean of their ranks
    measured regret    measured time of the layout predicted fastest / the best measured time - 1

A layout with several runs counts once, with the median of their times. If several layouts are predicted equally fast,
the slowest of them counts. If all predictions are equal, the correlation is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from autopar.cost_model.published.row import Row
from autopar.ir.arrays import Floats

MIN_LAYOUTS = 5
WORK = (
    *("model", "layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads", "vocab", "moe_experts"),
    *("gpu_type", "gpu_mem_gb", "num_gpus", "global_batch", "seq_len", "precision"),
)
_LAYOUT = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero", "zero_detail", "micro_batch", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTimes:
    """A row that was measured and predicted, in seconds."""

    row: Row
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedGroup:
    """Layouts of the same work, the row predicted fastest and the row measured fastest."""

    name: str
    layouts: int
    correlation: float
    regret: float
    predicted_best: str
    measured_best: str


def ranked_groups(timed: Iterable[RowTimes]) -> tuple[RankedGroup, ...]:
    """Every group of at least `MIN_LAYOUTS` layouts of the same work, in the order of their first rows."""
    return tuple(_ranked(layouts) for layouts in same_work(timed))


def same_work(timed: Iterable[RowTimes]) -> list[list[RowTimes]]:
    """Groups of at least `MIN_LAYOUTS` layouts of the same work, each layout once."""
    works: dict[tuple[object, ...], list[RowTimes]] = {}
    for row in timed:
        works.setdefault(_values(row.row, WORK), []).append(row)
    merged = [_merged(group) for group in works.values()]
    return [layouts for layouts in merged if len(layouts) >= MIN_LAYOUTS]


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 where one side is constant."""
    a, b = (ranks - (len(ranks) - 1) / 2 for ranks in (_ranks(left), _ranks(right)))
    spread = float(a @ a) * float(b @ b)
    return float(a @ b) / spread**0.5 if spread else 0.0


def _ranks(values: Sequence[float]) -> Floats:
    """The rank of each value. Equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts + 1) / 2)[places]
    return ranks


def _merged(group: Sequence[RowTimes]) -> list[RowTimes]:
    layouts: dict[tuple[object, ...], list[RowTimes]] = {}
    for row in group:
        layouts.setdefault(_values(row.row, _LAYOUT), []).append(row)
    return [
        RowTimes(
            row=same[0].row,
            measured_s=median(t.measured_s for t in same),
            predicted_s=median(t.predicted_s for t in same),
        )
        for same in layouts.values()
    ]


def _ranked(layouts: Sequence[RowTimes]) -> RankedGroup:
    fastest = min(t.predicted_s for t in layouts)
    chosen = max((t for t in layouts if t.predicted_s == fastest), key=lambda t: t.measured_s)
    best = min(layouts, key=lambda t: t.measured_s)
    row = best.row
    return RankedGroup(
        name=f"{row.model or 'model not named'} ({row.layers} layers, {row.n_heads} heads), {row.num_gpus} × "
        f"{row.gpu_type}, batch {row.global_batch}, sequence {row.seq_len}, {row.precision}",
        layouts=len(layouts),
        correlation=spearman([t.predicted_s for t in layouts], [t.measured_s for t in layouts]),
        regret=chosen.measured_s / best.measured_s - 1,
        predicted_best=chosen.row.id,
        measured_best=best.row.id,
    )


def _values(row: Row, names: Sequence[str]) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in names)
