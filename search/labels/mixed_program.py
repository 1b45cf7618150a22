"""Mixed-integer linear programs with columns from 0 to 1, in HiGHS with one thread and a fixed seed."""

from collections.abc import Iterable
from typing import Any

import highspy
import numpy as np

Terms = Iterable[tuple[int, float]]  # (column, coefficient)
OPTIONS: dict[str, Any] = {
    "output_flag": False, "threads": 1, "random_seed": 0, "mip_rel_gap": 0.0, "mip_abs_gap": 1e-9,
}  # fmt: skip


class MixedProgram:
    """Minimise the sum of column costs; every column lies in [0, 1]."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._binary: list[int] = []
        self._rows: list[dict[int, float]] = []
        self._upper: list[float] = []

    def binary(self, cost: float) -> int:
        self._binary.append(len(self._costs))
        return self.continuous(cost)

    def continuous(self, cost: float) -> int:
        self._costs.append(cost)
        return len(self._costs) - 1

    def at_most(self, terms: Terms, value: float) -> None:
        """A row: the sum of terms is at most a value."""
        summed: dict[int, float] = {}
        for column, coefficient in terms:
            summed[column] = summed.get(column, 0.0) + coefficient
        self._rows.append(summed)
        self._upper.append(value)

    def solve(self, time_limit_s: float) -> tuple[list[float], float, float] | None:
        """Values of the columns, the objective, and its relative gap to the proven bound."""
        if not self._costs:  # HiGHS has no solution of a program without columns
            return ([], 0.0, 0.0) if min(self._upper, default=0.0) >= 0 else None
        solver = highspy._Highs()  # type: ignore[attr-defined]  # without callbacks, with which releases print a banner
        for name, value in (OPTIONS | {"time_limit": time_limit_s}).items():
            solver.setOptionValue(name, value)
        count, empty = len(self._costs), np.array([], dtype=np.int32)
        costs, ones = np.array(self._costs, dtype=np.float64), np.ones(count)
        solver.addCols(count, costs, np.zeros(count), ones, 0, empty, empty, np.array([], dtype=np.float64))
        if self._binary:
            binary = np.array(self._binary, dtype=np.int32)
            kinds = np.full(len(binary), highspy.HighsVarType.kInteger.value, dtype=np.uint8)
            solver.changeColsIntegrality(len(binary), binary, kinds)
        upper, sizes = np.array(self._upper, dtype=np.float64), [len(row) for row in self._rows]
        columns = np.array([column for row in self._rows for column in row], dtype=np.int32)
        coefficients = np.array([value for row in self._rows for value in row.values()], dtype=np.float64)
        starts = np.cumsum([0, *sizes[:-1]], dtype=np.int32)[: len(sizes)]
        no_lower = np.full(len(upper), -highspy.kHighsInf)
        solver.addRows(len(upper), no_lower, upper, len(columns), starts, columns, coefficients)
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
