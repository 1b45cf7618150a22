"""The dimensions of the search space: their words in `fix`, `forbid` and plans, their values, their place in a plan.

A new dimension is an entry of `DIMENSIONS`, a column of `autopar.search.space.candidates.Candidates`, and the values
that `candidates` lists there. `tests/conformance/test_search_dimensions.py` runs over every entry. This module does not
import numpy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import Problem
from autopar.ir.degrees import Degrees
from autopar.ir.rank_order import ORDERS
from autopar.ir.schedules.registry import SCHEDULE_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One dimension."""

    word: str
    column: str | None  # of `Candidates`; None if other columns decide it
    names: tuple[str, ...] = ()  # the values if they are names; the column holds positions in it
    least: int = 1
    most: int | None = None
    # (value, whether the plan has a pipeline) -> fields of `Degrees`; None: the field called `word`
    to_degrees: Callable[[int, bool], Mapping[str, int]] | None = None
    of_degrees: Callable[[Degrees], Any] | None = None  # the value of a plan; None: the field called `word`

    def problem(self, path: str, value: Any) -> Problem | None:
        """The problem of a user's value. None if the value is legal."""
        if self.names:
            rule = f"must be one of {', '.join(self.names)}"
            return None if value in self.names else Problem(path=path, value=value, rule=rule)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and self.least <= value <= (value if self.most is None else self.most):
            return None
        rule = f"must be a whole number of at least {self.least}"
        if self.most is not None:
            *others, last = range(self.least, self.most + 1)
            rule = f"must be {', '.join(map(str, others))} or {last}"
        return Problem(path=path, value=value, rule=rule)

    def value_at(self, position: int) -> int | str:
        """The value that an element of the column stands for."""
        return self.names[position] if self.names else position

    def fields_of_degrees(self, position: int, *, has_pipeline: bool) -> Mapping[str, Any]:
        """The fields of `Degrees` for an element of the column."""
        if self.to_degrees is not None:
            return self.to_degrees(position, has_pipeline)
        return {self.word: self.value_at(position)}

    def value_of(self, degrees: Degrees) -> Any:
        """The value that a plan has."""
        return getattr(degrees, self.word) if self.of_degrees is None else self.of_degrees(degrees)


def _micro_batches(count: int, has_pipeline: bool) -> Mapping[str, int]:
    """A pipeline's schedule runs the micro-batches. Without a pipeline they are accumulated."""
    return {"accumulate": 1, "micro_batches": count} if has_pipeline else {"accumulate": count, "micro_batches": 1}


DIMENSIONS = (
    Dimension(word="pp", column="pp"),
    Dimension(word="tp", column="tp"),
    Dimension(word="dp", column=None),  # dp_shard · dp_replicate
    Dimension(word="dp_shard", column="dp_shard"),
    Dimension(word="dp_replicate", column="dp_replicate"),
    Dimension(word="zero", column="zero", least=0, most=3),
    Dimension(word="micro_batch", column="micro_batch"),
    Dimension(
        word="micro_batches",
        column="micro_batches",
        to_degrees=_micro_batches,
        of_degrees=lambda degrees: degrees.num_micro_batches,
    ),
    Dimension(word="schedule", column="schedule", names=SCHEDULE_NAMES),
    Dimension(word="virtual_stages", column="virtual"),
    Dimension(word="order", column="order", names=ORDERS),
)
WORDS = tuple(dimension.word for dimension in DIMENSIONS)
BY_WORD = {dimension.word: dimension for dimension in DIMENSIONS}
BY_COLUMN = {dimension.column: dimension for dimension in DIMENSIONS if dimension.column is not None}
