"""The least cost of a network as a mixed-integer linear program (`autopar.search.labels.mixed_program`).

    minimise   Σ x[n,v]·cost(n,v) + Σ z[u,σ,τ]·convert(u,σ,τ) + Σ w[u,k]·keep(u,k)

    Σ_v x[n,v] = 1                        every variable n has one choice v
    use(u,i,τ) ≤ source(u,τ) + Σ_σ z[u,σ,τ]    use i of value u in type τ is met or converted
    z[u,σ,τ] ≤ source(u,σ)                a conversion starts at the type of the value
    use(u,i,k) ≤ w[u,k] + Σ_σ z[u,σ,τ]    a value is kept once per form k, or gathered again

`source(u,τ)` is the sum of the choices of u's source that make τ. x is binary; with it integral, z and w are so by
themselves.
"""

import numpy as np

from autopar.search.labels.mixed_program import MixedProgram
from autopar.search.labels.network import IntArray, Network, NetworkValue, Solution


def solved(network: Network, time_limit_s: float) -> Solution | None:
    """The best choices, or the best choices found within the time limit. None if there are none."""
    milp = MixedProgram()
    x = [[milp.binary(float(cost)) for cost in costs] for costs in network.costs]
    for columns in x:
        milp.equal(((column, 1.0) for column in columns), 1.0)
    for value in network.values:
        _add(milp, x, value)
    solution = milp.solve(time_limit_s)
    if solution is None:
        return None
    values, objective, gap = solution
    choices = tuple(next(k for k, column in enumerate(columns) if values[column] > 0.5) for columns in x)
    return Solution(choices=choices, objective=objective, gap=gap)


def _add(milp: MixedProgram, x: list[list[int]], value: NetworkValue) -> None:
    """Conversions of one value, shared by all uses that want the same type, and the forms kept for backward."""

    def of_type(variable: int, types: IntArray, t: int) -> list[int]:
        return [x[variable][k] for k in np.flatnonzero(types == t)]

    starts = sorted({int(t) for t in value.made})
    forms: dict[int, int] = {}
    for t in sorted({int(t) for use in value.uses for t in use.wanted}):
        converted: dict[int, int] = {}
        for start in starts:
            if start == t or not np.isfinite(value.convert[start, t]):
                continue
            converted[start] = milp.continuous(float(value.convert[start, t]))
            if len(starts) > 1:
                source = of_type(value.source, value.made, start)
                milp.at_most([(converted[start], 1.0), *((c, -1.0) for c in source)], 0.0)
        ready = [(c, -1.0) for c in of_type(value.source, value.made, t)]
        for use in value.uses:
            wanting = [(c, 1.0) for c in of_type(use.variable, use.wanted, t)]
            if not wanting:
                continue
            milp.at_most([*wanting, *ready, *((c, -1.0) for c in converted.values())], 0.0)
            if use.kept:
                form = int(value.forms[t])
                if form not in forms:
                    forms[form] = milp.continuous(float(value.keep[form]))
                regathered = [(c, -1.0) for start, c in converted.items() if value.regathered[start, t]]
                milp.at_most([*wanting, (forms[form], -1.0), *regathered], 0.0)
