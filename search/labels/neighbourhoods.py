"""Good choices of a network whose tables are too large: the best choices of large neighbourhoods, one after the other.

A round keeps the choices of a few variables. Without these variables the network falls into parts whose tables are
small, so elimination finds the best choices of all others. No round makes the cost larger. The next round keeps other
variables. A dense network, in which a layer reads the results of all earlier layers, keeps about one variable in
fifty. This is large neighbourhood search (Shaw 1998) over cutsets (Dechter 1990). The same network gives the same
choices.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import inf

import numpy as np

from autopar.search.labels.elimination import Table, eliminate, elimination_order, tables_of
from autopar.search.labels.network import Network, Solution

MOST_ROUNDS = 30
ROUNDS_WITHOUT_GAIN = 4  # after which the search ends
KEPT_AGAIN = 0.5  # the weight of a variable for each round that kept it
LEAST_GAIN = 1e-9


def improved(network: Network) -> Solution | None:
    """The best choices that the rounds find, without a proven bound. None if all of them want a missing conversion."""
    sizes, tables = tables_of(network)
    forbidden = 1.0 + sum(float(np.abs(table[np.isfinite(table)]).max(initial=0.0)) for _, table in tables)
    softened = [(scope, np.where(np.isinf(table), forbidden, table)) for scope, table in tables]
    cheapest = [int(costs.argmin()) for costs in network.costs] + [0] * (len(sizes) - len(network.costs))
    rounds = _rounds_of(tuple(sizes), tuple(scope for scope, _ in tables))
    order, kept = rounds.at(0)
    others = [(scope, table) for scope, table in softened if kept.isdisjoint(scope)]
    starts = (cheapest, _best_beside(sizes, others, cheapest, order, kept))
    results = [_searched(sizes, softened, start, rounds) for start in starts]
    choices = min(results, key=lambda choices: _cost(softened, choices))
    objective = _cost(tables, choices)
    if objective == inf:
        return None
    return Solution(choices=tuple(choices[: len(network.costs)]), objective=objective, gap=None)


class _Rounds:
    """The orders and the kept variables of all rounds over the same variables, whatever their costs."""

    def __init__(self, sizes: Sequence[int], scopes: Sequence[Sequence[int]]) -> None:
        self.sizes, self.scopes = sizes, scopes
        self._weights = [1.0] * len(sizes)
        self._found: list[tuple[list[int], set[int]]] = []

    def at(self, number: int) -> tuple[list[int], set[int]]:
        """The order and the kept variables of a round."""
        while len(self._found) <= number:
            order, kept, _ = elimination_order(self.sizes, self.scopes, self._weights)
            self._found.append((order, kept))
            for variable in kept:
                self._weights[variable] *= KEPT_AGAIN
        return self._found[number]


@lru_cache(maxsize=32)
def _rounds_of(sizes: tuple[int, ...], scopes: tuple[tuple[int, ...], ...]) -> _Rounds:
    return _Rounds(sizes, scopes)


def _searched(sizes: Sequence[int], tables: Sequence[Table], choices: list[int], rounds: _Rounds) -> list[int]:
    """The choices after rounds that keep some of them. The tables have no infinite costs."""
    least, since = _cost(tables, choices), 0
    for number in range(MOST_ROUNDS):
        order, kept = rounds.at(number)
        choices = _best_beside(sizes, tables, choices, order, kept)
        cost = _cost(tables, choices)
        since = 0 if cost < least - LEAST_GAIN * abs(least) else since + 1
        least = min(cost, least)
        if since == ROUNDS_WITHOUT_GAIN or not kept:
            break
    return choices


def _best_beside(
    sizes: Sequence[int], tables: Sequence[Table], choices: Sequence[int], order: Sequence[int], kept: set[int]
) -> list[int]:
    """The choices, with the best ones of all variables that are not kept."""
    free = sorted(order)
    place = {variable: k for k, variable in enumerate(free)}
    parts: list[Table] = []
    for scope, table in tables:
        rest = tuple(place[variable] for variable in scope if variable not in kept)
        if rest:
            parts.append((rest, table[tuple(choices[v] if v in kept else slice(None) for v in scope)]))
    best, _ = eliminate([sizes[variable] for variable in free], parts, [place[variable] for variable in order])
    changed = list(choices)
    for variable, choice in zip(free, best, strict=True):
        changed[variable] = choice
    return changed


def _cost(tables: Sequence[Table], choices: Sequence[int]) -> float:
    return sum(float(table[tuple(choices[variable] for variable in scope)]) for scope, table in tables)
