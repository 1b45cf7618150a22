"""Measured steps of one's own correct the device profile, before a plan is priced or searched.

A measured step of the same device, precision and engine says how much longer steps take than predicted. The constants
of computing, and of the links of each tier, are scaled by what such steps say of them
(`autopar.cost_model.fit.measured_steps`). A scale is shrunk, because another model or layout is only partly off by the
same ratio (``tools/prediction_intervals.py`` prints what published runs say). Steps are the rows of a CSV file, or the
trace of one step.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.estimate import Estimate
from autopar.cost_model.fit.measured_steps import elasticities, profile_terms, slowed, term_factors
from autopar.cost_model.fit.predicted_vs_measured import ratio_of, terms_by_constant
from autopar.cost_model.fit.profile_comparison import compare_trace, tiers_of
from autopar.cost_model.interval import SHRINKAGE
from autopar.cost_model.machine.cluster import cluster_machine, default_precision
from autopar.cost_model.machine.engine import DEFAULT, Engine, engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.cost_model.machine.profile_io import load_profile
from autopar.cost_model.published.estimate import RowGroup, prepare
from autopar.cost_model.published.machine import engine_of
from autopar.cost_model.published.measurement import measured_seconds
from autopar.cost_model.published.row import Row, read_row_file
from autopar.errors import ClusterError, InputError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees, degrees_from
from autopar.ir.device_presets import device_preset
from autopar.search.space.subcluster import device_counts, part_of

_NAMES = {
    "compute": "computing",
    "in_host": "links in a host",
    "inter_host": "links between hosts",
    "spine": "links over the spine",
}


# a measured step: its name, measured over predicted seconds, and the part of each term in its time
_Step = tuple[str, float, NDArray[np.float64]]


def corrected_by_steps(
    path: str | Path,
    cluster: ClusterSpec,
    *,
    engine: Engine,
    precision: str,
    profile: DeviceProfile | None = None,
) -> DeviceProfile:
    """The profile of a cluster's devices, corrected by the measured steps of a file."""
    machine = cluster_machine(cluster, engine, mechanisms(), precision=precision, profile=profile)
    rows = read_row_file(path).rows
    device = machine.device.name
    mine = [row for row in rows if _device(row) == device and row.precision == precision]
    mine = [row for row in mine if engine_of(row).name == engine.name]
    usual = machine.profile.at_power_of(machine.device)
    steps = _steps(mine, usual)
    if not steps:
        there = sorted({f"{_device(r)}, {r.precision}, {engine_of(r).name}" for r in rows})
        raise InputError(
            f"{path} has no measured step of device {device}, precision {precision} and engine {engine.name}; its rows "
            f"are of: {'; '.join(there[:5])}. Name them in the columns gpu_type, precision and engine, and give "
            "step_time_s or tokens_per_s_per_gpu"
        )
    solved = term_factors([ratio for _, ratio, _ in steps], np.stack([parts for _, _, parts in steps]))
    factors = dict(zip(profile_terms(usual), solved.tolist(), strict=True))
    shown = ", ".join(f"{name} {ratio - 1:+.0%}" for name, ratio, _ in steps[:3])
    more = f" and {len(steps) - 3} more" if len(steps) > 3 else ""
    return _scaled(usual, factors, f"measured against predicted steps: {shown}{more}", len(steps))


def is_trace(path: str | Path | None) -> TypeGuard[str | Path]:
    """Whether measured steps are given as a trace, by the name of the file."""
    return str(path).endswith((".json", ".json.gz"))


def traced_plan(trace: Mapping[str, Any], cluster: ClusterSpec, path: str | Path) -> tuple[Degrees, ClusterSpec]:
    """The degrees of a traced step, and the part of the cluster with as many devices."""
    about = trace.get("otherData")
    said: Mapping[str, Any] = about if isinstance(about, Mapping) else {}
    if not isinstance(said.get("degrees"), Mapping):
        raise InputError(f"{path} does not state the plan of its step; write it with this version of `autopar trace`")
    degrees, backend = degrees_from(said["degrees"], f"the plan in {path}"), said.get("backend")
    if backend not in (None, cluster.backend):
        kinds = {"gloo": "CPU ranks", "nccl": "GPUs"}
        raise InputError(
            f"{path} is a step of {kinds.get(backend, 'other ranks')} ({backend}), and cluster {cluster.name} has "
            f"{kinds[cluster.backend]}; measure a step on the devices of the cluster"
        )
    ranks, counts = degrees.world_size, device_counts(cluster)
    if ranks not in counts:
        raise InputError(
            f"{path} is a step of {ranks} ranks, and no part of cluster {cluster.name} has as many devices; its parts "
            f"have {', '.join(map(str, counts[-6:]))}"
        )
    return degrees, part_of(cluster, ranks)


def corrected_by_trace(
    trace: Mapping[str, Any], estimate: Estimate, part: ClusterSpec, profile: DeviceProfile, path: str | Path
) -> DeviceProfile:
    """A profile, corrected by a trace. A trace has the seconds of each term, so each term has a ratio of its own."""
    comparison = compare_trace(estimate, trace, band=0.0)
    terms = terms_by_constant(comparison, tiers_of(part, estimate.degrees).get)
    factors: dict[str, float] = {name: ratio_of(each) ** SHRINKAGE for name, each in terms.items()}
    total = comparison.total
    return _scaled(profile, factors, f"{path}: step {total.measured_s / total.predicted_s - 1:+.0%}", 1)


def _scaled(usual: DeviceProfile, factors: Mapping[str, float], why: str, steps: int) -> DeviceProfile:
    """The profile with terms that take `factors` times as long, the number of `steps` behind them, and a note."""
    scaled = ", ".join(f"{_NAMES[term]} by {factor:.3f}" for term, factor in factors.items() if factor != 1)
    note = f"times of profile {usual.name} are scaled, {scaled or 'none'}: {why}"
    slower = slowed(usual, factors, why)
    return replace(slower, steps=steps, notes=(*slower.notes, note))


def profile_for(
    given: DeviceProfile | str | Path | None,
    steps: str | Path | None,
    cluster: ClusterSpec,
    precision: str | None,
    engine: Engine | None = None,
) -> DeviceProfile | None:
    """A profile or its file, corrected by `steps` of a CSV file; a trace corrects later. None without any."""
    profile = load_profile(given) if isinstance(given, (str, Path)) else given
    if steps is None or is_trace(steps):
        return profile
    wanted = precision or default_precision(cluster)
    return corrected_by_steps(steps, cluster, engine=engine or engine_named(DEFAULT), precision=wanted, profile=profile)


def _device(row: Row) -> str:
    try:
        return device_preset(row.gpu_type or "").name
    except ClusterError:
        return row.gpu_type or "not stated"


def _steps(rows: list[Row], profile: DeviceProfile) -> list[_Step]:
    """The rows with a measured time that is not ambiguous, priced with a profile."""
    timed = [(row, measured) for row in rows if (measured := measured_seconds(row)) is not None]
    timed = [(row, measured) for row, measured in timed if not measured.is_ambiguous]
    groups, _ = prepare([row.without_result() for row, _ in timed])
    steps = []
    for group in groups:
        count = len(group.indices)

        def price(by: DeviceProfile, group: RowGroup = group, count: int = count) -> NDArray[np.float64]:
            return np.broadcast_to(group.step(mechanisms(), by).seconds, count)

        for index, predicted, parts in zip(group.indices, price(profile), elasticities(price, profile), strict=True):
            row, measured = timed[index]
            steps.append((row.id, measured.seconds / float(predicted), parts))
    return steps
