"""Which combinations of a few columns occur among very many rows, without sorting where numbers are small and whole.

Rows are numbered by their combination: a column's values are marked in a table that the values themselves index, and
counted through; two columns' numbers make one by mixed radix, which is marked and counted again where the table would
become larger than there are rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALL_TABLE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Distinct:
    """`index`: for every row the number of its combination, or None where there is but one; `rows`: for every
    combination one row that has it."""

    index: NDArray[np.intp] | None
    rows: NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A column's values, or several columns' combinations, as whole numbers below `limit`; None where all are one."""

    numbers: NDArray[np.intp] | None
    limit: int


def numbered(column: NDArray[Any]) -> Numbered:
    """Numbers in place of a column's values; equal for equal values."""
    least, most = column.min(), column.max()
    if least == most:
        return Numbered(numbers=None, limit=1)
    if least >= 0 and most < _table_limit(column):
        numbers = column.astype(np.intp)
        if column.dtype.kind != "f" or np.array_equal(numbers, column):
            return _counted(numbers, int(most) + 1)
    values, found = np.unique(column, return_inverse=True)
    return Numbered(numbers=found, limit=len(values))


def distinct(columns: Sequence[Numbered], num_rows: int) -> Distinct:
    """The combinations of columns that have been numbered."""
    numbers, limit = None, 1
    for column in columns:
        if column.numbers is None:
            continue
        if numbers is None:
            numbers, limit = column.numbers, column.limit
            continue
        if limit * column.limit > _table_limit(numbers):
            found = _counted(numbers, limit)
            assert found.numbers is not None
            numbers, limit = found.numbers, found.limit
        numbers, limit = numbers * column.limit + column.numbers, limit * column.limit
    if numbers is None:
        return Distinct(index=None, rows=np.zeros(1, dtype=np.intp))
    found = _counted(numbers, limit)
    assert found.numbers is not None
    rows = np.empty(found.limit, dtype=np.intp)
    rows[found.numbers] = np.arange(num_rows)
    return Distinct(index=found.numbers, rows=rows)


def spread(values: NDArray[Any], index: Any) -> NDArray[Any]:
    """Values of combinations, for rows by the numbers of theirs; one value stays one."""
    return values if values.size == 1 else values[index]


def _table_limit(rows: NDArray[Any]) -> int:
    return max(SMALL_TABLE, len(rows))


def _counted(numbers: NDArray[np.intp], limit: int) -> Numbered:
    """The same numbers without gaps."""
    if limit > _table_limit(numbers):
        values, found = np.unique(numbers, return_inverse=True)
        return Numbered(numbers=found, limit=len(values))
    is_there = np.zeros(limit, dtype=bool)
    is_there[numbers] = True
    places = np.cumsum(is_there) - 1
    return Numbered(numbers=places[numbers], limit=int(places[-1]) + 1)
