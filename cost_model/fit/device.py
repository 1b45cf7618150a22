"""Fit a device profile to measurements: `Sample`s in, constants of `autopar.cost_model.machine.kernel_times` out.

The parts are fitted in this order: launch, memory, products, attention, links, overlap. Each part uses the constants of
the parts before it. A part without measurements keeps the constants and the sources of the profile `base`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from autopar.cost_model.fit.links import fit_links
from autopar.cost_model.fit.log_least_squares import (
    COARSE,
    FINE,
    best_constant,
    fit_errors,
    log_loss,
    rounded,
    rounded_s,
)
from autopar.cost_model.fit.sources import with_sources
from autopar.cost_model.machine.kernel_times import attention_seconds, matmul_seconds, memory_seconds, tile_part
from autopar.cost_model.machine.profile import AttentionEfficiency, DeviceProfile, FitError, Measurement, Tile
from autopar.ir.arrays import Floats
from autopar.ir.device import Device, Link
from autopar.ir.samples import Sample, WorkPart

TILES = (1.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_HALVES = (0.0, *(float(2**i) for i in range(1, 13)))
_FINER = (0.9, 0.1, 0.01)  # octaves around the best half so far
OWN_HALVES = 0.5  # both passes have a number of their own if it lowers the loss so far: noise alone does not
ELEMENT_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "float4": 0.5}
LEAST_PART, MOST_PART = 1e-3, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSetting:
    """The inputs of a fit other than times."""

    device: Device
    base: DeviceProfile
    measured: Measurement
    units: float = 1.0  # multiprocessors, 1 on a CPU
    figures_are_known: bool = True  # of a data sheet; else the best measured rates take their place
    reserve_bytes: int | None = None
    link: Link | None = None


def fit_profile(samples: Sequence[Sample], setting: FitSetting) -> DeviceProfile:
    """The profile that `samples` are measurements of, named after the device."""
    parts: dict[WorkPart, list[Sample]] = {}
    for sample in samples:
        parts.setdefault(sample.work.part, []).append(sample)
    device = setting.device if setting.figures_are_known else measured_figures(setting.device, samples)
    name = re.sub(r"[^a-z0-9._-]+", "-", setting.device.name.lower()).strip("-._")[:50] or "device"
    base = setting.base.at_power_of(device)
    profile = replace(
        base,
        name=f"{name}-measured",
        devices=(name,),
        description=f"{setting.device.name}, measured by autopar calibrate",
        device=device,
        measured=setting.measured,
        fit={},
        notes=(),
        sources=dict(base.sources),
    )
    for fit in (_launch, _memory, _products, _attention, _links, _overlap):
        profile = fit(parts, profile, setting)
    if setting.reserve_bytes is not None:
        profile = _measured(profile, setting, ("reserve_gb",), reserve_bytes=setting.reserve_bytes)
    return profile


def _measured(
    profile: DeviceProfile,
    setting: FitSetting,
    paths: Sequence[str],
    errors: Mapping[str, FitError] | None = None,
    **fields: Any,
) -> DeviceProfile:
    """The profile with measured constants, their paths in the file, and the errors of the fit by part."""
    source = f"measured {setting.measured.date} by autopar calibrate, {setting.measured.how}"
    return with_sources(replace(profile, fit={**profile.fit, **(errors or {})}, **fields), paths, lambda _: source)


def measured_figures(device: Device, samples: Sequence[Sample]) -> Device:
    """`device` with the best measured rates as its peaks and bandwidth."""
    peaks: dict[str, float] = {}
    speed = 0.0
    for sample in samples:
        rate = sample.work.amount / sample.seconds
        if sample.work.part in ("matmul", "products"):
            peaks[sample.work.name] = max(peaks.get(sample.work.name, 0.0), rate)
        elif sample.work.part == "memory":
            speed = max(speed, rate)
    figures = {dtype: rounded(peak) for dtype, peak in peaks.items()}
    figures.setdefault("float32", device.peak("float32"))  # which every device has
    return replace(
        device,
        peak_flops_per_s=figures,
        memory_bandwidth_bytes_per_s=rounded(speed) if speed else device.memory_bandwidth_bytes_per_s,
        source="the best rates that autopar calibrate measured",
    )


# ---- launch and memory ----


def _launch(parts: Mapping[WorkPart, list[Sample]], profile: DeviceProfile, setting: FitSetting) -> DeviceProfile:
    """Seconds per operator. On a CPU the host's seconds are the time of training outside of operators."""
    samples = parts.get("launch", [])
    each = {
        name: float(np.exp(np.mean([np.log(s.seconds / s.work.amount) for s in samples if s.work.name == name])))
        for name in {s.work.name for s in samples}
    }
    if each.keys() != {"device", "host"}:
        return profile
    device, host = each["device"], each["host"]
    if setting.device.device_type == "cpu":
        device, host = min(device, host), max(0.0, host - device)
    paths = ("launch_us", "host_launch_us")
    return _measured(profile, setting, paths, launch_s=rounded_s(device), host_launch_s=rounded_s(host))


