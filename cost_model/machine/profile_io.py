"""The file of a device profile: strict YAML with a source for every number. A reader gets all problems at once.

Times are in microseconds and sizes in decimal GB, as in the files of devices and clusters. Parts are fractions of the
device's figures. ``docs/calibrate.md`` lists the keys.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from autopar.cost_model.machine.profile import CallCost, DeviceProfile, LinkProfile
from autopar.errors import ClusterError, Problem
from autopar.files.strict_model import SourcedNumber, StrictModel, checked_model, figures_of
from autopar.files.strict_yaml import read_yaml, write_yaml
from autopar.files.units import from_entry, in_file
from autopar.ir.cluster_file import DeviceEntry, LinkEntry
from autopar.ir.device import DeviceType
from autopar.ir.device_presets import DTYPES, ByDtype

_WITHOUT_SOURCES = (
    *("version", "name", "description", "device_type", "devices", "unmeasured", "native_attention"),
    *("measured", "device", "fit"),
)
NO_SOURCE = "assumed: no source was given"
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,59}$")]
_Text = Annotated[str, Field(max_length=300)]


def _is_date(text: str) -> str:
    date.fromisoformat(text)
    return text


PartFigure = SourcedNumber[Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]]  # above 1: the figure is too low
SizeFigure = SourcedNumber[Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]]
AmountFigure = SourcedNumber[Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]]
SlowdownFigure = SourcedNumber[Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)]]
ImbalanceFigure = SourcedNumber[Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)]]


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
    unmeasured: Annotated[list[_Name], Field(max_length=100)] = Field(default_factory=list)
    native_attention: bool = False
    watts_per_tflops: SizeFigure | None = None
    measured: MeasuredEntry | None = None
    device: DeviceEntry | None = None
    efficiency: ByDtype[PartFigure]
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
    return _profile(*checked_model(ProfileEntry, *read_yaml(path)), f"profile file {os.fspath(path)!r}")


def profile_from_dict(content: object, what: str) -> DeviceProfile:
    """The inverse of `profile_to_dict`. Raises ClusterError with every problem; `what` names the data in it."""
    return _profile(*checked_model(ProfileEntry, content), what)


def _profile(entry: ProfileEntry | None, problems: list[Problem], what: str) -> DeviceProfile:
    problems += [] if entry is None else _check(entry)
    if problems or entry is None:
        raise ClusterError(f"{what} cannot be used", problems)
    links = {at: from_entry(LinkProfile, tier, usual=from_entry(CallCost, tier)) for at, tier in entry.links if tier}
    sources = {path: figure.source for path, figure in figures_of(entry)}
    return from_entry(DeviceProfile, entry, links=links, sources=sources)


def _check(entry: ProfileEntry) -> list[Problem]:
    problems = []
    if not any(getattr(entry.efficiency, dtype) for dtype in DTYPES):
        problems.append(Problem(path="efficiency", rule="needs at least one dtype", suggestion=", ".join(DTYPES)))
    if entry.device is not None and entry.device.device_type != entry.device_type:
        value, rule = entry.device.device_type, f"must be the profile's, {entry.device_type!r}"
        problems.append(Problem(path="device.device_type", value=value, rule=rule))
    return problems


def profile_to_dict(profile: DeviceProfile) -> dict[str, Any]:
    """The content of a profile file that loads back as an equal profile."""

    def sourced(value: Any, path: str) -> Any:
        if path.endswith(".link") or path in _WITHOUT_SOURCES:
            return value
        if not isinstance(value, Mapping):
            return {"value": value, "source": profile.sources.get(path, NO_SOURCE)}
        return {key: sourced(inner, f"{path}.{key}") for key, inner in value.items()}

    content = content_of_profile(profile)
    return {key: sourced(content[key], key) for key in ProfileEntry.model_fields if key in content}


def content_of_profile(profile: DeviceProfile) -> dict[str, Any]:
    """The content of a file, numbers without their sources."""
    content: dict[str, Any] = {"version": 1, "description": "", "devices": []} | in_file(profile)
    if profile.measured is not None:
        content["measured"] = asdict(profile.measured)
    return content | {"links": {tier: link.pop("usual") | link for tier, link in content["links"].items()}}


def dump_profile(profile: DeviceProfile, path: str | os.PathLike[str]) -> None:
    """Write a profile file, whole or not at all. Raises InputError if the file cannot be written."""
    write_yaml(path, profile_to_dict(profile), short_on_a_line=True)
