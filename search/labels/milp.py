"""The least cost of a network as a mixed-integer linear program, in HiGHS with one thread and a fixed seed.

    minimise   Σ x[n,v]·cost(n,v) + Σ z[u,σ,τ]·convert(u,σ,τ) + Σ w[u,k]·keep(u,k)

    Σ_v x[n,v] = 1                        every variable n has one choice v
    use(u,i,τ) ≤ source(u,τ) + Σ_σ z[u,σ,τ]    use i of value u in type τ is met or converted
    z[u,σ,τ] ≤ source(u,σ)                a conversion starts at the type of the value
    use(u,i,k) ≤ w[u,k] + Σ_σ z[u,σ,τ]    a value is kept once per form k, or gathered again

`source(u,τ)` is the sum of the choices of u's source that make τ. x is binary; with it integral, z and w are so by
themselves.
"""

from collections.abc import Iterable

import highspy
import numpy as np

from autopar.search.labels.network import IntArray, Network, Solution, Value

Terms = Iterable[tuple[int, float]]  # (column, coefficient)
_INFINITY = highspy.kHighsInf


def solved(network: Network, time_limit_s: float) -> Solution | None:
    """The best choices, or the best choices found within the time limit. None if there are none."""
    milp = _Milp()
    x = [[milp.binary(float(cost)) for cost in costs] for costs in network.costs]
    for columns in x:
        milp.equal(((column, 1.0) for column in columns), 1.0)
    for value in network.values:
        _add(milp, x, value)
    found = milp.solve(time_limit_s)
    if found is None:
        return None
    values, objective, gap = found
    choices = tuple(next(k for k, column in enumerate(columns) if values[column] > 0.5) for columns in x)
    return Solution(choices=choices, objective=objective, gap=gap)


def _add(milp: "_Milp", x: list[list[int]], value: Value) -> None:
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
                again = [(c, -1.0) for start, c in converted.items() if value.regathered[start, t]]
                milp.at_most([*wanting, (forms[form], -1.0), *again], 0.0)


class _Milp:
    """Minimise the sum of column costs; every column lies in [0, 1]."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._binary: list[int] = []
        self._starts: list[int] = []
        self._columns: list[int] = []
        self._coefficients: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def binary(self, cost: float) -> int:
        self._binary.append(len(self._costs))
        return self.continuous(cost)

    def continuous(self, cost: float) -> int:
        self._costs.append(cost)
        return len(self._costs) - 1

    def equal(self, terms: Terms, value: float) -> None:
        self._row(terms, value, value)

    def at_most(self, terms: Terms, value: float) -> None:
        self._row(terms, -_INFINITY, value)

    def _row(self, terms: Terms, lower: float, upper: float) -> None:
        summed: dict[int, float] = {}
        for column, coefficient in terms:
            summed[column] = summed.get(column, 0.0) + coefficient
        self._starts.append(len(self._columns))
        self._columns.extend(summed)
        self._coefficients.extend(summed.values())
        self._lower.append(lower)
        self._upper.append(upper)

    def solve(self, time_limit_s: float) -> tuple[list[float], float, float] | None:
        """Values of the columns, the objective, and its relative gap to the proven bound.

        They belong to an optimum, or to the best solution found within the time limit. None if there is no solution.
        """
        solver = highspy.Highs()
        options = {
            "output_flag": False,
            "threads": 1,
            "random_seed": 0,
            "mip_rel_gap": 0.0,
            "mip_abs_gap": 1e-9,
            "time_limit": time_limit_s,
        }
        for name, value in options.items():
            solver.setOptionValue(name, value)
        count, empty = len(self._costs), np.array([], dtype=np.int32)
        costs, ones = np.array(self._costs, dtype=np.float64), np.ones(count)
        solver.addCols(count, costs, np.zeros(count), ones, 0, empty, empty, np.array([], dtype=np.float64))
        binary = np.array(self._binary, dtype=np.int32)
        kinds = np.full(len(binary), highspy.HighsVarType.kInteger.value, dtype=np.uint8)
        solver.changeColsIntegrality(len(binary), binary, kinds)
        solver.addRows(
            len(self._lower),
            np.array(self._lower, dtype=np.float64),
            np.array(self._upper, dtype=np.float64),
            len(self._columns),
            np.array(self._starts, dtype=np.int32),
            np.array(self._columns, dtype=np.int32),
            np.array(self._coefficients, dtype=np.float64),
        )
        solver.run()
        info = solver.getInfo()
        if info.primal_solution_status != highspy.kSolutionStatusFeasible:
            return None
        values = [float(v) for v in solver.getSolution().col_value]
        objective = float(info.objective_function_value)
        gap = max(0.0, objective - float(info.mip_dual_bound)) / max(abs(objective), 1e-12)
        return values, objective, gap
