"""The distinct combinations of a few columns among very many rows. Small whole numbers need no sorting.

Values index a table of marks, and mixed radix joins the numbers of two columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

SMALL_TABLE = 1 << 16
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distinct:
    """The distinct values of a column, or combinations of columns, as whole numbers below `count`."""

    index: NDArray[np.intp] | None  # the number of each row's combination; None if all rows have the same
    count: int

    def numbers(self, size: int) -> NDArray[np.intp]:
        """The number of the combination of each of `size` rows."""
        return np.zeros(size, dtype=np.intp) if self.index is None else self.index

    @property
    def rows(self) -> NDArray[np.intp]:
        """One row of each combination."""
        rows = np.zeros(self.count, dtype=np.intp)
        if self.index is not None:
            rows[self.index] = np.arange(len(self.index))
        return rows


_ALIKE = Distinct(index=None, count=1)


def numbered(column: NDArray[Any]) -> Distinct:
    """The distinct values of a column."""
    least, most = column.min(), column.max()
    if least == most:
        return _ALIKE
    if least >= 0 and most < _table_limit(column):
        numbers = column.astype(np.intp, copy=False)
        if column.dtype.kind != "f" or np.array_equal(numbers, column):
            return _counted(numbers, int(most) + 1)
    values, index = np.unique(column, return_inverse=True)
    return Distinct(index=index, count=len(values))


def distinct(columns: Sequence[Distinct]) -> Distinct:
    """The combinations of numbered columns."""
    numbers, limit = None, 1
    for column in columns:
        if column.index is None:
            continue
        if numbers is None:
            numbers, limit = column.index, column.count
            continue
        if limit * column.count > _table_limit(numbers):
            joined = _counted(numbers, limit)
            assert joined.index is not None
            numbers, limit = joined.index, joined.count
        numbers, limit = numbers * column.count + column.index, limit * column.count
    return _ALIKE if numbers is None else _counted(numbers, limit)


def spread(values: _V, index: Any) -> _V:
    """The value of each row, from `values` by combination and the rows' `index`. A single value stays single.

    Values are arrays, and tuples, dictionaries and dataclasses of them.
    """
    rows: Any = values
    if isinstance(values, np.ndarray):
        rows = values if values.size == 1 else values[index]
    elif isinstance(values, tuple):
        rows = tuple(spread(each, index) for each in values)
    elif isinstance(values, dict):
        rows = {name: spread(each, index) for name, each in values.items()}
    elif is_dataclass(values):
        kind: Any = type(values)
        rows = kind(**{name: spread(getattr(values, name), index) for name in values.__dataclass_fields__})
    of_rows: _V = rows
    return of_rows


def _table_limit(rows: NDArray[Any]) -> int:
    return max(SMALL_TABLE, len(rows))


def _counted(numbers: NDArray[np.intp], limit: int) -> Distinct:
    """The distinct numbers, which are below `limit`."""
    if limit > _table_limit(numbers):
        values, index = np.unique(numbers, return_inverse=True)
        return Distinct(index=index, count=len(values))
    is_there = np.zeros(limit, dtype=bool)
    is_there[numbers] = True
    places = np.cumsum(is_there) - 1
    return Distinct(index=places[numbers], count=int(places[-1]) + 1)
