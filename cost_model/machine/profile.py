"""Device profiles: the part of a device's data-sheet figures that real kernels reach.

    product          launch_s + max(FLOP / (peak · efficiency[dtype] · part of the tiling), bytes / memory speed)
                     efficiency as `DeviceProfile.sustained` says
    fused attention  launch_s + FLOP / (peak · attention.forward · n / (n + attention.length_half)); backward likewise,
                     and the part under the power limit as of products
    anything else    launch_s + bytes / memory speed              memory speed = bandwidth · memory_efficiency
    collective       call_s + hops · link latency + bytes sent / (link bandwidth · link efficiency), per tier and kind

`autopar.cost_model.machine.kernel_times` computes these formulas. A measured profile carries the device's figures too,
because nobody publishes a CPU's figures. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from importlib import metadata
from typing import Literal

from autopar._version import public_version
from autopar.errors import ClusterError
from autopar.ir.cluster import Tier
from autopar.ir.device import Device, DeviceType, Link

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point"]
KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point")
# If a profile lacks a dtype, the efficiency of its partner stands in. Units of one width behave alike.
_LIKE = {
    "float16": "bfloat16",
    "bfloat16": "float16",
    "tf32": "float32",
    "float32": "tf32",
    "float64": "float32",
    "float4": "float8",  # both run under the power limit; nobody has fitted 4 bits
}
STALE_DAYS = 365
MOST_OF_PEAK = 0.9  # of its peak that no device exceeds by more power or a better kernel: assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tile of a matrix product: one unit computes `m` × `n` elements of the result, and `units` run at once."""

    m: float
    n: float
    k_half: float  # the inner size at which a product reaches half of its full efficiency
    units: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionEfficiency:
    """Parts of the peak that attention reaches."""

    forward: float  # of a fused kernel at long sequences
    backward: float  # of a fused kernel at long sequences
    products: float  # of the batched products of unfused attention, by full tiles
    length_half: float  # number of keys at which a fused kernel reaches half of its part
    backward_length_half: float | None = None  # the same of the backward pass; None: as forward

    def keys_at_half(self, is_backward: bool) -> float:
        """The number of keys at which a pass reaches half of its part."""
        if is_backward and self.backward_length_half is not None:
            return self.backward_length_half
        return self.length_half


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """The costs of one kind of collective on one tier."""

    efficiency: float  # part of the link's bandwidth
    call_s: float  # fixed cost of a call


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """The costs of collectives on one tier."""

    usual: CallCost  # of every kind that `kinds` does not name
    kinds: Mapping[CollectiveKind, CallCost] = field(default_factory=dict, hash=False)
    link: Link | None = None  # the measured figures, if any

    def of(self, kind: CollectiveKind) -> CallCost:
        return self.kinds.get(kind, self.usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """|predicted / measured - 1| over the measurements of one part."""

    median: float
    p90: float
    num_points: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """When, where and how a profile was measured.

    `ranks_per_core` counts the CPU ranks that shared a core, all of them computing. If the others wait, a rank is
    faster by this factor.
    """

    date: str
    host: str
    how: str
    ranks: int
    seconds: float
    ranks_per_core: float = 1.0
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """The constants of the time model for one device. Efficiencies are parts of the device's figures.

    A GPU's host runs ahead of the device, so the longer of device time and host time counts. A CPU does both in one
    thread, so the two add up.

    A computation and a collective at once take the longer time plus (`overlap_slowdown` - 1) of the shorter time. At 1
    the shorter is free. At 2 they run one after the other.
    """

    name: str
    description: str = ""
    device_type: DeviceType
    devices: tuple[str, ...] = ()  # the device presets that this profile describes
    unmeasured: tuple[str, ...] = ()  # presets of the same kind, of which no measured run is known
    watts_per_tflops: float | None = None  # of the device that `efficiency` describes, in its 16-bit peak
    native_attention: bool = False  # the device has attention kernels of its own, faster than FlashAttention 2
    efficiency: Mapping[str, float] = field(hash=False)
    tile: Tile
    attention: AttentionEfficiency
    memory_efficiency: float
    launch_s: float  # the gap before a kernel on the device
    host_launch_s: float  # host time of one eager operator of training
    links: Mapping[Tier, LinkProfile] = field(hash=False)
    overlap_slowdown: float
    reserve_bytes: int  # the framework's own memory on the device
    expert_imbalance: float | None = None  # rows of the busiest expert rank over the mean; None: the assumed number
    device: Device | None = None  # the figures that were measured with the profile
    measured: Measurement | None = None
    steps: int = 0  # measured steps that corrected the profile (`autopar.planning.measured`); not kept in files
    fit: Mapping[str, FitError] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # one sentence per number, by path in the file
    notes: tuple[str, ...] = ()

    @property
    def is_of_device(self) -> bool:
        """Whether the profile describes a device: it was measured, or names GPUs. CPUs of one name differ too much."""
        return self.measured is not None or (bool(self.devices) and self.device_type != "cpu")

    def efficiency_of(self, dtype: str) -> float:
        """The part of the dtype's peak that a large product reaches. A missing dtype takes the most similar one's."""
        if dtype in self.efficiency:
            return self.efficiency[dtype]
        return self.efficiency.get(_LIKE.get(dtype, ""), min(self.efficiency.values()))

    def sustained(self, part: float, device: Device) -> float:
        """The part of a device's peak that products or attention reach for long, if the profile states `part`.

        They draw all the power that the device may. At this limit the clock, and so the rate, follows about the square
        root of the power. `watts_per_tflops` is the power that the profile was made at. No device exceeds the part
        `MOST_OF_PEAK`.
        """
        peak = device.peak_flops_per_s.get("bfloat16") or device.peak_flops_per_s.get("float16")
        if self.watts_per_tflops is None or device.power_w is None or peak is None:
            return part
        reached = part * math.sqrt(device.power_w / (peak / 1e12) / self.watts_per_tflops)
        return min(reached, max(part, MOST_OF_PEAK))

    def at_power_of(self, device: Device) -> DeviceProfile:
        """This profile for one device of its family: its parts are what `sustained` says, and need no more of it."""
        attention = replace(
            self.attention,
            forward=self.sustained(self.attention.forward, device),
            backward=self.sustained(self.attention.backward, device),
        )
        parts = {dtype: self.sustained(part, device) for dtype, part in self.efficiency.items()}
        sources = {path: source for path, source in self.sources.items() if path != "watts_per_tflops"}
        return replace(self, efficiency=parts, attention=attention, watts_per_tflops=None, sources=sources)

    def link(self, tier: Tier) -> LinkProfile:
        """The profile of a tier. A tier without a profile takes the nearest faster tier's, or else the slowest's."""
        order: tuple[Tier, ...] = ("in_host", "inter_host", "spine")
        known = [t for t in order if t in self.links]
        nearest = [t for t in known if order.index(t) <= order.index(tier)] or known
        link = self.links.get(tier) or self.links[nearest[-1]]
        return link if tier in self.links else replace(link, link=None)  # this tier's own speed is unknown

    def applied_to(self, device: Device) -> Device:
        """`device` with the measured figures of this profile, except the memory size, which the cluster states."""
        if self.device_type != device.device_type:
            raise ClusterError(
                f"profile {self.name!r} is of a {self.device_type} device, the cluster's {device.name!r} is a "
                f"{device.device_type} device; give a profile of a {device.device_type} device"
            )
        if self.device is None:
            return device
        return replace(
            device,
            peak_flops_per_s={**device.peak_flops_per_s, **self.device.peak_flops_per_s},
            memory_bandwidth_bytes_per_s=self.device.memory_bandwidth_bytes_per_s,
            source=f"profile {self.name}: {self.device.source}" if self.device.source else f"profile {self.name}",
        )

    def assumptions(self, *, today: date | None = None) -> tuple[str, ...]:
        """Doubts about the profile, as sentences for every output: assumed numbers, other versions, its age."""
        guessed = sorted(path for path, source in self.sources.items() if source.startswith("assumed"))
        notes = list(self.notes)
        if guessed:
            shown = ", ".join(guessed[:6]) + (f" and {len(guessed) - 6} more" if len(guessed) > 6 else "")
            notes.append(f"profile {self.name} has numbers that nobody measured: {shown}")
        if self.measured is not None:
            notes += self._staleness(self.measured, today or date.today())
        return tuple(notes)

    def _staleness(self, measured: Measurement, today: date) -> list[str]:
        notes = []
        age = (today - date.fromisoformat(measured.date)).days
        if age > STALE_DAYS:
            notes.append(f"profile {self.name} was measured {age} days ago; run `autopar calibrate` again")
        used, installed = public_version(measured.versions.get("torch", "")), public_version(_version("torch"))
        if used and used != installed:
            remedy = "run `autopar calibrate` again"
            notes.append(f"profile {self.name} was measured with torch {used}, this is {installed}; {remedy}")
        return notes


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
