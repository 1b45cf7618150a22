"""The file of a device profile: strict YAML with a source for every number. A reader gets all problems at once.

Times are in microseconds and sizes in decimal GB, as in the files of devices and clusters. Parts are fractions of the
device's figures. ``docs/calibrate.md`` lists the keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, Field

from autopar.cost_model.machine.profile import (
    KINDS,
    AttentionEfficiency,
    CallCost,
    DeviceProfile,
    FitError,
    LinkProfile,
    Measurement,
    Tile,
)
from autopar.errors import ClusterError, Problem
from autopar.files.strict_model import StrictModel, checked_model
from autopar.files.strict_yaml import read_yaml, write_yaml
from autopar.ir.cluster import Tier
from autopar.ir.cluster_file import DeviceEntry, LinkEntry, device_entry, device_of_entry, link_entry, link_of_entry
from autopar.ir.device import DeviceType, in_unit, si
from autopar.ir.device_presets import DTYPES

TIERS: tuple[Tier, ...] = ("in_host", "inter_host", "spine")
US, GB = 1e-6, 1e9
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,59}$")]
_Source = Annotated[str, Field(min_length=8, max_length=400)]
_Text = Annotated[str, Field(max_length=300)]
_Value = TypeVar("_Value")


def _is_date(text: str) -> str:
    date.fromisoformat(text)
    return text


class SourcedNumber(StrictModel, Generic[_Value]):
    value: _Value
    source: _Source


PartFigure = SourcedNumber[Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]]  # above 1: the figure is too low
SizeFigure = SourcedNumber[Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]]
AmountFigure = SourcedNumber[Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]]
SlowdownFigure = SourcedNumber[Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)]]
ImbalanceFigure = SourcedNumber[Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)]]


class EfficiencyEntry(StrictModel):
    float64: PartFigure | None = None
    float32: PartFigure | None = None
    tf32: PartFigure | None = None
    bfloat16: PartFigure | None = None
    float16: PartFigure | None = None
    float8: PartFigure | None = None
    float4: PartFigure | None = None


class TileEntry(StrictModel):
    m: SizeFigure
    n: SizeFigure
    k_half: AmountFigure
    units: SizeFigure


class AttentionEntry(StrictModel):
    forward: PartFigure
    backward: PartFigure
    products: PartFigure
    length_half: AmountFigure
    backward_length_half: AmountFigure | None = None


class CallEntry(StrictModel):
    efficiency: PartFigure
    call_us: AmountFigure


class KindsEntry(StrictModel):
    all_reduce: CallEntry | None = None
    all_gather: CallEntry | None = None
    reduce_scatter: CallEntry | None = None
    all_to_all: CallEntry | None = None
    point_to_point: CallEntry | None = None


class TierEntry(CallEntry):
    kinds: KindsEntry = KindsEntry()
    link: LinkEntry | None = None


class LinksEntry(StrictModel):
    in_host: TierEntry
    inter_host: TierEntry | None = None
    spine: TierEntry | None = None


class MeasuredEntry(StrictModel):
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$"), AfterValidator(_is_date)]
    host: _Text
    how: _Text
    ranks: Annotated[int, Field(ge=1, le=10_000_000)]
    seconds: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
    ranks_per_core: Annotated[float, Field(ge=1, le=1e4, allow_inf_nan=False)] = 1.0
    versions: Annotated[dict[str, Annotated[str, Field(max_length=100)]], Field(max_length=20)]


class FitEntry(StrictModel):
    median: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
    p90: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
    num_points: Annotated[int, Field(ge=1, le=1_000_000)]


class ProfileEntry(StrictModel):
    """The file as a whole."""

    version: Literal[1]
    name: _Name
    description: _Text = ""
    device_type: DeviceType
    devices: Annotated[list[_Name], Field(max_length=100)] = Field(default_factory=list)
    native_attention: bool = False
    watts_per_tflops: SizeFigure | None = None
    measured: MeasuredEntry | None = None
    device: DeviceEntry | None = None
    efficiency: EfficiencyEntry
    tile: TileEntry
    attention: AttentionEntry
    memory_efficiency: PartFigure
    launch_us: AmountFigure
    host_launch_us: AmountFigure
    links: LinksEntry
    overlap_slowdown: SlowdownFigure
    reserve_gb: AmountFigure
    expert_imbalance: ImbalanceFigure | None = None
    fit: Annotated[dict[_Name, FitEntry], Field(max_length=50)] = Field(default_factory=dict)


def load_profile(path: str | os.PathLike[str]) -> DeviceProfile:
    """Read a profile file. Raises ClusterError with every problem of the file."""
    content, problems = read_yaml(path)
    if content is None and problems:
        raise ClusterError(f"profile file {os.fspath(path)!r} cannot be used", problems)
    return _profile(content, problems, f"profile file {os.fspath(path)!r}")


def profile_from_dict(content: object, what: str) -> DeviceProfile:
    """The inverse of `profile_to_dict`. Raises ClusterError with every problem; `what` names the data in it."""
    return _profile(content, [], what)


def _profile(content: object, problems: list[Problem], what: str) -> DeviceProfile:
    entry, violations = checked_model(ProfileEntry, content)
    problems = problems + violations
    if entry is not None:
        problems += _check(entry)
    if problems or entry is None:
        raise ClusterError(f"{what} cannot be used", problems)
    return _of_entry(entry)


def _check(entry: ProfileEntry) -> list[Problem]:
    problems = []
    if not any(getattr(entry.efficiency, dtype) for dtype in DTYPES):
        problems.append(Problem(path="efficiency", rule="needs at least one dtype", suggestion=", ".join(DTYPES)))
    if entry.device is not None and entry.device.device_type != entry.device_type:
        value, rule = entry.device.device_type, f"must be the profile's, {entry.device_type!r}"
        problems.append(Problem(path="device.device_type", value=value, rule=rule))
    return problems


def _of_entry(entry: ProfileEntry) -> DeviceProfile:
    dtypes = {dtype: getattr(entry.efficiency, dtype) for dtype in DTYPES}
    tiers = {tier: getattr(entry.links, tier) for tier in TIERS}
    tile, attention, measured = entry.tile, entry.attention, entry.measured
    return DeviceProfile(
        name=entry.name,
        description=entry.description,
        device_type=entry.device_type,
        devices=tuple(entry.devices),
        native_attention=entry.native_attention,
        watts_per_tflops=float(entry.watts_per_tflops.value) if entry.watts_per_tflops is not None else None,
        efficiency={dtype: float(figure.value) for dtype, figure in dtypes.items() if figure is not None},
        tile=Tile(**{key: float(getattr(tile, key).value) for key in ("m", "n", "k_half", "units")}),
        attention=AttentionEfficiency(**{key: float(figure.value) for key, figure in attention if figure is not None}),
        memory_efficiency=float(entry.memory_efficiency.value),
        launch_s=_seconds(entry.launch_us),
        host_launch_s=_seconds(entry.host_launch_us),
        links={tier: _link(at) for tier, at in tiers.items() if at is not None},
        overlap_slowdown=float(entry.overlap_slowdown.value),
        reserve_bytes=int(si(entry.reserve_gb.value, GB)),
        expert_imbalance=float(entry.expert_imbalance.value) if entry.expert_imbalance is not None else None,
        device=device_of_entry(entry.device) if entry.device is not None else None,
        measured=Measurement(**measured.model_dump()) if measured is not None else None,
        fit={name: FitError(**error.model_dump()) for name, error in entry.fit.items()},
        sources=dict(_sources(entry, "")),
    )


def _seconds(figure: AmountFigure) -> float:
    return figure.value / (1 / US)


def _link(entry: TierEntry) -> LinkProfile:
    kinds = {kind: cost for kind in KINDS if (cost := getattr(entry.kinds, kind)) is not None}
    return LinkProfile(
        usual=_call(entry), kinds={kind: _call(cost) for kind, cost in kinds.items()}, link=link_of_entry(entry.link)
    )


def _call(entry: CallEntry) -> CallCost:
    return CallCost(efficiency=float(entry.efficiency.value), call_s=_seconds(entry.call_us))


def _sources(model: StrictModel, prefix: str) -> Iterator[tuple[str, str]]:
    """The source of every figure under a model, by path."""
    for name in type(model).model_fields:
        value, path = getattr(model, name), f"{prefix}{name}"
        if not isinstance(value, StrictModel):
            continue
        if {"value", "source"} == set(type(value).model_fields):
            yield path, value.source  # type: ignore[attr-defined]
        elif not isinstance(value, (DeviceEntry, LinkEntry)):
            yield from _sources(value, f"{path}.")


def profile_to_dict(profile: DeviceProfile) -> dict[str, Any]:
    """The content of a profile file that loads back as an equal profile."""

    def figure(path: str, value: float) -> dict[str, Any]:
        return {"value": value, "source": profile.sources.get(path, "assumed: no source was given")}

    def call(path: str, cost: CallCost) -> dict[str, Any]:
        efficiency = figure(f"{path}.efficiency", cost.efficiency)
        return {"efficiency": efficiency, "call_us": figure(f"{path}.call_us", in_unit(cost.call_s, US))}

    content: dict[str, Any] = {"version": 1, "name": profile.name, "description": profile.description}
    content |= {"device_type": profile.device_type, "devices": list(profile.devices)}
    content |= {"native_attention": True} if profile.native_attention else {}
    if profile.watts_per_tflops is not None:
        content["watts_per_tflops"] = figure("watts_per_tflops", profile.watts_per_tflops)
    if profile.measured is not None:
        measured = profile.measured
        whole = ("date", "host", "how", "ranks", "seconds", "ranks_per_core")
        content["measured"] = {key: getattr(measured, key) for key in whole} | {"versions": dict(measured.versions)}
    if profile.device is not None:
        content["device"] = device_entry(profile.device)
    content["efficiency"] = {d: figure(f"efficiency.{d}", value) for d, value in profile.efficiency.items()}
    for part in ("tile", "attention"):
        numbers = asdict(getattr(profile, part)).items()
        content[part] = {key: figure(f"{part}.{key}", value) for key, value in numbers if value is not None}
    content["memory_efficiency"] = figure("memory_efficiency", profile.memory_efficiency)
    for key, value in (("launch_us", profile.launch_s), ("host_launch_us", profile.host_launch_s)):
        content[key] = figure(key, in_unit(value, US))
    content["links"] = {}
    for tier, link in profile.links.items():
        path = f"links.{tier}"
        content["links"][tier] = call(path, link.usual)
        kinds = {kind: call(f"{path}.kinds.{kind}", cost) for kind, cost in link.kinds.items()}
        content["links"][tier] |= {"kinds": kinds} if kinds else {}
        content["links"][tier] |= {"link": link_entry(link.link)} if link.link is not None else {}
    content["overlap_slowdown"] = figure("overlap_slowdown", profile.overlap_slowdown)
    content["reserve_gb"] = figure("reserve_gb", in_unit(profile.reserve_bytes, GB))
    if profile.expert_imbalance is not None:
        content["expert_imbalance"] = figure("expert_imbalance", profile.expert_imbalance)
    if profile.fit:
        content["fit"] = {name: asdict(error) for name, error in profile.fit.items()}
    return content


def dump_profile(profile: DeviceProfile, path: str | os.PathLike[str]) -> None:
    """Write a profile file, whole or not at all. Raises InputError if the file cannot be written."""
    write_yaml(path, profile_to_dict(profile), short_on_a_line=True)
