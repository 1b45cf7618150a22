"""Mixed-integer linear programs with columns from 0 to 1, in HiGHS with one thread and a fixed seed."""

from collections.abc import Iterable

import highspy
import numpy as np

Terms = Iterable[tuple[int, float]]  # (column, coefficient)
_INFINITY = highspy.kHighsInf


class MixedProgram:
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
        """Values of the columns, the objective, and its relative gap to the proven bound."""
        if not self._costs:  # HiGHS has no solution of a program without columns
            fits = all(lower <= 0 <= upper for lower, upper in zip(self._lower, self._upper, strict=True))
            return ([], 0.0, 0.0) if fits else None
        solver = highspy._Highs()  # type: ignore[attr-defined]  # without callbacks, with which releases print a banner
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
        if self._binary:
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
        if not self._binary:
            return values, objective, 0.0
        gap = max(0.0, objective - float(info.mip_dual_bound)) / max(abs(objective), 1e-12)
        return values, objective, gap
