"""The cluster file: what people write, checked all at once, and how it becomes the parts of a `ClusterSpec`.

Units are in the keys and decimal: GB is 10^9 bytes, never GiB; GB/s is bytes, never bits; TFLOP/s is 10^12. Numbers are
bare, never text with a unit. Bandwidths are per device and per direction.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetPydanticSchema, WrapValidator
from pydantic_core import PydanticCustomError

from autopar.errors import Problem, did_you_mean
from autopar.files.strict_model import StrictModel, checked_model
from autopar.files.units import GB, US, from_entry, in_unit
from autopar.ir.device import Device, HostGroup, Link, device_of_preset
from autopar.ir.device_presets import (
    DevicePreset,
    DeviceType,
    HostIn,
    PeaksIn,
    device_names,
    device_preset,
    known_range,
)

# Beyond these a number is a slip of units or of the keyboard, whatever hardware the future brings.
_Figure = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
_MoneyOrWatts = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
_Text = Annotated[str, Field(min_length=1, max_length=200)]
MAX_HOSTS = 100_000
MAX_DEVICES_PER_HOST = 1_024


class LinkEntry(StrictModel):
    bandwidth_gb_per_s: _Figure
    latency_us: _Figure
    name: _Text | None = None
    is_switched: bool = True


class SpineEntry(LinkEntry):
    hosts_per_leaf: Annotated[int, Field(ge=1, le=MAX_HOSTS)]


class DeviceEntry(StrictModel):
    name: _Text
    device_type: DeviceType = "cuda"
    peak_tflops: PeaksIn[_Figure]
    memory_gb: _Figure
    memory_bandwidth_gb_per_s: _Figure
    power_w: _MoneyOrWatts | None = None
    source: _Text = "the cluster file"
    host: HostIn[_Figure] | None = None


def _device(given: object, read_entry: Callable[[object], DeviceEntry]) -> DevicePreset | DeviceEntry:
    """A mapping, or a preset by its name. A union of both would report the violations of both."""
    if isinstance(given, dict):
        return read_entry(given)
    if isinstance(given, str) and given.lower() in device_names():
        return device_preset(given)
    rule = "must be the name of a device preset or a mapping that describes a device"
    hint = did_you_mean(given, device_names()) if isinstance(given, str) else None
    raise PydanticCustomError("device", rule, {"hint": hint})


class GroupEntry(StrictModel):
    num_hosts: Annotated[int, Field(ge=1, le=MAX_HOSTS)] = 1
    devices_per_host: Annotated[int, Field(ge=1, le=MAX_DEVICES_PER_HOST)]
    device: Annotated[
        DeviceEntry | DevicePreset,
        GetPydanticSchema(lambda _, handler: handler(Annotated[DeviceEntry, WrapValidator(_device)])),
    ]
    in_host: LinkEntry | None = None
    price_usd_per_device_hour: _MoneyOrWatts | None = None


class ClusterEntry(StrictModel):
    """The file as a whole."""

    version: Literal[1] = 1
    name: _Text | None = None
    groups: Annotated[list[GroupEntry], Field(min_length=1, max_length=1000)]
    inter_host: LinkEntry | None = None
    spine: SpineEntry | None = None
    profile: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    assumptions: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=200)] = Field(
        default_factory=list
    )


def check_cluster(content: object, problems: list[Problem], folder: Path) -> tuple[ClusterEntry | None, list[Problem]]:
    """The entry of a file's content, and every problem; a profile's path is relative to `folder`."""
    entry, problems = checked_model(ClusterEntry, content, problems)
    if entry is not None:
        problems += _check_profile(entry.profile, folder) if entry.profile is not None else []
    return entry, problems


def profile_names() -> tuple[str, ...]:
    """The device profiles that come with the project."""
    files = (resources.files("autopar.presets") / "profiles").iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


def profile_file(text: str, folder: Path) -> Path | None:
    """The file that a cluster's ``profile`` names, or None where it is the name of a shipped one."""
    is_file = text.lower().endswith((".yaml", ".yml")) or os.sep in text
    return (folder / text).absolute() if is_file else None


