"""The range of integers that a value may hold."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """The integers from `low` up to, but not including, `high`, and some single values outside."""

    low: float = -inf  # an integer, or -inf without a lower bound
    high: float = inf
    extra: frozenset[int] = frozenset()
    ignored: frozenset[int] = frozenset()  # values that a loss skips, even if other operators do not allow them
    bounded_by: tuple[str, ...] = ()  # the operators and their bounds, in words

    def allows(self, value: float) -> bool:
        return self.low <= value < self.high or value in self.extra

    def covers(self, least: float, most: float) -> bool:
        """Whether all values from `least` to `most` are between `low` and `high`."""
        return self.low <= least and (most < self.high or self.high == inf)

    @property
    def is_empty(self) -> bool:
        return self.low >= self.high

    @property
    def is_bounded(self) -> bool:
        return self.high != inf

    def both(self, other: "ValueRange") -> "ValueRange":
        """The values that both ranges allow."""
        return ValueRange(
            low=max(self.low, other.low),
            high=min(self.high, other.high),
            extra=frozenset(v for v in self.extra | other.extra if self.allows(v) and other.allows(v)),
            ignored=self.ignored | other.ignored,
            bounded_by=tuple(dict.fromkeys(self.bounded_by + other.bounded_by)),
        )

    def shifted(self, step: int) -> "ValueRange":
        """Every value plus `step`."""
        extra, ignored = (frozenset(value + step for value in values) for values in (self.extra, self.ignored))
        return replace(self, low=self.low + step, high=self.high + step, extra=extra, ignored=ignored)

    def before(self, function: Callable[[int], float], low: float, high: float) -> "ValueRange":
        """The range with other ends of the operand of a `function`. A single value stays if its result is allowed."""
        return replace(self, low=low, high=high, extra=frozenset(v for v in self.extra if self.allows(function(v))))
