"""The least cost of a network by eliminating one variable after the other. The method is exact, without a tolerance.

It is nonserial dynamic programming (Bertelè and Brioschi 1972), also called bucket elimination (Dechter 1999). All
costs of a variable are summed into one table over the variable and its neighbours. The least entry for every choice of
the neighbours is a new cost between them. A block of a model is nearly a chain, so a variable has few neighbours and
the tables stay small. If a table would be too large, `eliminated` leaves the network to
`autopar.search.labels.neighbourhoods`.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import log2, prod

import numpy as np

from autopar.search.labels.network import BoolArray, FloatArray, IntArray, Network, NetworkValue, Solution

LARGEST_BITS = 14.0  # of a table beside kept variables: its entries are two to this power
MOST_ENTRIES = 2**24  # of all tables of an elimination, which take about a second
LARGEST_OF_A_VALUE = 2**16  # entries of the table of a value's source and users; a larger table is taken apart
Table = tuple[tuple[int, ...], FloatArray]  # variables and the cost of their choices


def eliminated(network: Network) -> Solution | None:
    """The best choices, of infinite cost if none is legal. None if the tables would be too large."""
    sizes, tables = tables_of(network)
    order, _, entries = elimination_order(sizes, [scope for scope, _ in tables])
    if entries > MOST_ENTRIES:
        return None
    choices, objective = eliminate(sizes, tables, order)
    return Solution(choices=tuple(choices[: len(network.costs)]), objective=objective, gap=0.0)


def tables_of(network: Network) -> tuple[list[int], list[Table]]:
    """The sizes of all variables, those of the network first, and the costs of a network as tables."""
    sizes = [len(costs) for costs in network.costs]
    tables: list[Table] = [((variable,), costs) for variable, costs in enumerate(network.costs)]
    for value in network.values:
        tables += _tables_of(value, sizes)
    return sizes, tables


def neighbours_of(num_variables: int, scopes: Sequence[Sequence[int]]) -> list[set[int]]:
    """The variables that share a table with each variable."""
    neighbours: list[set[int]] = [set() for _ in range(num_variables)]
    for scope in scopes:
        for variable in scope:
            neighbours[variable].update(scope)
    for variable, others in enumerate(neighbours):
        others.discard(variable)
    return neighbours


def elimination_order(
    sizes: Sequence[int], scopes: Sequence[Sequence[int]], weights: Sequence[float] | None = None
) -> tuple[list[int], set[int], float]:
    """The order in which variables are eliminated, variables to keep, and the number of entries of all tables.

    The variable with the smallest table is always next. With `weights`, variables are kept so that no table is larger
    than `LARGEST_BITS`.
    """
    neighbours = neighbours_of(len(sizes), scopes)
    bits = [log2(size) for size in sizes]

    def table_bits(variable: int) -> float:
        return bits[variable] + sum(bits[other] for other in sorted(neighbours[variable]))

    current = [table_bits(variable) for variable in range(len(sizes))]
    smallest = [(size, variable) for variable, size in enumerate(current)]
    heapify(smallest)
    order: list[int] = []
    kept: set[int] = set()
    entries = 0.0
    while len(order) + len(kept) < len(sizes):
        size, variable = heappop(smallest)
        if size != current[variable]:
            continue  # changed since: it is in the heap again
        gone = variable
        if weights is not None and size > LARGEST_BITS and neighbours[variable]:
            scope = [variable, *sorted(neighbours[variable])]
            gone = max(scope, key=lambda v: bits[v] * len(neighbours[v]) * weights[v])
            kept.add(gone)
        else:
            order.append(variable)
            entries += 2 ** min(size, 64.0)
        joined = neighbours[gone]
        current[gone], neighbours[gone] = -1.0, set()
        for other in joined:
            if gone not in kept:
                neighbours[other] |= joined
            neighbours[other] -= {gone, other}
        for other in joined:
            current[other] = table_bits(other)
            heappush(smallest, (current[other], other))
        if gone != variable and variable not in joined:
            heappush(smallest, (current[variable], variable))
    return order, kept, entries


def eliminate(sizes: Sequence[int], tables: Sequence[Table], order: Sequence[int]) -> tuple[list[int], float]:
    """The best choice of every variable, and the total cost."""
    place = {variable: k for k, variable in enumerate(order)}
    waiting: list[list[Table]] = [[] for _ in order]
    for variables, table in tables:
        order_of = [place[variable] for variable in variables]
        axes = sorted(range(len(order_of)), key=order_of.__getitem__)
        waiting[min(order_of)].append((tuple(order_of[axis] for axis in axes), table.transpose(axes)))
    best: list[tuple[tuple[int, ...], IntArray]] = []
    objective = 0.0
    for k in range(len(order)):
        scope = tuple(sorted({p for places, _ in waiting[k] for p in places}))
        total = np.zeros([sizes[order[p]] for p in scope])
        for places, table in waiting[k]:
            total += table.reshape([sizes[order[p]] if p in places else 1 for p in scope])
        waiting[k] = []
        best.append((scope[1:], total.argmin(axis=0)))
        least = total.min(axis=0)
        if scope[1:]:
            waiting[scope[1]].append((scope[1:], least))
        else:
            objective += float(least)
    chosen = [0] * len(order)
    for k in reversed(range(len(order))):
        places, choice = best[k]
        chosen[k] = int(choice[tuple(chosen[p] for p in places)])
    return [chosen[place[variable]] for variable in range(len(order))], objective


def _tables_of(value: NetworkValue, sizes: list[int]) -> list[Table]:
    """The costs of a value."""
    scope = tuple(dict.fromkeys((value.source, *(use.variable for use in value.uses))))
    if prod(sizes[variable] for variable in scope) <= LARGEST_OF_A_VALUE:
        return [(scope, _whole_table(value, scope))]
    return [*_conversions_apart(value, sizes), *_kept_apart(value, sizes)]


def _whole_table(value: NetworkValue, scope: tuple[int, ...]) -> FloatArray:
    def along(variable: int, choices: IntArray) -> IntArray:
        return choices.reshape([-1 if other == variable else 1 for other in scope])

    start = along(value.source, value.made)
    wanted = [along(use.variable, use.wanted) for use in value.uses]
    if len(wanted) == 1:
        total = value.convert[start, wanted[0]]
    else:
        total = np.zeros([1] * len(scope))
        for t in _types_wanted(value):
            is_wanted = _any([each == t for each in wanted])
            total = total + np.where(is_wanted, value.convert[start, t], 0.0)
    forms = [
        np.where(value.regathered[start, each], -1, value.forms[each])
        for each, use in zip(wanted, value.uses, strict=True)
        if use.kept
    ]
    for form, cost in enumerate(value.keep) if forms else ():
        total = total + cost * _any([each == form for each in forms])
    return total


def _any(conditions: list[BoolArray]) -> BoolArray:
    any_of = conditions[0]
    for each in conditions[1:]:
        any_of = any_of | each
    return any_of


def _types_wanted(value: NetworkValue) -> list[int]:
    return sorted({int(t) for use in value.uses for t in use.wanted})


def _conversions_apart(value: NetworkValue, sizes: list[int]) -> Iterator[Table]:
    """Variables that say whether the value exists in a type: at the cost of the conversion, if a use wants the type."""
    for t in _types_wanted(value):
        variable = len(sizes)
        sizes.append(2)
        convert = value.convert[value.made, t]
        yield (value.source, variable), np.stack([np.zeros_like(convert), convert], axis=1)
        for use in value.uses:
            if (use.wanted == t).any():
                missing = np.where(use.wanted == t, np.inf, 0.0)
                yield (use.variable, variable), np.stack([missing, np.zeros_like(missing)], axis=1)


def _kept_apart(value: NetworkValue, sizes: list[int]) -> Iterator[Table]:
    """Variables that say whether a form is kept: at its cost, if a use needs the form."""
    kept = [use for use in value.uses if use.kept]
    for form, cost in enumerate(value.keep) if kept else ():
        variable = len(sizes)
        sizes.append(2)
        yield (variable,), np.array([0.0, cost])
        for use in kept:
            needed = (value.forms[use.wanted] == form) & ~value.regathered[value.made[:, None], use.wanted]
            if needed.any():
                missing = np.where(needed, np.inf, 0.0)
                yield (value.source, use.variable, variable), np.stack([missing, np.zeros_like(missing)], axis=2)