def _memory(parts: Mapping[WorkPart, list[Sample]], profile: DeviceProfile, setting: FitSetting) -> DeviceProfile:
    samples = parts.get("memory")
    if not samples:
        return profile
    moved, seconds = _amounts(samples), _seconds(samples)
    bandwidth = _device(profile).memory_bandwidth_bytes_per_s
    part = rounded(
        best_constant(lambda part: profile.launch_s + moved / (bandwidth * part), seconds, LEAST_PART, MOST_PART)
    )
    times = memory_seconds(moved_bytes=moved, bytes_per_s=bandwidth * part, launch_s=profile.launch_s)
    errors = {"memory": fit_errors(times, seconds)}
    return _measured(profile, setting, ("memory_efficiency",), errors, memory_efficiency=part)


# ---- products and attention ----


def _products(parts: Mapping[WorkPart, list[Sample]], profile: DeviceProfile, setting: FitSetting) -> DeviceProfile:
    """One tile for all dtypes and one efficiency for each dtype: the best tile of a grid with its best efficiencies."""
    groups = _by_name(parts.get("matmul", []), profile)
    if not groups:
        return profile
    best = (np.inf, profile.tile)
    for m, n in product(TILES, TILES):
        losses = np.array([_loss(groups, profile, Tile(m=m, n=n, k_half=k, units=setting.units)) for k in _HALVES])
        index = int(np.argmin(losses))
        # of tiles that predict alike, the smallest: no measurement shows larger ones
        if losses[index] < best[0] * 0.999:
            best = (float(losses[index]), Tile(m=m, n=n, k_half=_HALVES[index], units=setting.units))
    tile = _refined(groups, profile, best[1])
    efficiency = {name: rounded(_efficiency(group, profile, tile, name)) for name, group in groups.items()}
    predicted, seconds = list[float](), list[float]()
    for name, group in groups.items():
        predicted += _product_times(group, profile, tile, name, efficiency[name]).tolist()
        seconds += _seconds(group).tolist()
    errors = {"matmul": fit_errors(predicted, seconds)}
    return _measured(profile, setting, ("tile", "efficiency"), errors, tile=tile, efficiency=efficiency)


def _refined(groups: Mapping[str, list[Sample]], profile: DeviceProfile, tile: Tile) -> Tile:
    """A finer search of `k_half` around the best of the grid."""
    if not tile.k_half:
        return tile
    around = [float(f"{tile.k_half * 2**x:.3g}") for x in np.linspace(-0.9, 0.9, 19)]
    return min((replace(tile, k_half=k) for k in around), key=lambda tile: _loss(groups, profile, tile))


def _loss(groups: Mapping[str, list[Sample]], profile: DeviceProfile, tile: Tile) -> float:
    total = 0.0
    for name, group in groups.items():
        times = _product_times(group, profile, tile, name, _efficiency(group, profile, tile, name, COARSE))
        total += float(log_loss(times, _seconds(group))) * len(group)
    return total


def _efficiency(group: Sequence[Sample], profile: DeviceProfile, tile: Tile, dtype: str, rounds: int = FINE) -> float:
    predict = partial(_product_times, group, profile, tile, dtype)
    return best_constant(predict, _seconds(group), LEAST_PART, MOST_PART, rounds=rounds)


def _product_times(
    group: Sequence[Sample], profile: DeviceProfile, tile: Tile, dtype: str, efficiency: Floats | float
) -> Floats:
    device = _device(profile)
    count, m, n, k = (_numbers(group, key) for key in ("count", "m", "n", "k"))
    return matmul_seconds(
        flops=_amounts(group),
        moved_bytes=count * (m * k + k * n + m * n) * ELEMENT_BYTES[dtype],
        part=efficiency * tile_part(tile, m, n, k, count),
        peak_flops_per_s=device.peak_flops_per_s[dtype],
        bytes_per_s=device.memory_bandwidth_bytes_per_s * profile.memory_efficiency,
        launch_s=profile.launch_s,
    )


