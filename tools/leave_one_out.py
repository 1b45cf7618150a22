"""Leaving a source out: the rows that a model may be fitted on before it predicts the rows of one source.

Rows of one source share machine, software and authors, so a model fitted on some of them knows the others. A fair
prediction of a source comes from the other sources alone. If no other source ran the device and precision, it is an
extrapolation. Such rows are in no fold, unless asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_model.published.row import Row

DEVICE = ("gpu_type", "precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Indices of rows: `test` are of `source`, `train` of every other one."""

    source: str
    train: tuple[int, ...]
    test: tuple[int, ...]


def folds(rows: Sequence[Row], *, elsewhere: Sequence[str] = DEVICE) -> tuple[Fold, ...]:
    """One fold per `source_key`, sorted by it; rows without a source are a source of their own.

    A row is a test row if a row of another source has the same values in the columns `elsewhere`. A source without test
    rows has no fold. With `elsewhere` empty every row is a test row once. Pass only rows with a measured time, because
    the others teach a model nothing about their device.
    """
    sources = sorted({row.source_key or "" for row in rows})
    found = []
    for source in sources:
        train = tuple(i for i, row in enumerate(rows) if (row.source_key or "") != source)
        known = {tuple(getattr(rows[i], name) for name in elsewhere) for i in train}
        test = tuple(
            i
            for i, row in enumerate(rows)
            if (row.source_key or "") == source and tuple(getattr(row, name) for name in elsewhere) in known
        )
        if test:
            found.append(Fold(source=source, train=train, test=test))
    return tuple(found)
