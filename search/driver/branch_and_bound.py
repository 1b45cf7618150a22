"""Best-first search over lower bounds: candidates are priced exactly until the best one is proven.

Candidates are priced in the order of their bounds until no bound is below the best price. Candidates of one *class*
have the same pipeline. If an exact price exceeds its bound, the bounds of the whole class are raised.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.arrays import Floats, Integers

ROUNDING = 1e-9  # of a price: a bound that is smaller by less than this counts as equal
AHEAD = 24
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
        found = [one for one in self.priced if np.isfinite(one.value)]
        return min(found, key=lambda one: one.value) if found else None

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

    Args:
        bounds: A lower bound for each candidate; candidates with an infinite bound are not priced.
        classes: A number for each candidate; candidates of one class have the same pipeline.
        price: The exact price of a candidate, infinite if it does not fit.
        first: Candidates to price before all others.
        most: The largest number of prices.
        should_continue: False stops the search once a candidate fits.
        ties: Orders candidates of equal bounds.
        prefetch: Gets candidates that are likely to be priced next: pricing several together is cheaper.
        added: The increase of a class's bounds by the exact price of a candidate; by default its price less its bound.
        on_bound: Gets the best price so far and the smallest bound.
    """
    left = bounds.copy()
    found: list[Exact] = []
    best = np.inf
    is_told = np.zeros(len(bounds), dtype=bool)
    is_told[list(first)] = True
    prefetch(list(first))

    def take(index: int) -> None:
        nonlocal best, left
        if not is_told[index]:
            likely = _likely(np.where(is_told, np.inf, left), classes, best)
            is_told[[*likely, index]] = True
            prefetch(likely)
        value = price(index)
        found.append(Exact(index=index, value=value))
        bound = bounds[index]
        left[index] = np.inf
        if np.isfinite(value):
            best = min(best, value)
            alike = np.flatnonzero((classes == classes[index]) & np.isfinite(left))
            more = max(0.0, value - bound) if added is None else added(index, alike)
            left[alike] = np.maximum(left[alike], bounds[alike] + more * (1 - ROUNDING))

    for index in dict.fromkeys(first):
        if np.isfinite(left[index]) and len(found) < most and should_continue():
            take(index)
    while len(found) < most and (should_continue() or not np.isfinite(best)):
        index = _smallest(left, ties) if len(left) else -1
        if index < 0 or left[index] >= best * (1 - ROUNDING) or not np.isfinite(left[index]):
            return Proof(priced=tuple(found), bound=best, is_proven=True)
        on_bound(best, float(left[index]))
        take(index)
    remaining = float(left.min()) if len(left) else np.inf
    proven = remaining >= best * (1 - ROUNDING)
    return Proof(priced=tuple(found), bound=min(best, remaining), is_proven=bool(proven))


def _smallest(left: Floats, ties: Floats | None) -> int:
    first = int(np.argmin(left))
    if ties is None or not np.isfinite(left[first]):
        return first
    alike = np.flatnonzero(left <= left[first])
    return int(alike[np.argmin(ties[alike])])


def _likely(left: Floats, classes: Integers, best: float) -> list[int]:
    """The first candidate of each class with a bound below the best price, smallest bound first.

    More candidates of these classes follow if the classes are few.
    """
    below = np.flatnonzero(left < best)
    order = below[np.argsort(left[below], kind="stable")]
    first = np.sort(np.unique(classes[order], return_index=True)[1])
    likely = [*order[first][:AHEAD], *order[:LEAST_AHEAD]]
    return [int(index) for index in dict.fromkeys(likely)][: max(len(first), LEAST_AHEAD)][:AHEAD]
