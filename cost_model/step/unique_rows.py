"""The distinct combinations of a few columns among very many rows. Small whole numbers need no sorting.

Every row gets the number of its combination. The values of a column index a table, which marks the values that occur.
Counting the marks numbers the values. Mixed radix joins the numbers of two columns. If the next table would have more
entries than there are rows, the joined numbers are marked and counted first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALL_TABLE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Distinct:
    """The distinct combinations of some rows."""

    index: NDArray[np.intp] | None  # the number of each row's combination; None if all rows have the same
    rows: NDArray[np.intp]  # one row of each combination


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """Values of a column, or combinations of columns, as whole numbers below `limit`; None if all are equal."""

    numbers: NDArray[np.intp] | None
    limit: int


def numbered(column: NDArray[Any]) -> Numbered:
    """A column with whole numbers in place of its values. Equal values get equal numbers."""
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
    """The value of each row, from `values` by combination and the rows' `index`. A single value stays single."""
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
