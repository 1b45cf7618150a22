"""Best-first search over lower bounds: candidates are priced exactly until the best one is proven.

Candidates are priced in the order of their bounds until no bound is below the best price. Candidates of one *class*
have the same pipeline. If an exact price exceeds its bound, the bounds of the whole class are raised.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.arrays import Floats, Integers

ROUNDING = 1e-9  # of a price: a bound that is smaller by less than this counts as equal
AHEAD = 10
LEAST_AHEAD = 8  # pricing several together costs little more than pricing one


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The exact price of a candidate, infinite if it does not fit."""

    index: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Prices in the order of pricing, a lower bound of all candidates, and whether the best price is proven."""

    priced: tuple[Exact, ...]
    bound: float
    is_proven: bool

    @property
    def best(self) -> Exact | None:
        """The first of the smallest prices. None if no candidate fits."""
        priced = [plan for plan in self.priced if np.isfinite(plan.value)]
        return min(priced, key=lambda plan: plan.value) if priced else None

    @property
    def gap(self) -> float:
        """The part of the best price that a better candidate could save at most."""
        if self.best is None or self.is_proven:
            return 0.0
        return max(0.0, 1 - self.bound / self.best.value)


def best_first(
    bounds: Floats,
    classes: Integers,
    price: Callable[[int], float],
    *,
    first: Sequence[int] = (),
    most: int,
    should_continue: Callable[[], bool] = lambda: True,
    ties: Floats | None = None,
    prefetch: Callable[[Sequence[int]], None] = lambda _: None,
    added: Callable[[int, Integers], Floats | float] | None = None,
    on_bound: Callable[[float, float], None] = lambda best, bound: None,
) -> Proof:
    """Price candidates from the smallest bound on, until no bound is below the best price.

    Candidates with an infinite bound are not priced. Those of `first` are priced whatever the time. Those of one of
    `classes` have the same pipeline. `added` is the increase of their bounds by a price, by default the price less its
    bound. `prefetch` gets candidates that are likely to be priced next, because prices together are cheaper.
    """
    open_ = _Open(bounds, classes)
    priced: list[Exact] = []
    best = np.inf
    is_told = np.zeros(len(bounds), dtype=bool)
    is_told[list(first)] = True
    prefetch(list(first))

    def take(index: int) -> None:
        nonlocal best
        if not is_told[index]:
            likely = open_.likely(is_told, best)
            is_told[[*likely, index]] = True
            prefetch(likely)
        value = price(index)
        priced.append(Exact(index=index, value=value))
        open_.close(index)
        if np.isfinite(value):
            if value < best:
                best = value
                open_.keep_below(best)
            peers = open_.alike(index)
            more = max(0.0, value - bounds[index]) if added is None else added(index, open_.index[peers])
            raised = bounds[open_.index[peers]] + more * (1 - ROUNDING)
            open_.left[peers] = np.maximum(open_.left[peers], raised)

    for index in dict.fromkeys(first):
        if np.isfinite(bounds[index]) and len(priced) < most:
            take(index)
    while len(priced) < most and (should_continue() or not np.isfinite(best)):
        index, bound = open_.smallest(ties)
        if bound >= best * (1 - ROUNDING) or not np.isfinite(bound):
            return Proof(priced=tuple(priced), bound=best, is_proven=True)
        on_bound(best, bound)
        take(index)
    remaining = open_.smallest(None)[1]
    proven = remaining >= best * (1 - ROUNDING)
    return Proof(priced=tuple(priced), bound=min(best, remaining), is_proven=bool(proven))


class _Open:
    """The candidates that may still be the best, in order: their numbers in `index`, their raised bounds in `left`."""

    def __init__(self, bounds: Floats, classes: Integers) -> None:
        self.index = np.flatnonzero(np.isfinite(bounds))
        self.left, self.classes, self.class_of = bounds[self.index], classes[self.index], classes

    def keep_below(self, best: float) -> None:
        mine = self.left < best
        self.index, self.left, self.classes = self.index[mine], self.left[mine], self.classes[mine]

    def alike(self, index: int) -> Integers:
        """The places of the open candidates of a candidate's class."""
        return np.flatnonzero((self.classes == self.class_of[index]) & np.isfinite(self.left))

    def close(self, index: int) -> None:
        place = int(np.searchsorted(self.index, index))
        if place < len(self.index) and self.index[place] == index:
            self.left[place] = np.inf

    def smallest(self, ties: Floats | None) -> tuple[int, float]:
        """The candidate with the smallest bound, and this bound, which is infinite if none is open."""
        if not len(self.left):
            return -1, np.inf
        place = int(np.argmin(self.left))
        if ties is not None and np.isfinite(self.left[place]):
            tied = np.flatnonzero(self.left <= self.left[place])
            place = int(tied[np.argmin(ties[self.index[tied]])])
        return int(self.index[place]), float(self.left[place])

    def likely(self, is_told: NDArray[np.bool_], best: float) -> list[int]:
        """The first open candidate of each class, smallest bound first, and more of them if the classes are few."""
        below = np.flatnonzero((self.left < best) & ~is_told[self.index])
        order = below[np.argsort(self.left[below], kind="stable")]
        first = np.sort(np.unique(self.classes[order], return_index=True)[1])
        likely = self.index[[*order[first][:AHEAD], *order[:LEAST_AHEAD]]]
        return [int(index) for index in dict.fromkeys(likely.tolist())][: max(len(first), LEAST_AHEAD)][:AHEAD]
