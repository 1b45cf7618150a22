"""The next best plans: the best plan of each other combination of devices, stages, tensor degree and ZeRO stage.

The exact prices of the search come first, by value, and raise the bounds of candidates with the same pipeline. Another
candidate is priced only if its raised bound is below the last reported plan, at most `MORE` for each requested plan.
Tensor degrees without labels stay out, because their bounds were too far from the best.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir.degrees import Degrees
from autopar.search.driver.search import Searched, added_seconds
from autopar.search.pricing.exact import AS_IT_IS, Priced

MORE = 2  # exact prices for each requested plan
DEGREES = ("num_devices", "pp", "tp", "cp", "ep", "zero")  # in which the next best plans differ
ALIKE = (*DEGREES, "micro_batch")
_Key = tuple[int, ...]


def next_plans(found: Searched, top: int, *, alike: bool) -> list[tuple[int, Priced]]:
    """At most `top` plans beside the best plan, the best first.

    They have other degrees. With `alike` plans of the same degrees and another micro-batch fill them up.
    """
    together = found.together
    following = partial(
        next_best, found, together.priced, top, prefetch=lambda likely: together.price([(i, AS_IT_IS) for i in likely])
    )
    plans = following()
    if not alike or len(plans) == top:
        return plans
    told = {index for index, _ in plans}
    more = [one for one in following(columns=ALIKE) if one[0] not in told]
    return sorted([*plans, *more[: top - len(plans)]], key=lambda one: found.goal.value(one[1]))


def next_best(
    found: Searched,
    price: Callable[[int], Priced],
    top: int,
    prefetch: Callable[[Sequence[int]], None] = lambda _: None,
    columns: Sequence[str] = DEGREES,
) -> list[tuple[int, Priced]]:
    """At most `top` candidates that fit, the best first, without the combination of the best plan."""
    c, goal, classes, seconds = found.candidates, found.goal, found.classes, raised_seconds(found)
    chosen: dict[_Key, tuple[float, int, Priced]] = {}
    values_of = [getattr(c, name) for name in columns]

    def key(index: int) -> _Key:
        return tuple(int(values[index]) for values in values_of)

    def take(index: int, one: Priced) -> None:
        value = goal.value(one)
        if one.fits and (key(index) not in chosen or value < chosen[key(index)][0]):
            chosen[key(index)] = (value, index, one)

    known = {**found.together.found, **{(index, AS_IT_IS): one for index, one in found.exact.items()}}
    for (index, _), one in known.items():
        take(index, one)
    is_open = c.of(*found.labelled)
    is_open[[index for index, cut in known if cut == AS_IT_IS]] = False
    left = MORE * top
    while left > 0:
        values = np.where(is_open, goal.bounds(c, replace(found.screened, seconds=seconds)), np.inf)
        following = _first_below(values, classes, chosen, key, top)[:left]
        if not following:
            break
        prefetch(following)
        for index in following:
            exact = price(index)
            take(index, exact)
            raise_alike(found, seconds, index, exact)
        is_open[following] = False
        left -= len(following)
    order = [(index, one) for _, index, one in sorted(chosen.values(), key=lambda each: each[0])]
    best = None if found.best is None else _in_columns(found.best.degrees, columns)
    return [(index, one) for index, one in order if _in_columns(one.degrees, columns) != best][:top]


def _in_columns(degrees: Degrees, columns: Sequence[str]) -> list[Any]:
    return [degrees.world_size if name == "num_devices" else getattr(degrees, name) for name in columns]


def _first_below(
    values: NDArray[np.float64],
    classes: NDArray[np.int64],
    chosen: Mapping[_Key, tuple[float, int, Priced]],
    key: Callable[[int], _Key],
    top: int,
) -> list[int]:
    """Candidates without a price that could still be reported, smallest bound first.

    Their bound is below the last reported plan, and below the best plan of their own combination. Every combination and
    every class occurs once, because one price may raise the bounds of the others.
    """
    told = sorted(value for value, _, _ in chosen.values())
    last = told[top] if len(told) > top else np.inf
    below = np.flatnonzero(values < last)
    found: dict[_Key, int] = {}
    for index in below[np.argsort(values[below], kind="stable")].tolist():
        own = key(index)
        if own in found or (own in chosen and values[index] >= chosen[own][0]):
            continue
        if classes[index] not in classes[list(found.values())]:
            found[own] = index
            if len(found) == top:
                break
    return list(found.values())


def raised_seconds(found: Searched) -> NDArray[np.float64]:
    """Bounds in seconds, raised by the exact prices of candidates with the same pipeline."""
    seconds = found.screened.seconds.copy()
    for index, one in found.exact.items():
        raise_alike(found, seconds, index, one)
    return seconds


def raise_alike(found: Searched, seconds: NDArray[np.float64], index: int, one: Priced) -> None:
    """Raise, in place, the `seconds` of the candidates that have the pipeline of a priced candidate."""
    bounds = found.screened.seconds
    if one.fits and np.isfinite(bounds[index]):
        alike = found.members.like(index)
        alike = alike[np.isfinite(seconds[alike])]
        more = added_seconds(found.screened, index, one, alike)
        seconds[alike] = np.maximum(seconds[alike], bounds[alike] + more)
