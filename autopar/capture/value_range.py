"""The range of integers that a value may hold."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

Rising = Callable[[float], float]  # a function that never falls
_INTEGERS = range(-(2**61), 2**61)  # more than any operator meets


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

    def before(self, *ends: Rising) -> "ValueRange":
        """The range of x such that a result is in this range. `ends` is the result, or the least and the largest."""
        least, largest = ends[0], ends[-1]

        def single(values: frozenset[int]) -> frozenset[int]:
            pairs = ((v, _first(least, v)) for v in values)
            return frozenset(int(x) for v, x in pairs if least(x) == largest(x) == v)

        low, high = _first(least, self.low), _first(largest, self.high)
        return replace(self, low=low, high=high, extra=single(self.extra), ignored=single(self.ignored))


def _first(function: Rising, bound: float) -> float:
    """The first integer whose result is not below a bound. -inf if all are such integers, and inf if none is."""
    at = bisect_left(_INTEGERS, bound, key=function)
    return -inf if at == 0 else inf if at == len(_INTEGERS) else _INTEGERS[at]
