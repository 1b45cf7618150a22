"""The cluster file: what people write, checked all at once, and how it becomes the parts of a `ClusterSpec`.

Units are in the keys and decimal: GB is 10^9 bytes, never GiB; GB/s is bytes, never bits; TFLOP/s is 10^12. Numbers are
bare, never text with a unit. Bandwidths are per device and per direction.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from autopar.errors import Problem, did_you_mean
from autopar.files.strict_model import StrictModel, checked_model, join
from autopar.files.strict_yaml import read_yaml
from autopar.files.units import GB, US, in_unit, value_of
from autopar.ir.device import Device, HostGroup, Link, device_of_preset
from autopar.ir.device_presets import (
    DTYPES,
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


class GroupEntry(StrictModel):
    num_hosts: Annotated[int, Field(ge=1, le=MAX_HOSTS)] = 1
    devices_per_host: Annotated[int, Field(ge=1, le=MAX_DEVICES_PER_HOST)]
    device: Any  # a preset's name or a DeviceEntry: checked apart, because a union's violations are unreadable
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


ResolvedDevice = DevicePreset | DeviceEntry


def read_cluster_file(path: str | os.PathLike[str]) -> tuple[ClusterEntry | None, list[ResolvedDevice], list[Problem]]:
    """The file's entry, the device of each group, and every problem; the first two are usable when there is none."""
    content, problems = read_yaml(path)
    if content is None and problems:
        return None, [], problems
    entry, devices, violations = check_cluster(content, Path(path).parent)
    return entry, devices, problems + violations


def check_cluster(
    content: object, folder: Path = Path()
) -> tuple[ClusterEntry | None, list[ResolvedDevice], list[Problem]]:
    """As `read_cluster_file`, from the file's content; a profile's path is relative to `folder`."""
    entry, problems = checked_model(ClusterEntry, content)
    devices, device_problems = _check_devices(content)
    problems += device_problems
    if entry is not None and entry.profile is not None:
        problems += _check_profile(entry.profile, folder)
    if entry is not None and not problems:
        problems += _check_links(entry, devices)
    return entry, devices, problems


def _check_devices(content: object) -> tuple[list[ResolvedDevice], list[Problem]]:
    """The groups' devices, looked up in the raw content so that they are checked though something else is wrong."""
    groups = content.get("groups") if isinstance(content, dict) else None
    devices: list[ResolvedDevice] = []
    problems: list[Problem] = []
    for index, group in enumerate(groups[:1000] if isinstance(groups, list) else []):
        if not isinstance(group, dict) or "device" not in group:
            continue  # reported by the schema
        path, given = join("", ("groups", index, "device")), group["device"]
        if isinstance(given, dict):
            device, violations = checked_model(DeviceEntry, given, path)
            problems += violations
            devices += [device] if device is not None else []
        elif isinstance(given, str) and given.lower() in device_names():
            devices.append(device_preset(given))
        else:
            hint = did_you_mean(given, device_names()) if isinstance(given, str) else None
            rule = "must be the name of a device preset or a mapping that describes a device"
            problems.append(Problem(path=path, value=given, rule=rule, suggestion=hint))
    return devices, problems


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


def _check_links(entry: ClusterEntry, devices: list[ResolvedDevice]) -> list[Problem]:
    """A link that carries traffic needs a speed: from the file, or from the preset of the device."""
    problems = []
    for index, (group, device) in enumerate(zip(entry.groups, devices, strict=True)):
        if group.in_host is None and group.devices_per_host > 1 and not isinstance(device, DevicePreset):
            path = join("", ("groups", index, "in_host"))
            problems.append(Problem(path=path, rule="is required for a device that is not a preset"))
    num_hosts = sum(group.num_hosts for group in entry.groups)
    if entry.inter_host is None and num_hosts > 1 and not any(isinstance(d, DevicePreset) for d in devices):
        problems.append(Problem(path="inter_host", rule=f"is required: {num_hosts} hosts and no device preset"))
    if entry.spine is not None and entry.spine.hosts_per_leaf > num_hosts:
        path, value = "spine.hosts_per_leaf", entry.spine.hosts_per_leaf
        problems.append(Problem(path=path, value=value, rule=f"must be at most the number of hosts, {num_hosts}"))
    kinds = {device.device_type for device in devices}
    if len(kinds) > 1:
        rule = "the groups' devices must be all cuda or all cpu: one process group has one backend"
        problems.append(Problem(path="groups", rule=rule))
    return problems


