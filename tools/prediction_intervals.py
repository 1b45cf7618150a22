"""Write the intervals of predictions from published runs that were predicted without their engine:

    python tools/prediction_intervals.py        print the bounds and how many runs they cover, write them
    python tools/prediction_intervals.py --check        print only

``tools/fit_cost_model.py --check`` makes the predictions. log(measured / predicted) has a mean for each engine. The
next framework is one more draw of such a mean, and its run is a draw around it. So the interval is Student's, of the
variance between engines and within them. The coverage of an engine is that of bounds made without it.
"""

import argparse
import csv
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import permutations
from statistics import fmean, variance

import numpy as np
from fit_cost_model import DATA, ENGINE_LEFT_OUT, ROOT, Runs, runs, shipped
from leave_one_out import engine
from numpy.typing import NDArray
from scipy.stats import t

from autopar.cost_model.fit.measured_steps import elasticities, term_factors
from autopar.cost_model.interval import COVERED, PLAN_ORDER, SITUATIONS
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.cost_model.published.estimate import RowGroup, estimate_rows
from autopar.cost_model.published.measurement import measured_bytes
from autopar.cost_model.published.ranking import same_work
from autopar.cost_model.published.row import Row, RowEstimate, read_rows
from autopar.cost_model.published.validation import compared_rows, timed_rows
from autopar.files.atomic import write_text