def _attention(parts: Mapping[WorkPart, list[Sample]], profile: DeviceProfile, setting: FitSetting) -> DeviceProfile:
    """One number of keys at half speed for all dtypes, and for both passes unless they are clearly unlike."""
    groups = _by_name(parts.get("attention", []), profile)
    samples = [sample for group in groups.values() for sample in group]
    passes = {b: [s for s in samples if bool(s.work.numbers["is_backward"]) == b] for b in (False, True)}
    if not passes[False] or not passes[True]:
        return profile

    def fitted(is_backward: bool, half: float) -> tuple[float, float, Floats]:
        """The loss, the best part, and the times of a pass with a number of keys at half speed."""
        group = passes[is_backward]
        usual = replace(profile.attention, length_half=half, backward_length_half=half, forward=1.0, backward=1.0)
        times = _attention_times(group, profile, usual, is_backward) - profile.launch_s
        part = best_constant(lambda part: profile.launch_s + times / part, _seconds(group), LEAST_PART, MOST_PART)
        predicted = np.asarray(profile.launch_s + times / part)
        return float(log_loss(predicted, _seconds(group))) * len(group), rounded(part), predicted

    def loss(half: float, *of_passes: bool) -> float:
        return sum(fitted(is_backward, half)[0] for is_backward in of_passes)

    def best(*of_passes: bool) -> float:
        """The number of keys that suits these passes."""
        half: float = min(_HALVES, key=lambda half: loss(half, *of_passes))
        for octaves in _FINER if half else ():
            around = [half * float(2**x) for x in np.linspace(-octaves, octaves, 19)]
            half = min(around, key=lambda half: loss(half, *of_passes))
        return float(f"{half:.3g}")

    both, ahead, behind = best(False, True), best(False), best(True)
    has_own = loss(ahead, False) + loss(behind, True) < OWN_HALVES * loss(both, False, True)
    halves = (ahead, behind) if has_own else (both, both)
    (_, forward, times), (_, backward, backward_times) = fitted(False, halves[0]), fitted(True, halves[1])
    attention = replace(
        profile.attention,
        forward=forward,
        backward=backward,
        length_half=halves[0],
        backward_length_half=halves[1],
    )
    measured_s = np.concatenate([_seconds(group) for group in passes.values()])
    errors = {"attention": fit_errors(np.concatenate([times, backward_times]), measured_s)}
    paths = [f"attention.{name}" for name in ("forward", "backward", "length_half", "backward_length_half")]
    unfused = _by_name(parts.get("products", []), profile)
    if unfused:
        part = float(np.median([_efficiency(group, profile, profile.tile, d) for d, group in unfused.items()]))
        attention = replace(attention, products=rounded(part))
        paths.append("attention.products")
        costs = [_product_times(group, profile, profile.tile, d, part) for d, group in unfused.items()]
        errors["products"] = fit_errors(np.concatenate(costs), np.concatenate([_seconds(g) for g in unfused.values()]))
    return _measured(profile, setting, paths, errors, attention=attention)


def _attention_times(
    samples: Sequence[Sample], profile: DeviceProfile, attention: AttentionEfficiency, is_backward: bool
) -> Floats:
    peaks = np.array([_device(profile).peak_flops_per_s[s.work.name] for s in samples])
    return attention_seconds(
        flops=_amounts(samples) / peaks,
        keys=_numbers(samples, "n"),
        attention=attention,
        peak_flops_per_s=1.0,  # each sample's FLOP are divided by its own dtype's
        launch_s=profile.launch_s,
        is_backward=is_backward,
    )


# ---- links and overlap ----


def _links(parts: Mapping[WorkPart, list[Sample]], profile: DeviceProfile, setting: FitSetting) -> DeviceProfile:
    samples = parts.get("collective")
    if not samples:
        return profile
    fits = fit_links(samples, setting.link)
    links = {**profile.links, **{tier: fit.profile for tier, fit in fits.items()}}
    errors = {f"{tier}.{kind}": error for tier, fit in fits.items() for kind, error in fit.errors.items()}
    return _measured(profile, setting, [f"links.{tier}" for tier in fits], errors, links=links)


def _overlap(parts: Mapping[WorkPart, list[Sample]], profile: DeviceProfile, setting: FitSetting) -> DeviceProfile:
    times = {sample.work.name: sample.seconds for sample in parts.get("overlap", [])}
    if not {"compute", "communicate", "both"} <= times.keys():
        return profile
    shorter, longer = sorted((times["compute"], times["communicate"]))
    slowdown = 1 + (times["both"] - longer) / shorter
    # 2 is one after the other; longer times are waiting for the scheduler, which is no part of the work
    slowdown = min(2.0, max(1.0, rounded(slowdown)))
    return _measured(profile, setting, ("overlap_slowdown",), overlap_slowdown=slowdown)


# ---- columns of samples ----


def _by_name(samples: Sequence[Sample], profile: DeviceProfile) -> dict[str, list[Sample]]:
    """Samples by dtype, of the dtypes that the device has a peak for."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.work.name in _device(profile).peak_flops_per_s:
            groups.setdefault(sample.work.name, []).append(sample)
    return groups


def _device(profile: DeviceProfile) -> Device:
    assert profile.device is not None
    return profile.device


def _seconds(samples: Sequence[Sample]) -> Floats:
    return np.array([sample.seconds for sample in samples])


def _amounts(samples: Sequence[Sample]) -> Floats:
    return np.array([sample.work.amount for sample in samples])


def _numbers(samples: Sequence[Sample], key: str) -> Floats:
    return np.array([sample.work.numbers.get(key, 1.0) for sample in samples])