def implausible(entry: ClusterEntry, devices: list[ResolvedDevice]) -> list[str]:
    """One sentence per value that is under a tenth of, or over ten times, what known hardware has."""
    checks: list[tuple[str, str, float | None]] = []
    accelerators = all(device.device_type != "cpu" for device in devices)
    for index, (group, device) in enumerate(zip(entry.groups, devices, strict=True)):
        prefix = join("", ("groups", index))
        checks += _link_checks(f"{prefix}.in_host", "in_host", group.in_host)
        if isinstance(device, DeviceEntry):
            at = f"{prefix}.device"
            checks += [(f"{at}.peak_tflops.{d}", f"peak_tflops.{d}", getattr(device.peak_tflops, d)) for d in DTYPES]
            for key in ("memory_gb", "memory_bandwidth_gb_per_s", "power_w"):
                checks.append((f"{at}.{key}", key, getattr(device, key)))
    checks += _link_checks("inter_host", "inter_host", entry.inter_host)
    checks += _link_checks("spine", "inter_host", entry.spine)
    sentences = []
    for path, figure, value in checks:
        known = known_range(figure, accelerators_only=accelerators)
        if value is None or known is None or known[0] / 10 <= value <= known[1] * 10:
            continue
        which = "under a tenth of the smallest" if value < known[0] else "over ten times the largest"
        bound = known[0] if value < known[0] else known[1]
        sentences.append(f"{path} = {value:g} is {which} known, {bound:g}; check the unit (decimal GB, bytes not bits)")
    return sentences


def _link_checks(path: str, figure: str, link: LinkEntry | None) -> list[tuple[str, str, float | None]]:
    if link is None:
        return []
    keys = ("bandwidth_gb_per_s", "latency_us")
    return [(f"{path}.{key}", f"{figure}.{key}", getattr(link, key)) for key in keys]


def resolve(entry: ClusterEntry, devices: list[ResolvedDevice], name: str, folder: Path) -> dict[str, Any]:
    """The fields of a file's `ClusterSpec`; a link that the file leaves out is the preset's, and said to be so."""
    assumptions = list(entry.assumptions)
    groups = []
    for index, (group, device) in enumerate(zip(entry.groups, devices, strict=True)):
        in_host = _link(group.in_host)
        if in_host is None and isinstance(device, DevicePreset):
            in_host = value_of(Link, device.in_host)
            if group.devices_per_host > 1:
                assumptions.append(_assumed_link(f"groups[{index}].in_host", device.name, in_host))
        resolved = device_of_preset(device) if isinstance(device, DevicePreset) else value_of(Device, device)
        groups.append(value_of(HostGroup, group, device=resolved, in_host=in_host))
    inter_host = _link(entry.inter_host)
    presets = [device for device in devices if isinstance(device, DevicePreset)]
    if inter_host is None and sum(group.num_hosts for group in groups) > 1:
        slowest = min(presets, key=lambda preset: preset.inter_host.bandwidth_gb_per_s.value)
        inter_host = value_of(Link, slowest.inter_host)
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
    return None if entry is None else value_of(Link, entry)


def _assumed_link(path: str, preset: str, link: Link) -> str:
    figures = f"{in_unit(link.bytes_per_s, GB):g} GB/s, {in_unit(link.latency_s, US):g} us"
    return f"{path} is not given: {link.name} of the {preset} preset assumed ({figures})"
