"""What comes next: the best plan of each other combination of devices, stages, tensor degree and ZeRO stage.

Exact prices that the proof has come first, by value. A candidate without one is priced only where its bound, raised by
what exact prices of alike pipelines showed, is below the last that is told, and at most `MORE` times as often as plans
are asked for. Tensor degrees without labels stay out: their bounds were too far from the best to choose any.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.search.exact import Priced
from autopar.search.plan_search import Searched, added_seconds, classes_of

MORE = 2  # exact prices for each plan that is asked for
Key = tuple[int, ...]


def next_best(found: Searched, price: Callable[[int], Priced | None], top: int) -> list[tuple[int, Priced]]:
    """At most `top` candidates that fit, the best first, without the best of all. `price` gives an exact price, None
    where there is none."""
    c, goal = found.candidates, found.goal
    classes, seconds = classes_of(c, goal), raised_seconds(found)
    chosen: dict[Key, tuple[float, int, Priced]] = {}

    def key(index: int) -> Key:
        return (int(c.num_devices[index]), int(c.pp[index]), int(c.tp[index]), int(c.zero[index]))

    def take(index: int, one: Priced) -> None:
        value = goal.value(one)
        if one.fits and (key(index) not in chosen or value < chosen[key(index)][0]):
            chosen[key(index)] = (value, index, one)

    for index, one in found.exact.items():
        take(index, one)
    is_open = np.isin(c.tp, found.labelled)
    is_open[list(found.exact)] = False
    for _ in range(MORE * top):
        values = np.where(is_open, goal.bounds(c, replace(found.screened, seconds=seconds)), np.inf)
        following = _first_below(values, chosen, key, top)
        if following is None:
            break
        is_open[following] = False
        exact = price(following)
        if exact is not None:
            take(following, exact)
            raise_alike(found, seconds, classes, following, exact)
    order = sorted(chosen.values(), key=lambda one: one[0])
    return [(index, one) for _, index, one in order[1 : top + 1]]


def _first_below(
    values: NDArray[np.float64],
    chosen: dict[Key, tuple[float, int, Priced]],
    key: Callable[[int], Key],
    top: int,
) -> int | None:
    """The candidate of the least bound that could still be told: below the last of those that are, and below what its
    own combination has."""
    told = sorted(value for value, _, _ in chosen.values())
    last = told[top] if len(told) > top else np.inf
    for index in np.argsort(values, kind="stable"):
        if not values[index] < last:
            return None
        own = chosen.get(key(int(index)))
        if own is None or values[index] < own[0]:
            return int(index)
    return None


def raised_seconds(found: Searched) -> NDArray[np.float64]:
    """Bounds in seconds, raised by what exact prices of candidates whose pipelines run the same add to theirs."""
    seconds = found.screened.seconds.copy()
    classes = classes_of(found.candidates, found.goal)
    for index, one in found.exact.items():
        raise_alike(found, seconds, classes, index, one)
    return seconds


def raise_alike(
    found: Searched, seconds: NDArray[np.float64], classes: NDArray[np.int64], index: int, one: Priced
) -> None:
    """Raise `seconds` of the candidates whose pipelines run as that of one which was priced exactly, in place."""
    bounds = found.screened.seconds
    if one.fits and np.isfinite(bounds[index]):
        alike = np.flatnonzero((classes == classes[index]) & np.isfinite(seconds))
        more = added_seconds(found.screened, index, one, alike)
        seconds[alike] = np.maximum(seconds[alike], bounds[alike] + more)
