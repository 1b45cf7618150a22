"""Fit the constants of the cost model to the published runs in ``benchmarks/data``, and write them where they stand.

    python tools/fit_cost_model.py            fit on the core rows, print what changes, write profiles and mechanisms
    python tools/fit_cost_model.py --check    print errors in sample and with each source left out; write nothing

The loss is the pseudo-Huber of log(predicted / measured), each source weighing as the square root of its rows, plus a
pull of every constant towards its prior: a constant that the runs say nothing of stays where its source puts it. At
most one constant is fitted for ten rows.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.cost_model.device_profile import Call, DeviceProfile, LinkProfile
from autopar.cost_model.mechanisms import Mechanisms, mechanisms
from autopar.cost_model.row import Row, read_rows
from autopar.cost_model.row_estimate import Group, prepare
from autopar.cost_model.shipped_profiles import shipped_profiles

ROOT = Path(__file__).parents[1]
DATA = ROOT / "benchmarks" / "data" / "published_runs.csv"
PART = 0.95  # of a figure of the data sheet that anything can reach
SCALE = 0.08  # errors below count squared, above by their size
GPU = ("v100", "a100", "h100", "h100-500w", "b200", "mi300", "default")
Profiles = dict[str, DeviceProfile]
World = tuple[Profiles, Mechanisms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number: how to read it, and the world with another value. `freedom`: deviation of its log around the prior, `most`
    what it can be."""

    name: str
    freedom: float
    most: float
    get: Callable[[World], float]
    put: Callable[[World, float], World]


def _mechanism(name: str, freedom: float, most: float = math.inf) -> Constant:
    return Constant(
        name=f"mechanisms.{name}",
        freedom=freedom,
        most=most,
        get=lambda world: float(getattr(world[1], name)),
        put=lambda world, value: (world[0], replace(world[1], **{name: value})),
    )


def _profile(
    name: str,
    owners: Sequence[str],
    freedom: float,
    get: Callable[[DeviceProfile], float],
    put: Callable[[DeviceProfile, float], DeviceProfile],
    most: float = math.inf,
) -> Constant:
    return Constant(
        name=name,
        freedom=freedom,
        most=most,
        get=lambda world: get(world[0][owners[0]]),
        put=lambda world, value: (
            {key: put(one, value) if key in owners else one for key, one in world[0].items()},
            world[1],
        ),
    )


def _efficiency(owner: str, dtypes: Sequence[str], freedom: float) -> Constant:
    def put(profile: DeviceProfile, value: float) -> DeviceProfile:
        return replace(
            profile, efficiency={**profile.efficiency, **{d: value for d in dtypes if d in profile.efficiency}}
        )

    return _profile(f"{owner}.efficiency.{dtypes[0]}", [owner], freedom, lambda p: p.efficiency[dtypes[0]], put, PART)


def _attention(owners: Sequence[str], freedom: float) -> Constant:
    def put(profile: DeviceProfile, value: float) -> DeviceProfile:
        ratio = value / profile.attention.forward
        attention = replace(profile.attention, forward=value, backward=profile.attention.backward * ratio)
        return replace(profile, attention=attention)

    return _profile(f"{owners[0]}.attention.forward", owners, freedom, lambda p: p.attention.forward, put, PART)


PEAKS = {"v100": 125 / 80, "a100": 312 / 108, "h100": 989 / 132, "h100-500w": 989 / 132, "b200": 2250 / 148}


def _k_half(freedom: float) -> Constant:
    def put(profile: DeviceProfile, value: float) -> DeviceProfile:
        ratio = PEAKS.get(profile.name, PEAKS["h100"]) / PEAKS["a100"]
        return replace(profile, tile=replace(profile.tile, k_half=value * ratio))

    return _profile(
        "gpu.tile.k_half", ["a100", *(g for g in GPU if g != "a100")], freedom, lambda p: p.tile.k_half, put
    )


def _link(tier: Any, field: str, freedom: float) -> Constant:
    def put(profile: DeviceProfile, value: float) -> DeviceProfile:
        usual: Call = replace(profile.links[tier].usual, **{field: value})
        link: LinkProfile = replace(profile.links[tier], usual=usual)
        return replace(profile, links={**profile.links, tier: link})

    return _profile(
        f"gpu.{tier}.{field}", GPU, freedom, lambda p: float(getattr(p.links[tier].usual, field)), put, PART
    )


