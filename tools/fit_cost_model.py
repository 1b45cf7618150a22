"""Fit the constants of the cost model to the published runs in ``benchmarks/data``, and write them into their files.

    python tools/fit_cost_model.py            fit on the core rows, print what changes, write profiles and mechanisms
    python tools/fit_cost_model.py --check    errors with each source, and each engine, left out of the fit; writes the
                                              predictions to benchmarks/results/left_out_*.csv, nothing else

The loss is the pseudo-Huber of log(predicted / measured). Each source has the weight of the square root of its rows.
Every constant is also pulled towards its prior, so a constant that no run depends on keeps the value of its source. At
most one constant is fitted for ten rows. Priors are in `constants`, so fitting twice changes nothing.
"""

import argparse
import csv
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from leave_one_out import Fold, engine, folds
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.cost_model.machine.fitted_constants import Mechanisms, mechanisms
from autopar.cost_model.machine.presets import shipped_profiles
from autopar.cost_model.machine.profile import CallCost, DeviceProfile, LinkProfile
from autopar.cost_model.machine.profile_io import dump_profile
from autopar.cost_model.published.estimate import RowGroup, prepare
from autopar.cost_model.published.row import Row, read_rows
from autopar.files.atomic import write_text
from autopar.files.strict_yaml import read_yaml