SWEEP = ROOT / "benchmarks" / "data" / "sweep_vtrain_single_a100.csv"
USERS = tuple(DATA.with_name(f"{name}_runs.csv") for name in ("ordinary", "users", "users_lora", "lora"))
TARGET = ROOT / "cost_model" / "prediction_intervals.yaml"
DEFAULT_DEVICE, EXPERTS = "default device", ", experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """log(measured / predicted) of one row."""

    engine: str
    value: float


def shrinkages(rows: Sequence[Row]) -> None:
    """Errors of runs without experts, each corrected by one other run of its user, by the way of correcting.

    The others of a run count as one run together.
    """
    by_id = {row.id: row for row in rows}
    whole = runs(rows)
    measured, parts = dict(zip((row.id for row in whole.rows), whole.measured_s, strict=True)), _parts(whole)
    kinds: dict[tuple[str | None, ...], list[tuple[Row, float]]] = {}
    with ENGINE_LEFT_OUT.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            row = by_id[line["id"]]
            if not row.moe_experts:
                found = _residual(row, measured[row.id], float(line["seconds"]))
                kinds.setdefault(_own(row), []).append((row, found.value))
    pairs = [(*pair, 1 / (len(own) - 1)) for own in kinds.values() for pair in permutations(own, 2)]
    ways: dict[str, Callable[[float, Row, Row], float]] = {
        f"by its ratio to the power of {power:g}": lambda value, first, row, power=power: power * value  # type: ignore[misc]
        for power in (0.0, 0.5, 0.7, 1.0)
    }
    ways["by terms"] = lambda value, first, row: _correction(value, parts[first.id], parts[row.id])
    for way, correct in ways.items():
        each = sorted((abs(math.expm1(correct(of, first, row) - one)), w) for (first, of), (row, one), w in pairs)
        places = np.cumsum([weight for _, weight in each]) / sum(weight for _, weight in each)
        middle, high = (each[int(np.searchsorted(places, part))][0] for part in (0.5, 0.9))
        print(f"corrected {way}: median {middle:.1%}, p90 {high:.1%}")


def _parts(whole: Runs) -> dict[str, NDArray[np.float64]]:
    """The part of each term in the time of each run, by the shipped numbers."""
    profiles, constants = shipped()
    found: dict[str, NDArray[np.float64]] = {}
    for group in whole.groups:

        def price(profile: DeviceProfile, group: RowGroup = group) -> NDArray[np.float64]:
            return np.broadcast_to(group.step(constants, profile).seconds, len(group.indices))

        parts = elasticities(price, profiles[group.profile.name])
        found |= {whole.rows[index].id: one for index, one in zip(group.indices, parts, strict=True)}
    return found


def _correction(value: float, of_first: NDArray[np.float64], of_other: NDArray[np.float64]) -> float:
    """The logarithm by which one measured run corrects another. `value` is log(measured / predicted) of the first."""
    return float(of_other @ np.log(term_factors([math.exp(value)], of_first[None])))


def residuals(rows: Sequence[Row]) -> dict[str, dict[str, list[Residual]]]:
    """The residuals by figure and situation."""
    by_id = {row.id: row for row in rows}
    whole = runs(rows)
    measured = dict(zip((row.id for row in whole.rows), whole.measured_s, strict=True))
    time: dict[str, list[Residual]] = {name: [] for name in SITUATIONS}
    alike: dict[tuple[str | None, ...], list[tuple[Row, Residual]]] = {}
    with ENGINE_LEFT_OUT.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            row = by_id[line["id"]]
            for column, kind in (("seconds", "known"), ("guessed_seconds", "guessed")):
                name = f"{kind} engine{EXPERTS if row.moe_experts else ''}"
                time[name].append(_residual(row, measured[row.id], float(line[column])))
                if kind == "known":
                    alike.setdefault(_own(row), []).append((row, time[name][-1]))
    parts = _parts(whole)
    for kinds in alike.values():  # each run is the measured step of all others
        for (other, first), (row, one) in permutations(kinds, 2):
            name = f"measured step{EXPERTS if row.moe_experts else ''}"
            value = one.value - _correction(first.value, parts[other.id], parts[row.id])
            time[name].append(replace(one, value=value))
    profiles, constants = shipped()
    for group in whole.groups:
        usual = group.step(constants, profiles[group.profile.name]).seconds
        default = replace(profiles["default"], name=group.profile.name)
        for place, index in enumerate(group.indices):
            seconds = np.broadcast_to(group.step(constants, default).seconds, len(group.indices))
            row = whole.rows[index]
            own = float(np.broadcast_to(usual, len(group.indices))[place])
            time[DEFAULT_DEVICE].append(_residual(row, own, float(seconds[place])))
    memory = _of_memory(rows)
    users = of_users()
    time["trainer"] += users["time"]["trainer"]  # guessed ones are inside the interval that all vendors' engines give
    for name, more in users["memory"].items():
        memory[name] += more
    return {"time": time, "memory": memory, PLAN_ORDER: {PLAN_ORDER: _of_order()}}


def _own(row: Row) -> tuple[str | None, ...]:
    """What the runs of one user share: models of one name, device, precision and engine."""
    return row.source_key, (row.model or "").partition(" ")[0], row.gpu_type, row.precision, engine(row)


def _of_order() -> list[Residual]:
    """Of layouts of the same work: log(measured / predicted) of their ratio to the layout that is predicted fastest.

    Each group of layouts counts as an engine.
    """
    found = []
    for path in (DATA, SWEEP):
        for layouts in same_work(timed_rows(compared_rows(read_rows(path), estimate_rows))):
            best = min(layouts, key=lambda one: one.predicted_s)
            name = best.row.id
            for one in layouts:
                if one is not best:
                    value = math.log(one.measured_s / best.measured_s) - math.log(one.predicted_s / best.predicted_s)
                    found.append(Residual(engine=name, value=value))
    return found


def _of_memory(rows: Sequence[Row]) -> dict[str, list[Residual]]:
    found: dict[str, list[Residual]] = {name: [] for name in SITUATIONS}  # measured steps say nothing of memory
    known = [row for row in rows if measured_bytes(row) is not None]
    for kind, given in (("known", known), ("guessed", [replace(row, engine=None) for row in known])):
        for row, one in zip(known, estimate_rows([row.without_result() for row in given]), strict=True):
            if isinstance(one, RowEstimate):
                name = f"{kind} engine{EXPERTS if row.moe_experts else ''}"
                found[name].append(_residual(row, measured_bytes(row) or 0.0, one.peak_bytes))
    return found


def of_users() -> dict[str, dict[str, list[Residual]]]:
    """Residuals of users' runs, whose publishers count as engines: of trainers, and of frameworks that are guessed."""
    found: dict[str, dict[str, list[Residual]]] = {"time": {}, "memory": {}}
    rows = [row for path in USERS for row in read_rows(path) if row.tier == "core"]
    for one in compared_rows(rows, estimate_rows):
        if one.predicted is None or one.predicted.situation.name not in ("trainer", "guessed engine"):
            continue
        pairs = {
            "time": (None if one.time is None else one.time.seconds, one.predicted.seconds),
            "memory": (one.memory_bytes, one.predicted.peak_bytes),
        }
        for figure, (measured, predicted) in pairs.items():
            if measured is not None:
                value = math.log(measured / predicted)
                residual = Residual(engine=str(one.row.source_key), value=value)
                found[figure].setdefault(one.predicted.situation.name, []).append(residual)
    return found


