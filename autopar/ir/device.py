"""The values a cluster is made of: `Device`, `Link` and `HostGroup`, in SI units, and how presets become them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from autopar.errors import ClusterError, Problem, did_you_mean
from autopar.files.units import GB, from_entry, si

if TYPE_CHECKING:
    from autopar.ir.device_presets import DevicePreset

DeviceType = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """One device's part of its host: bytes/s of its link per direction, and bytes and bytes/s of the host's memory."""

    link_bytes_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU process."""

    name: str
    device_type: DeviceType
    peak_flops_per_s: Mapping[str, float] = field(hash=False)  # dense, per dtype of `autopar.ir.device_presets.DTYPES`
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    power_w: float | None = None
    source: str = ""  # of the figures; a preset's file has that of each figure
    host: HostShare | None = None  # None if unknown

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops_per_s", dict(sorted(self.peak_flops_per_s.items())))
        figures = {f"peak_flops_per_s[{dtype!r}]": peak for dtype, peak in self.peak_flops_per_s.items()}
        figures["memory_bytes"] = self.memory_bytes
        figures["memory_bandwidth_bytes_per_s"] = self.memory_bandwidth_bytes_per_s
        if self.power_w is not None:
            figures["power_w"] = self.power_w
        if self.host is not None:
            figures |= {f"host.{name}": getattr(self.host, name) for name in HostShare.__slots__}
        _require_positive(f"device {self.name!r}", figures)

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`. Raises ClusterError when the device has no unit for it."""
        if dtype not in self.peak_flops_per_s:
            hint = did_you_mean(dtype, tuple(self.peak_flops_per_s))
            raise ClusterError(f"device {self.name!r} has no peak for dtype {dtype!r}; {hint}")
        return self.peak_flops_per_s[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One tier's link as a device sees it: bytes/s per direction, and seconds per hop."""

    name: str = ""
    bytes_per_s: float  # without a switch, to all other devices of the host together
    latency_s: float
    is_switched: bool = True  # else the devices of a host are linked pair by pair

    def __post_init__(self) -> None:
        _require_positive(f"link {self.name!r}", {"bytes_per_s": self.bytes_per_s, "latency_s": self.latency_s})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Equal hosts of equal devices. `in_host` may be None where a host has one device."""

    num_hosts: int
    devices_per_host: int
    device: Device
    in_host: Link | None
    price_usd_per_device_hour: float | None = None

    def __post_init__(self) -> None:
        figures: dict[str, float] = {"num_hosts": self.num_hosts, "devices_per_host": self.devices_per_host}
        for name, count in figures.items():
            if isinstance(count, bool) or not isinstance(count, int):
                raise ClusterError("not a host group", [Problem(path=name, value=count, rule="must be a whole number")])
        if self.price_usd_per_device_hour is not None:
            figures["price_usd_per_device_hour"] = self.price_usd_per_device_hour
        _require_positive("host group", figures)

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host


def device_of_preset(preset: DevicePreset) -> Device:
    """The preset's device, with the memory that torch reports."""
    total = preset.total_memory_gb
    source = f"preset {preset.name}: {total.source}"
    return from_entry(Device, preset, memory_bytes=int(si(total.value, GB)), source=source)


def _require_positive(what: str, figures: Mapping[str, float]) -> None:
    problems = [
        Problem(path=path, value=value, rule="must be a finite number greater than 0")
        for path, value in figures.items()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0
    ]
    if problems:
        raise ClusterError(f"{what} cannot be used", problems)
