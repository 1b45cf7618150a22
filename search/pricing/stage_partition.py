"""The exact partition of a sequence of calls into pipeline stages that makes the slowest stage fastest.

A weight is the seconds of one call (`autopar.search.pricing.cuts`). Dynamic programming splits n contiguous calls into
p stages so that the largest sum is smallest, in O(p·n²) (Bellman's recursion for linear partitioning). Of equal
partitions the smallest sum of squares wins, so that the other stages are even too. Every stage holds a trained
parameter. Without one its backward pass would have nothing to do.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.errors import PlanError

_TIE = 1e-12  # a smaller relative difference is rounding, which differs between processors


def partition(weights: Sequence[float], parts: int, *, can_be_alone: Sequence[bool] | None = None) -> tuple[int, ...]:
    """Cuts into contiguous parts with the smallest largest sum. Every part has an element that can be alone."""
    return _partition(tuple(weights), parts, tuple(can_be_alone or [True] * len(weights)))


@lru_cache(maxsize=256)  # candidates that differ only in data parallelism have the same cuts
def _partition(weights: tuple[float, ...], parts: int, can_be_alone: tuple[bool, ...]) -> tuple[int, ...]:
    for longest in (_longest(weights, parts), len(weights)):
        cuts = partition_with(weights, parts, None, longest, can_be_alone=can_be_alone)
        if cuts is not None:
            return cuts
    raise PlanError(f"{len(weights)} calls cannot be cut into {parts} stages")


# seconds beside the weights, for the parts at a position from some elements up to others
More = Callable[[int, NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]


def partition_with(
    weights: Sequence[float], parts: int, more: More | None, longest: int, *, can_be_alone: Sequence[bool]
) -> tuple[int, ...] | None:
    """`partition` for parts of at most `longest` elements that take `more` seconds in their place, perhaps infinite."""
    anchors = np.concatenate([[0], np.cumsum(can_be_alone)])
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=np.float64))])
    starts = _starts(sums, anchors, parts, longest, more)
    if starts is None:
        return None
    cuts, stop = [], len(weights)
    for start in reversed(starts):
        stop = int(start[stop])
        cuts.append(stop)
    return tuple(reversed(cuts))


def _longest(weights: Sequence[float], parts: int) -> int:
    """The most elements that a part of the best partition can have."""
    above = np.maximum(np.asarray(weights, dtype=np.float64), 0.0)
    sums = np.concatenate([[0.0], np.cumsum(above)])
    room = float(np.sum(above - weights))
    most = (sums[-1] / parts + above.max()) * (1 + 1e-9) + room
    counts = np.searchsorted(sums, sums + most, side="right") - 1 - np.arange(len(sums))
    return max(1, min(int(counts.max()), len(above)))


def _starts(
    sums: NDArray[np.float64], anchors: NDArray[np.int64], parts: int, longest: int, more: More | None
) -> list[NDArray[np.int64]] | None:
    """The position where the last part begins, for every number of parts above 1 and every number of elements.

    Parts have at most `longest` elements. None if there is no such partition. `sums` and `anchors` add up the elements
    before each position.
    """
    stops = np.arange(len(sums))
    begins = stops[:, None] - np.arange(longest, 0, -1)[None, :]  # [i, k]: where the k-th longest part before i begins
    inside = np.maximum(begins, 0)
    part_s = part = sums[stops][:, None] - sums[inside]
    part_s[(begins < 0) | (anchors[stops][:, None] <= anchors[inside])] = np.inf
    largest = np.where((stops <= longest) & (anchors > 0), sums, np.inf)
    largest = largest if more is None else largest + more(0, np.zeros_like(stops), stops)
    squares, cuts, count = largest**2, np.zeros((parts - 1, len(sums)), dtype=np.int64), len(sums) - 1
    worst, even, firsts = np.empty_like(part), np.empty_like(part), stops * longest
    for position in range(1, parts):
        left = parts - 1 - position
        # ends of the part: every later part takes from one to `longest` of the remaining elements
        ends = slice(max(position + 1, count - longest * left), max(count - left, 0) + 1)
        froms, whole, of_part = inside[ends], worst[ends], part[ends]
        if more is not None:
            of_part = part_s[ends] + more(position, froms, stops[ends, None])
        np.maximum(largest.take(froms, out=whole, mode="clip"), of_part, out=whole)
        best = whole.min(axis=1)
        sum_of = np.add(squares.take(froms, out=even[ends], mode="clip"), of_part**2, out=even[ends])
        sum_of[whole > (best * (1 + _TIE))[:, None]] = np.inf
        is_even = sum_of <= (sum_of.min(axis=1) * (1 + _TIE))[:, None]  # of even partitions, the longest last part
        at = is_even.argmax(axis=1) + firsts[: len(best)]  # in the rows one after the other
        largest.fill(np.inf)
        squares.fill(np.inf)
        cuts[position - 1, ends] = froms.take(at)
        largest[ends], squares[ends] = best, sum_of.take(at)
    return list(cuts) if np.isfinite(largest[-1]) else None