def _check_profile(text: str, folder: Path) -> list[Problem]:
    """This function only finds the file. Its users check the content."""
    path = profile_file(text, folder)
    if path is None and text not in profile_names():
        rule = "must be the name of a shipped profile or the path of a YAML file, relative to the cluster file"
        hint = did_you_mean(text, profile_names())
        return [Problem(path="profile", value=text, rule=rule, suggestion=hint)]
    if path is not None and not os.path.isfile(path):  # never raises, whatever the text
        hint = "autopar calibrate --out writes one"
        return [Problem(path="profile", value=text, rule=f"there is no file {str(path)!r}", suggestion=hint)]
    return []


def implausible(entry: ClusterEntry) -> list[str]:
    """One sentence per value that is under a tenth of, or over ten times, what known hardware has."""
    numbers = [
        (f"groups[{index}].{path}", path.removeprefix("device."), value)
        for index, group in enumerate(entry.groups)
        for path, value in _numbers(group)
        if path != "devices_per_host"
    ]
    numbers += [(path, path.replace("spine", "inter_host"), value) for path, value in _numbers(entry)]
    accelerators = all(group.device.device_type != "cpu" for group in entry.groups)
    sentences = []
    for path, figure, value in numbers:
        known = known_range(figure, accelerators_only=accelerators)
        if known is None or known[0] / 10 <= value <= known[1] * 10:
            continue
        which = "under a tenth of the smallest" if value < known[0] else "over ten times the largest"
        bound = known[0] if value < known[0] else known[1]
        sentences.append(f"{path} = {value:g} is {which} known, {bound:g}; check the unit (decimal GB, bytes not bits)")
    return sentences


def _numbers(model: StrictModel, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers under a model, by path."""
    for key, value in model:
        if isinstance(value, StrictModel):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, float | int):
            yield f"{prefix}{key}", value


def resolve(entry: ClusterEntry, name: str, folder: Path) -> dict[str, Any]:
    """The fields of a file's `ClusterSpec`; a link that the file leaves out is the preset's, and said to be so."""
    assumptions = list(entry.assumptions)
    groups = []
    for index, group in enumerate(entry.groups):
        device = group.device
        in_host = _link(group.in_host)
        if in_host is None and isinstance(device, DevicePreset):
            in_host = from_entry(Link, device.in_host)
            if group.devices_per_host > 1:
                assumptions.append(_assumed_link(f"groups[{index}].in_host", device.name, in_host))
        resolved = device_of_preset(device) if isinstance(device, DevicePreset) else from_entry(Device, device)
        groups.append(from_entry(HostGroup, group, device=resolved, in_host=in_host))
    inter_host = _link(entry.inter_host)
    presets = [group.device for group in entry.groups if isinstance(group.device, DevicePreset)]
    if inter_host is None and presets and sum(group.num_hosts for group in groups) > 1:
        slowest = min(presets, key=lambda preset: preset.inter_host.bandwidth_gb_per_s.value)
        inter_host = from_entry(Link, slowest.inter_host)
        assumptions.append(_assumed_link("inter_host", slowest.name, inter_host))
    for preset in presets:
        # links are covered above, given or listed; devices_per_host is always given
        assumptions += [a for a in preset.assumptions() if "_host" not in a.partition("=")[0]]
    file = profile_file(entry.profile, folder) if entry.profile is not None else None
    return {
        "name": entry.name or name,
        "groups": tuple(groups),
        "inter_host": inter_host,
        "spine": _link(entry.spine),
        "hosts_per_leaf": entry.spine.hosts_per_leaf if entry.spine is not None else None,
        "assumptions": tuple(dict.fromkeys(assumptions)),
        "profile": entry.profile if file is None else str(file),
    }


def _link(entry: LinkEntry | None) -> Link | None:
    return None if entry is None else from_entry(Link, entry)


def _assumed_link(path: str, preset: str, link: Link) -> str:
    figures = f"{in_unit(link.bytes_per_s, GB):g} GB/s, {in_unit(link.latency_s, US):g} us"
    return f"{path} is not given: {link.name} of the {preset} preset assumed ({figures})"