def constants() -> list[Constant]:
    """Everything that is fitted."""
    wide = ("float16", "bfloat16")
    return [
        *(_efficiency(owner, wide, 0.15) for owner in ("v100", "a100", "h100", "h100-500w", "b200")),
        *(_efficiency(owner, ("float8",), 0.15) for owner in ("h100", "h100-500w", "b200")),
        *(_attention(owners, 0.2) for owners in (("a100",), ("h100", "h100-500w"), ("b200",))),
        _profile(
            "gpu.memory_efficiency",
            GPU,
            0.06,
            lambda p: p.memory_efficiency,
            lambda p, v: replace(p, memory_efficiency=v),
            PART,
        ),
        _k_half(0.4),
        _profile("gpu.launch_s", GPU, 0.4, lambda p: p.launch_s, lambda p, v: replace(p, launch_s=v)),
        _profile("gpu.host_launch_s", GPU, 0.4, lambda p: p.host_launch_s, lambda p, v: replace(p, host_launch_s=v)),
        _profile(
            "gpu.overlap_slowdown-1",
            GPU,
            0.5,
            lambda p: p.overlap_slowdown - 1,
            lambda p, v: replace(p, overlap_slowdown=1 + v),
        ),
        _link("in_host", "efficiency", 0.1),
        _link("inter_host", "efficiency", 0.1),
        _mechanism("first_attention", 0.2),
        _mechanism("native_attention", 0.15),
        _mechanism("misaligned", 0.4),
        _mechanism("lean_dispatch", 0.5),
        _mechanism("async_hidden", 0.5, PART),
        _mechanism("pipelined_hidden", 0.3, PART),
        _mechanism("message_exposed", 0.5, 1.0),
        _mechanism("gradient_window", 0.3, 1.0),
        _mechanism("broadcast_s", 0.5),
        _mechanism("straggler", 0.7, 0.03),
        _mechanism("step_s", 0.7),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Rows with a measured time, prepared."""

    rows: tuple[Row, ...]
    groups: tuple[Group, ...]
    measured_s: NDArray[np.float64]

    def predict(self, world: World) -> NDArray[np.float64]:
        found = np.full(len(self.rows), np.nan)
        for group in self.groups:
            step = group.step(world[1], world[0][group.profile.name])
            found[list(group.indices)] = step.seconds
        return found

    def weights(self) -> NDArray[np.float64]:
        counts = Counter(row.source_key for row in self.rows)
        found = np.array([1 / math.sqrt(counts[row.source_key]) for row in self.rows])
        return found / found.mean()


def runs(rows: Sequence[Row]) -> Runs:
    kept = [row for row in rows if row.step_time_s or row.step_time_derived_s]
    groups, unmodelled = prepare([row.without_result() for row in kept])
    assert not unmodelled, list(unmodelled.values())[:3]
    measured = np.array([row.step_time_s or row.step_time_derived_s for row in kept], dtype=float)
    return Runs(rows=tuple(kept), groups=tuple(groups), measured_s=measured)


def fit(found: Runs, prior: World, *, rounds: int = 25) -> World:
    """The world whose constants make the loss least."""
    chosen, weights = constants(), found.weights()
    start = [one.get(prior) for one in chosen]

    def world_at(logs: NDArray[np.float64]) -> World:
        world = prior
        for one, value, log in zip(chosen, start, logs, strict=True):
            world = one.put(world, min(one.most, value * math.exp(log * one.freedom)))
        return world

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        error = np.log(found.predict(world_at(logs)) / found.measured_s) * weights
        huber = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + (error / SCALE) ** 2) - 1))
        return np.concatenate([huber, 0.5 * logs])

    solution = least_squares(residuals, np.zeros(len(chosen)), bounds=(-3, 3), max_nfev=rounds, diff_step=3e-3)
    return world_at(solution.x)


def report(found: Runs, predicted: NDArray[np.float64]) -> None:
    error = predicted / found.measured_s - 1
    sources = np.array([row.source_key for row in found.rows])
    for source in [*sorted(set(sources)), "all"]:
        one = error[(sources == source) | (source == "all")]
        one = one[np.isfinite(one)]
        if len(one):
            low, high = np.median(abs(one)), np.quantile(abs(one), 0.9)
            print(f"{source:20s} n={len(one):3d} median={low:.3f} p90={high:.3f} bias={np.median(one):+.3f}")


def leave_one_out(rows: Sequence[Row], prior: World) -> None:
    """Every source predicted by a fit on the others, where its device and precision occur among them."""
    whole = runs(rows)
    predicted = np.full(len(whole.rows), np.nan)

    def kind(row: Row) -> tuple[str | None, bool]:
        return row.gpu_type, row.precision == "fp8"

    for source in sorted({row.source_key or "" for row in whole.rows}):
        others = runs([row for row in rows if row.source_key != source])
        seen = {kind(row) for row in others.rows}
        world = fit(others, prior, rounds=12)
        mine = whole.predict(world)
        for i, row in enumerate(whole.rows):
            if row.source_key == source and kind(row) in seen:
                predicted[i] = mine[i]
    print("each source left out of the fit, where its device and precision occur elsewhere:")
    report(whole, predicted)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args(arguments)
    rows = [row for row in read_rows(DATA) if row.tier == "core"]
    prior: World = (dict(shipped_profiles()), mechanisms())
    found = runs(rows)
    print(f"{len(constants())} constants, {len(found.rows)} rows")
    report(found, found.predict(prior))
    world = fit(found, prior, rounds=options.rounds)
    for one in constants():
        print(f"  {one.name:32s} {one.get(prior):.4g} -> {one.get(world):.4g}")
    report(found, found.predict(world))
    if options.check:
        leave_one_out(rows, prior)
        return 0
    json.dump({one.name: one.get(world) for one in constants()}, open("/tmp/proto/fitted.json", "w"), indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