ROOT = Path(__file__).parents[1]
DATA = ROOT / "benchmarks" / "data" / "published_runs.csv"
LEFT_OUT = ROOT / "benchmarks" / "results" / "left_out_predictions.csv"
ENGINE_LEFT_OUT = ROOT / "benchmarks" / "results" / "left_out_engines.csv"
PROFILES = ROOT / "autopar" / "presets" / "profiles"
PART = 0.95  # the most that any kernel reaches of a figure of the data sheet
SCALE = 0.08  # smaller errors count squared, larger ones by their size
PULL = 0.5  # the loss of a constant that is one deviation from its prior
GPU = ("a100", "v100", "h100", "b200", "mi300", "geforce", "workstation", "default")
# 16-bit FLOP/s of one multiprocessor over an A100's: a product's start and end cost the more of k
RATE = {"v100": 125 / 80, "a100": 312 / 108, "b200": 2250 / 148, "h100": 989 / 132}
RATE |= {"geforce": 165.2 / 128, "workstation": 362 / 142}  # RTX 4090, L40S
Profiles = dict[str, DeviceProfile]
World = tuple[Profiles, Mechanisms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number that is fitted.

    `freedom` is the deviation of its logarithm from the prior, `most` its largest value. `put` gives the world with
    another value. `paths` are its places in the files of `owners` (profiles), or its name among the mechanisms.
    """

    name: str
    prior: float
    freedom: float
    most: float
    put: Callable[[World, float], World]
    owners: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


def _mechanism(name: str, prior: float, freedom: float, most: float = math.inf) -> Constant:
    return Constant(
        name=name,
        prior=prior,
        freedom=freedom,
        most=most,
        put=lambda world, value: (world[0], replace(world[1], **{name: value})),
    )


def _profile(
    paths: Sequence[str],
    owners: Sequence[str],
    prior: float,
    freedom: float,
    change: Callable[[DeviceProfile, float], DeviceProfile],
    most: float = math.inf,
) -> Constant:
    return Constant(
        name=f"{owners[0] if len(owners) < len(GPU) else 'gpu'}.{paths[0]}",
        prior=prior,
        freedom=freedom,
        most=most,
        put=lambda world, value: (
            {key: change(one, value) if key in owners else one for key, one in world[0].items()},
            world[1],
        ),
        owners=tuple(owners),
        paths=tuple(paths),
    )


def _efficiency(owner: str, dtypes: Sequence[str], prior: float) -> Constant:
    def change(profile: DeviceProfile, value: float) -> DeviceProfile:
        mine = {dtype: value for dtype in dtypes if dtype in profile.efficiency}
        return replace(profile, efficiency={**profile.efficiency, **mine})

    return _profile([f"efficiency.{dtype}" for dtype in dtypes], [owner], prior, 0.15, change, PART)


def _attention(owners: Sequence[str], prior: float) -> Constant:
    def change(profile: DeviceProfile, value: float) -> DeviceProfile:
        ratio = profile.attention.backward / profile.attention.forward
        return replace(profile, attention=replace(profile.attention, forward=value, backward=value * ratio))

    return _profile(["attention.forward", "attention.backward"], owners, prior, 0.2, change, PART)


def _k_half(prior: float) -> Constant:
    def change(profile: DeviceProfile, value: float) -> DeviceProfile:
        faster = RATE.get(profile.name, RATE["h100"]) / RATE["a100"]
        return replace(profile, tile=replace(profile.tile, k_half=value * faster))

    return _profile(["tile.k_half"], GPU, prior, 0.4, change)


def _link(tier: Any, field: str, prior: float, freedom: float) -> Constant:
    def change(profile: DeviceProfile, value: float) -> DeviceProfile:
        usual: CallCost = replace(profile.links[tier].usual, **{field: value})
        link: LinkProfile = replace(profile.links[tier], usual=usual)
        return replace(profile, links={**profile.links, tier: link})

    return _profile([f"links.{tier}.{field}"], GPU, prior, freedom, change, PART)


def _number(field: str, path: str, prior: float, freedom: float, most: float = math.inf) -> Constant:
    def change(profile: DeviceProfile, value: float) -> DeviceProfile:
        changes: dict[str, Any] = {field: value}
        return replace(profile, **changes)

    return _profile([path], GPU, prior, freedom, change, most)


def constants() -> list[Constant]:
    """Everything that is fitted, with its prior."""
    wide = ("float16", "bfloat16")
    return [
        *(_efficiency(owner, wide, prior) for owner, prior in (("v100", 0.75), ("a100", 0.85), ("h100", 0.75))),
        _efficiency("b200", wide, 0.7),
        *(_efficiency(owner, ("float8",), 0.65) for owner in ("h100", "b200")),
        _attention(["a100"], 0.7),
        _attention(["h100"], 0.349),  # benchmarks/results/2026-11-26-one-h100.md
        _attention(["b200"], 0.3),
        _k_half(256),
        _number("memory_efficiency", "memory_efficiency", 0.85, 0.06, PART),
        _number("launch_s", "launch_us", 4e-6, 0.15),
        _number("host_launch_s", "host_launch_us", 25e-6, 0.4),
        _link("in_host", "efficiency", 0.8, 0.1),
        _link("inter_host", "efficiency", 0.8, 0.1),
        _mechanism("first_attention", 0.75, 0.2),
        _mechanism("native_attention", 1.6, 0.15),
        _mechanism("misaligned", 6.0, 0.4),
        _mechanism("lean_dispatch", 0.3, 0.5, 1.0),
        _mechanism("pipelined_hidden", 0.6, 0.3, PART),
        _mechanism("message_exposed", 0.5, 0.5, 1.0),
        _mechanism("gradient_window", 0.8, 0.3, 1.0),
        _mechanism("broadcast_s", 0.002, 0.5),
        _mechanism("straggler", 0.008, 0.3, 0.03),
        _mechanism("step_s", 0.01, 0.7),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Rows with a measured time, prepared."""

    rows: tuple[Row, ...]
    groups: tuple[RowGroup, ...]
    measured_s: NDArray[np.float64]

    def predict(self, world: World) -> NDArray[np.float64]:
        found = np.full(len(self.rows), np.nan)
        for group in self.groups:
            found[list(group.indices)] = group.step(world[1], world[0][group.profile.name]).seconds
        return found

    def weights(self) -> NDArray[np.float64]:
        counts = Counter(row.source_key for row in self.rows)
        found = np.array([1 / math.sqrt(counts[row.source_key]) for row in self.rows])
        scaled: NDArray[np.float64] = found / found.mean()
        return scaled


def runs(rows: Sequence[Row]) -> Runs:
    """The rows with a stated or derived step time that the model takes."""
    kept = [row for row in rows if row.step_time_s or row.step_time_derived_s]
    groups, unmodelled = prepare([row.without_result() for row in kept])
    assert not unmodelled, list(unmodelled.values())[:3]
    measured = np.array([row.step_time_s or row.step_time_derived_s for row in kept], dtype=float)
    return Runs(rows=tuple(kept), groups=tuple(groups), measured_s=measured)


def shipped() -> World:
    """The numbers in the files."""
    return dict(shipped_profiles()), mechanisms()


def fit(found: Runs, *, rounds: int = 20) -> tuple[World, list[float]]:
    """The world whose constants make the loss least, and their values."""
    chosen, weights = constants(), found.weights()

    def values_at(logs: NDArray[np.float64]) -> list[float]:
        return [min(one.most, one.prior * math.exp(log * one.freedom)) for one, log in zip(chosen, logs, strict=True)]

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        error = np.log(found.predict(_world(values_at(logs))) / found.measured_s) * weights
        huber = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + (error / SCALE) ** 2) - 1))
        return np.concatenate([huber, PULL * logs])

    solution = least_squares(residuals, np.zeros(len(chosen)), bounds=(-3, 3), max_nfev=rounds, diff_step=3e-3)
    values = [float(f"{value:.4g}") for value in values_at(solution.x)]
    return _world(values), values


def _world(values: Sequence[float]) -> World:
    world = shipped()
    for one, value in zip(constants(), values, strict=True):
        world = one.put(world, value)
    return world


