"""An oracle of networks: the least cost as a mixed-integer linear program, which HiGHS solves.

minimise   Σ x[n,v]·cost(n,v) + Σ z[u,σ,τ]·convert(u,σ,τ) + Σ w[u,k]·keep(u,k)

Σ_v x[n,v] = 1                        every variable n has one choice v
use(u,i,τ) ≤ source(u,τ) + Σ_σ z[u,σ,τ]    use i of value u in type τ is met or converted
z[u,σ,τ] ≤ source(u,σ)                a conversion starts at the type of the value
use(u,i,k) ≤ w[u,k] + Σ_σ z[u,σ,τ]    a value is kept once per form k, or gathered again
"""

import numpy as np

from autopar.search.labels.mixed_program import MixedProgram
from autopar.search.labels.network import IntArray, Network, NetworkValue, Solution


def solved(network: Network) -> Solution | None:
    """The best choices. None if there are none."""
    milp = MixedProgram()
    x = [[milp.binary(float(cost)) for cost in costs] for costs in network.costs]
    for columns in x:
        for sign in (1.0, -1.0):
            milp.at_most([(column, sign) for column in columns], sign)
    for value in network.values:
        _add(milp, x, value)
    solution = milp.solve(60.0)
    if solution is None:
        return None
    values, objective, gap = solution
    choices = tuple(next(k for k, column in enumerate(columns) if values[column] > 0.5) for columns in x)
    return Solution(choices=choices, objective=objective, gap=gap)


def _add(milp: MixedProgram, x: list[list[int]], value: NetworkValue) -> None:
    def of_type(variable: int, types: IntArray, t: int, sign: float = -1.0) -> list[tuple[int, float]]:
        return [(x[variable][k], sign) for k in np.flatnonzero(types == t)]

    forms: dict[int, int] = {}
    for t in sorted({int(t) for use in value.uses for t in use.wanted}):
        starts = [s for s in sorted({*value.made.tolist()}) if s != t and np.isfinite(value.convert[s, t])]
        converted = {start: milp.continuous(float(value.convert[start, t])) for start in starts}
        for start, column in converted.items():
            milp.at_most([(column, 1.0), *of_type(value.source, value.made, start)], 0.0)
        ready = [*of_type(value.source, value.made, t), *((column, -1.0) for column in converted.values())]
        for use in value.uses:
            if not (wanting := of_type(use.variable, use.wanted, t, 1.0)):
                continue
            milp.at_most([*wanting, *ready], 0.0)
            if use.kept:
                form = int(value.forms[t])
                forms[form] = forms[form] if form in forms else milp.continuous(float(value.keep[form]))
                regathered = [(c, -1.0) for start, c in converted.items() if value.regathered[start, t]]
                milp.at_most([*wanting, (forms[form], -1.0), *regathered], 0.0)
