"""The ratio of two plans' step times, measured in turns, and its interval.

Machines drift, and neighbours disturb both plans of a round alike. So the ratio of a round is worth more than the times
of two trials minutes apart. The interval of the median follows from order statistics, and assumes no distribution. The
k-th smallest and the k-th largest of n ratios enclose the median with a probability of 1 - 2·P(B(n, 1/2) < k) (Conover
1999, "Practical Nonparametric Statistics", section 3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, inf
from statistics import median

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median, and the interval that has it with a probability of 95 %. Few values give no interval."""

    median: float
    low: float = 0.0
    high: float = inf

    def times(self, factor: float) -> "Spread":
        """The spread of values that are `factor` times as large."""
        return Spread(median=self.median * factor, low=self.low * factor, high=self.high * factor)


def median_interval(values: Sequence[float]) -> Spread:
    """The median of values, and its interval."""
    ordered, outside = sorted(values), rank_of_interval(len(values))
    low, high = (0.0, inf) if outside is None else (ordered[outside], ordered[-1 - outside])
    return Spread(median=median(ordered), low=low, high=high)


def rank_of_interval(count: int) -> int | None:
    """The number of values outside each end of the interval. None if so few values give no interval."""
    chance, rank = 0.0, None
    for outside in range((count + 1) // 2):
        chance += 2 * comb(count, outside) / 2**count
        if chance > 1 - CONFIDENCE:
            break
        rank = outside
    return rank
