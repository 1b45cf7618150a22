"""The choice of `Degrees.offload`: what a plan keeps in host memory.

Copies take time, so a plan keeps values on the host only if no plan without them fits. Each value is a search of its
own over the whole space, the least movement first, for plans better than the best so far: the proof is about all.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.ir.offload import NO_OFFLOAD
from autopar.search.driver.search import SearchState
from autopar.search.pricing.objective import Goal
from autopar.search.space.dimensions import Constraints

# a search under a goal, for values below a number
Search = Callable[[Goal, float], SearchState]


def keeping(goal: Goal, offload: str) -> Goal:
    """The same objective over machines that keep other values on the host."""
    parts = {count: replace(part, on=part.on.keeping(offload)) for count, part in goal.parts.items()}
    return replace(goal, parts=parts)


def search_offloads(
    search: Search,
    goal: Goal,
    constraints: Constraints,
    should_continue: Callable[[], bool] = lambda: True,
    on_progress: Callable[[str], None] = lambda _: None,
) -> SearchState:
    """The best plan over the values of `offload` that the constraints allow."""
    first = constraints.first_offloads
    result = _best_of(search, goal, first, None, should_continue)
    rest = tuple(value for value in constraints.offloads if value not in first)
    knows_hosts = all(part.on.machine.host is not None for part in goal.parts.values())
    if result.best is not None or not rest or not knows_hosts or not len(result.candidates):
        return result
    on_progress("no plan fits on the devices alone: searching plans with offload")
    # if the time is up, only the value that leaves least on the device
    return _best_of(search, goal, rest if should_continue() else rest[-1:], result, should_continue)


def _best_of(
    search: Search, goal: Goal, values: tuple[str, ...], result: SearchState | None, should_continue: Callable[[], bool]
) -> SearchState:
    """The best of several searches and of one before them. The proof holds for all of them."""
    bound, proven = (np.inf, True) if result is None else (result.proof.bound, result.proof.is_proven)
    for value in values or (NO_OFFLOAD,):
        if result is not None and result.best is not None and not should_continue():
            proven = False
            break
        best = None if result is None else result.best
        below = np.inf if best is None or result is None else result.goal.value(best)
        choice = search(keeping(goal, value), below)
        bound, proven = min(bound, choice.proof.bound), proven and choice.proof.is_proven
        if result is None or choice.best is not None:
            result = choice
    assert result is not None
    best = result.best
    least = bound if best is None else min(bound, result.goal.value(best))
    return replace(result, proof=replace(result.proof, bound=least, is_proven=proven))
