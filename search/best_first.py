"""Best first over lower bounds: which candidates to price exactly, in which order, and when the best is proven.

Candidates are priced in the order of their bounds until no bound is below the best price. Those of one *class* differ
in nothing that their pipelines feel, so that what the exact price of one adds to its bound is added to all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
ROUNDING = 1e-9  # of a price: bounds above it by less are not below it


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """What a candidate really costs; infinite where it does not fit."""

    index: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Prices in the order in which they were found, the bound of what was not priced, and whether that is proof."""

    priced: tuple[Exact, ...]
    bound: float
    is_proven: bool

    @property
    def best(self) -> Exact | None:
        """The first of the smallest prices; None where nothing fits."""
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
    goes_on: Callable[[], bool] = lambda: True,
) -> Proof:
    """Price at most `most` candidates, `first` those named, while `goes_on` or none fits yet; infinite bounds are left
    out."""
    left = bounds.copy()
    found: list[Exact] = []
    best = np.inf

    def take(index: int) -> None:
        nonlocal best, left
        value = price(index)
        found.append(Exact(index=index, value=value))
        bound = bounds[index]
        left[index] = np.inf
        if np.isfinite(value):
            best = min(best, value)
            alike = (classes == classes[index]) & np.isfinite(left)
            left[alike] = np.maximum(left[alike], bounds[alike] + max(0.0, value - bound) * (1 - ROUNDING))

    for index in dict.fromkeys(first):
        if np.isfinite(left[index]) and len(found) < most and goes_on():
            take(index)
    while len(found) < most and (goes_on() or not np.isfinite(best)):
        index = int(np.argmin(left)) if len(left) else -1
        if index < 0 or left[index] >= best * (1 - ROUNDING) or not np.isfinite(left[index]):
            return Proof(priced=tuple(found), bound=best, is_proven=True)
        take(index)
    remaining = float(left.min()) if len(left) else np.inf
    proven = remaining >= best * (1 - ROUNDING)
    return Proof(priced=tuple(found), bound=min(best, remaining), is_proven=bool(proven))
