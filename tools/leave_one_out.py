"""Leaving a source or an engine out: the rows that a model may be fitted on before it predicts the others.

Rows of one source share machine, software and authors, so a model fitted on some of them knows the others. A fair
prediction of a source comes from the other sources alone. If no other source ran the device and precision, it is an
extrapolation. Such rows are in no fold, unless asked for. Rows of one engine share its mechanisms. So a prediction
without the engine shows what the constants are worth for a framework that nobody fitted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.cost_model.published.machine import engine_of
from autopar.cost_model.published.row import Row

DEVICE = ("gpu_type", "precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Indices of rows: `test` are of one `group`, a source or an engine, and `train` of every other one."""

    group: str
    train: tuple[int, ...]
    test: tuple[int, ...]


def source(row: Row) -> str:
    """The source of a row. Rows without one are a source of their own."""
    return row.source_key or ""


def engine(row: Row) -> str:
    """The engine of a row's framework, in all its years: megatron-2021 is left out with megatron."""
    return re.sub(r"-20[0-9]{2}$", "", engine_of(row).name)


def folds(
    rows: Sequence[Row], *, group: Callable[[Row], str] = source, elsewhere: Sequence[str] = DEVICE
) -> tuple[Fold, ...]:
    """One fold per group of rows, sorted by it.

    A row is a test row if a row of another group has the same values in the columns `elsewhere`. A group without test
    rows has no fold. With `elsewhere` empty every row is a test row once. Pass only rows with a measured time, because
    the others teach a model nothing about their device.
    """
    of = [group(row) for row in rows]
    found = []
    for name in sorted(set(of)):
        train = tuple(i for i, other in enumerate(of) if other != name)
        known = {tuple(getattr(rows[i], column) for column in elsewhere) for i in train}
        test = tuple(
            i
            for i, row in enumerate(rows)
            if of[i] == name and tuple(getattr(row, column) for column in elsewhere) in known
        )
        if test:
            found.append(Fold(group=name, train=train, test=test))
    return tuple(found)