def _residual(row: Row, measured: float, predicted: float) -> Residual:
    return Residual(engine=engine(row), value=math.log(measured / predicted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The mean of log(measured / predicted) over engines, and its variance between engines and within them."""

    mean: float
    between: float
    within: float
    engines: int

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of a run of another engine; zero is always between them."""
        quantile = float(t.ppf((1 + COVERED) / 2, self.engines - 1))
        half = quantile * math.sqrt(self.between * (1 + 1 / self.engines) + self.within)
        return min(0.0, self.mean - half), max(0.0, self.mean + half)


def spread(found: Sequence[Residual]) -> Spread:
    """The spread of residuals of at least two engines."""
    by_engine: dict[str, list[float]] = {}
    for one in found:
        by_engine.setdefault(one.engine, []).append(one.value)
    means = [fmean(values) for values in by_engine.values()]
    within = [variance(values) for values in by_engine.values() if len(values) > 1]
    return Spread(
        mean=fmean(means),
        between=variance(means),
        within=fmean(within) if within else 0.0,
        engines=len(means),
    )


def coverage(found: Sequence[Residual]) -> dict[str, tuple[int, int]]:
    """The rows of each engine inside the bounds of the other engines, and all rows of it."""
    counted = {}
    for name in sorted({one.engine for one in found}):
        own, others = ([one for one in found if (one.engine == name) == is_own] for is_own in (True, False))
        if others:
            low, high = spread(others).bounds
            counted[name] = (sum(low <= one.value <= high for one in own), len(own))
    return counted


def all_bounds(rows: Sequence[Row]) -> dict[str, dict[str, tuple[float, float, int]]]:
    """Low and high logarithms and the number of rows, by figure and situation.

    The runs with experts are of few engines. Their variance between engines is that of the runs without experts, and
    their variance within engines is their own, or without any run twice that of the others.
    """
    made: dict[str, dict[str, tuple[float, float, int]]] = {}
    for figure, by_situation in residuals(rows).items():
        made[figure] = {}
        for name, found in by_situation.items():
            values = [one.value for one in found]
            if name.startswith("measured") and figure == "memory":
                made[figure][name] = made[figure][name.replace("measured step", "known engine")]
                continue
            if name == DEFAULT_DEVICE and figure == "memory":  # the profile of a device has no part in memory
                made[figure][name] = (0.0, 0.0, 0)
                continue
            if name.endswith(EXPERTS):
                dense = spread(by_situation[name.removesuffix(EXPERTS)])
                mean, within = (fmean(values), variance(values)) if values else (dense.mean, 2 * dense.within)
                one = replace(dense, mean=mean, within=within)
            else:
                one = spread(found)
            made[figure][name] = (*one.bounds, len(found))
    return made


def report(rows: Sequence[Row]) -> None:
    """Coverage by engine, with bounds that were made without it."""
    for figure, by_situation in residuals(rows).items():
        for name, found in by_situation.items():
            if name in (DEFAULT_DEVICE, PLAN_ORDER) or name.endswith(EXPERTS) or not found:
                continue
            counted = coverage(found)
            inside, every = (sum(pair[i] for pair in counted.values()) for i in (0, 1))
            print(f"{figure}, {name}: {inside} of {every} rows inside ({inside / max(every, 1):.0%})")
            for engine_name, (own, count) in counted.items():
                print(f"  {engine_name:20s} {own:3d} of {count:3d} ({own / count:.0%})")


def write(made: dict[str, dict[str, tuple[float, float, int]]]) -> None:
    """The bounds into their file."""
    lines = []
    for figure, by_situation in made.items():
        lines.append(f"{figure}:")
        for name, (low, high, count) in by_situation.items():
            unit = (
                "pairs of published runs" if name.startswith("measured") or figure == PLAN_ORDER else "published runs"
            )
            made_of = f"{count} {unit}, engine left out"
            if figure == "memory" and name == DEFAULT_DEVICE:
                made_of = "assumed: the profile of a device has no part in memory"
            elif figure == "memory" and name.startswith("measured"):
                made_of = "as of the known engine: a measured step says nothing of memory"
            elif not count:
                made_of = "assumed: twice the variance within engines of runs without experts"
            text = f"{made_of}, tools/prediction_intervals.py, {date.today()}"
            lines.append(f'  {name}: {{low: {math.exp(low):.3f}, high: {math.exp(high):.3f}, source: "{text}"}}')
    write_text(TARGET, "\n".join(lines) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    rows = [row for row in read_rows(DATA) if row.tier == "core"]
    made = all_bounds(rows)
    for figure, by_situation in made.items():
        for name, (low, high, count) in by_situation.items():
            print(f"{figure:7s} {name:26s} {math.exp(low):.3f} to {math.exp(high):.3f}, {count} rows")
    report(rows)
    shrinkages(rows)
    if not options.check:
        write(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
