"""The next best plans: the best plan of each other combination of devices, stages, tensor degree and ZeRO stage.

The exact prices of the search come first, by value, and raise the bounds of candidates with the same pipeline. Another
candidate is priced only if its raised bound is below the last reported plan, at most `MORE` for each requested plan.
Tensor degrees without labels stay out, because their bounds were too far from the best.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir.degrees import Degrees
from autopar.search.driver.search import SearchState, raise_alike, raised_seconds
from autopar.search.pricing.exact import AS_IT_IS, PricedPlan

MORE = 2  # exact prices for each requested plan
DEGREES = ("num_devices", "pp", "tp", "cp", "ep", "zero")  # in which the next best plans differ
ALIKE = (*DEGREES, "micro_batch")
_Key = tuple[int, ...]


def next_plans(search: SearchState, top: int, *, alike: bool) -> list[tuple[int, PricedPlan]]:
    """At most `top` plans beside the best plan, the best first."""
    plans = next_best(search, top)
    if not alike or len(plans) == top:
        return plans
    told = {index for index, _ in plans}
    more = [plan for plan in next_best(search, top, ALIKE) if plan[0] not in told]
    return sorted([*plans, *more[: top - len(plans)]], key=lambda plan: search.goal.value(plan[1]))


def next_best(search: SearchState, top: int, columns: Sequence[str] = DEGREES) -> list[tuple[int, PricedPlan]]:
    """At most `top` candidates that fit, the best first, without the combination of the best plan."""
    c, goal, classes, seconds = search.candidates, search.goal, search.members.classes, raised_seconds(search)
    chosen: dict[_Key, tuple[float, int, PricedPlan]] = {}
    values_of = [getattr(c, name) for name in columns]

    def key(index: int) -> _Key:
        return tuple(int(values[index]) for values in values_of)

    def take(index: int, plan: PricedPlan) -> None:
        value = goal.value(plan)
        if plan.fits and (key(index) not in chosen or value < chosen[key(index)][0]):
            chosen[key(index)] = (value, index, plan)

    known = {**search.together.found, **{(index, AS_IT_IS): plan for index, plan in search.exact.items()}}
    for (index, _), plan in known.items():
        take(index, plan)
    is_open = c.of(*search.labelled)
    is_open[[index for index, cut in known if cut == AS_IT_IS]] = False
    left = MORE * top
    while left > 0:
        values = np.where(is_open, goal.bounds(c, replace(search.screened, seconds=seconds)), np.inf)
        following = _first_below(values, classes, chosen, key, top)[:left]
        if not following:
            break
        search.together.price([(index, AS_IT_IS) for index in following])
        for index in following:
            exact = search.together.priced(index)
            take(index, exact)
            raise_alike(search, seconds, index, exact)
        is_open[following] = False
        left -= len(following)
    order = [(index, plan) for _, index, plan in sorted(chosen.values(), key=lambda each: each[0])]
    best = None if search.best is None else _in_columns(search.best.degrees, columns)
    return [(index, plan) for index, plan in order if _in_columns(plan.degrees, columns) != best][:top]


def _in_columns(degrees: Degrees, columns: Sequence[str]) -> list[Any]:
    return [degrees.world_size if name == "num_devices" else getattr(degrees, name) for name in columns]


def _first_below(
    values: NDArray[np.float64],
    classes: NDArray[np.int64],
    chosen: Mapping[_Key, tuple[float, int, PricedPlan]],
    key: Callable[[int], _Key],
    top: int,
) -> list[int]:
    """Candidates without a price that could still be reported, smallest bound first."""
    told = sorted(value for value, _, _ in chosen.values())
    last = told[top] if len(told) > top else np.inf
    below = np.flatnonzero(values < last)
    first: dict[_Key, int] = {}
    for index in below[np.argsort(values[below], kind="stable")].tolist():
        key_of = key(index)
        if key_of in first or (key_of in chosen and values[index] >= chosen[key_of][0]):
            continue
        if classes[index] not in classes[list(first.values())]:
            first[key_of] = index
            if len(first) == top:
                break
    return list(first.values())