def report(found: Runs, predicted: NDArray[np.float64]) -> None:
    """Errors by source."""
    error = predicted / found.measured_s - 1
    sources = np.array([row.source_key for row in found.rows])
    for source in [*sorted(set(sources)), "all"]:
        one = error[(sources == source) | (source == "all")]
        one = one[np.isfinite(one)]
        if len(one):
            middle, high = np.median(abs(one)), np.quantile(abs(one), 0.9)
            print(f"{source:20s} n={len(one):3d} median={middle:.3f} p90={high:.3f} bias={np.median(one):+.3f}")


def leave_sources_out(rows: Sequence[Row], *, rounds: int) -> None:
    """Every source predicted by a fit on the others, where its device and precision occur among them."""
    whole = runs(rows)
    predicted = np.full(len(whole.rows), np.nan)
    for fold, world in _worlds(whole, folds(whole.rows), rounds):
        predicted[list(fold.test)] = whole.predict(world)[list(fold.test)]
    report(whole, predicted)
    _write_predictions(LEFT_OUT, whole, {"seconds": predicted})


def leave_engines_out(rows: Sequence[Row], *, rounds: int) -> None:
    """Every engine predicted by a fit on the others: with its mechanisms, and as a framework that is not known."""
    whole, hidden = runs(rows), runs([replace(row, engine=None) for row in rows])
    known, guessed = (np.full(len(whole.rows), np.nan) for _ in range(2))
    for fold, world in _worlds(whole, folds(whole.rows, group=engine, elsewhere=()), rounds):
        known[list(fold.test)] = whole.predict(world)[list(fold.test)]
        guessed[list(fold.test)] = hidden.predict(world)[list(fold.test)]
    report(whole, known)
    report(whole, guessed)
    _write_predictions(ENGINE_LEFT_OUT, whole, {"seconds": known, "guessed_seconds": guessed})


def _worlds(whole: Runs, found: Sequence[Fold], rounds: int) -> Iterator[tuple[Fold, World]]:
    """Every fold with the world fitted on its other rows."""
    with ProcessPoolExecutor() as pool:
        worlds = pool.map(_fitted, [[whole.rows[i] for i in fold.train] for fold in found], [rounds] * len(found))
        for fold, world in zip(found, worlds, strict=True):
            print(f"  without {fold.group}: {len(fold.test)} rows", flush=True)
            yield fold, world


def _write_predictions(path: Path, whole: Runs, columns: Mapping[str, NDArray[np.float64]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", *columns])
        for row, *values in zip(whole.rows, *columns.values(), strict=True):
            if all(map(math.isfinite, values)):
                writer.writerow([row.id, *(f"{value:.6g}" for value in values)])


def _fitted(rows: Sequence[Row], rounds: int) -> World:
    """The world fitted on some rows, in a process of its own."""
    return fit(runs(rows), rounds=rounds)[0]


def write(world: World, num_rows: int) -> None:
    """The fitted numbers into the files, each with its prior and the rows that it was fitted on."""
    sources: dict[str, str] = {}
    written: dict[str, dict[str, str]] = {name: {} for name in GPU}
    for one in constants():
        text = f"fitted on {num_rows} published runs by tools/fit_cost_model.py, {date.today()}; prior {one.prior:g}"
        if not one.owners:
            sources[one.name] = text
        for owner in one.owners:
            written[owner] |= dict.fromkeys(one.paths, text)
    for name, texts in written.items():
        profile = world[0][name]
        known = {path: text for path, text in texts.items() if path in profile.sources}
        dump_profile(replace(profile, sources={**profile.sources, **known}), PROFILES / f"{name}.yaml")
    dump_mechanisms(world[1], sources, ROOT / "cost_model" / "machine" / "fitted_constants.yaml")


def dump_mechanisms(found: Mechanisms, sources: Mapping[str, str], path: Path) -> None:
    """Write ``fitted_constants.yaml`` again. A number that `sources` does not name keeps its source."""
    content, _ = read_yaml(path)
    assert isinstance(content, dict)
    lines = [
        f'{name}: {{value: {getattr(found, name):g}, source: "{sources.get(name, content[name]["source"])}"}}'
        for name in (field.name for field in fields(Mechanisms))
    ]
    write_text(path, "\n".join(lines) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="leave sources and engines out instead of writing")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    rows = [row for row in read_rows(DATA) if row.tier == "core"]
    if options.check:
        leave_sources_out(rows, rounds=options.rounds)
        leave_engines_out(rows, rounds=options.rounds)
        return 0
    found = runs(rows)
    print(f"{len(constants())} constants, {len(found.rows)} rows")
    world, values = fit(found, rounds=options.rounds)
    for one, value in zip(constants(), values, strict=True):
        print(f"  {one.name:32s} {one.prior:.4g} -> {value:.4g}")
    report(found, found.predict(world))
    write(world, len(found.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
