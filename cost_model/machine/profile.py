"""What the time model needs to know of a device beside its data sheet: which part of its figures real kernels reach.

    product          launch_s + max(FLOP / (peak · efficiency[dtype] · part of the tiling), bytes / memory speed)
    fused attention  launch_s + FLOP / (peak · attention.forward · n / (n + attention.length_half)), backward likewise
    anything else    launch_s + bytes / memory speed              memory speed = bandwidth · memory_efficiency
    collective       call_s + hops · link latency + bytes sent / (link bandwidth · link efficiency), per tier and kind

`autopar.cost_model.machine.kernel_times` computes these. A profile is a file in ``presets/profiles``, one per family of
devices (`autopar.cost_model.machine.presets`), or one that `autopar calibrate` wrote; the file has a source for every
number (`autopar.cost_model.machine.profile_io`). A measured profile also carries the figures that its efficiencies are
parts of, because nobody publishes a CPU's.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from importlib import metadata
from typing import Literal

from autopar.errors import ClusterError
from autopar.ir.cluster import Tier
from autopar.ir.device import Device, DeviceType, Link

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point"]
KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point")
# whose efficiency stands in for a dtype that a profile does not have; units of one width behave alike
_LIKE = {"float16": "bfloat16", "bfloat16": "float16", "tf32": "float32", "float32": "tf32", "float64": "float32"}
STALE_DAYS = 365


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What a matrix product is cut into: `m` × `n` elements of the result by one unit, `units` at once.

    `k_half` is the inner size at which half of the full efficiency is reached.
    """

    m: float
    n: float
    k_half: float
    units: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionEfficiency:
    """Parts of the peak that attention reaches.

    `forward` and `backward` are a fused kernel's at long sequences, `length_half` the number of keys at which half of
    it is reached; `products` is what the batched products of unfused attention reach, each full tile of them.
    """

    forward: float
    backward: float
    products: float
    length_half: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """One kind of collective on one tier: the part of the link's bandwidth that it reaches, and what a call costs."""

    efficiency: float
    call_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """One tier. `usual` holds for every kind that `kinds` does not name; `link` are measured figures, if any."""

    usual: CallCost
    kinds: Mapping[CollectiveKind, CallCost] = field(default_factory=dict, hash=False)
    link: Link | None = None

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

    `ranks_per_core`: CPU ranks that shared a core and all computed; where others wait, a rank is so many times faster.
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
    """Constants of the time model; parts are of the device's figures, times in seconds, memory in bytes.

    `launch_s` is the gap before a kernel on the device, `host_launch_s` what the host spends on one eager operator of
    training. A GPU's host runs ahead, so that the longer of both sums counts; a CPU does both in one thread, and there
    they add up. `overlap_slowdown` from 1 to 2: computing and communicating at once take the longer of the two and this
    part above 1 of the shorter; at 2, one after the other. `reserve_bytes` is the framework's own memory on the device.
    `devices` are the presets it describes, `device` the figures that were measured with it.
    `native_attention`: there are faster attention kernels than FlashAttention 2, written for this device.
    `sources` has one sentence per number, by its path in the file.
    """

    name: str
    description: str = ""
    device_type: DeviceType
    devices: tuple[str, ...] = ()
    native_attention: bool = False
    efficiency: Mapping[str, float] = field(hash=False)
    tile: Tile
    attention: AttentionEfficiency
    memory_efficiency: float
    launch_s: float
    host_launch_s: float
    links: Mapping[Tier, LinkProfile] = field(hash=False)
    overlap_slowdown: float
    reserve_bytes: int
    device: Device | None = None
    measured: Measurement | None = None
    fit: Mapping[str, FitError] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()

    def efficiency_of(self, dtype: str) -> float:
        """The part of the dtype's peak that a large product reaches; of a dtype it does not have, the likest one's."""
        if dtype in self.efficiency:
            return self.efficiency[dtype]
        return self.efficiency.get(_LIKE.get(dtype, ""), min(self.efficiency.values()))

    def link(self, tier: Tier) -> LinkProfile:
        """The profile of a tier; a tier that was not measured is taken to be like the slowest that is there."""
        order: tuple[Tier, ...] = ("in_host", "inter_host", "spine")
        known = [one for one in order if one in self.links]
        nearest = [one for one in known if order.index(one) <= order.index(tier)] or known
        found = self.links.get(tier) or self.links[nearest[-1]]
        return found if tier in self.links else replace(found, link=None)  # another tier's speed is not this one's

    def applied_to(self, device: Device) -> Device:
        """`device` with the figures that were measured here, memory apart: a cluster knows how much of it there is.

        Raises ClusterError where the profile is of another type of device.
        """
        if self.device_type != device.device_type:
            raise ClusterError(
                f"profile {self.name!r} is of a {self.device_type} device, the cluster's {device.name!r} is a "
                f"{device.device_type} device; give the profile of that device"
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
        """What rests on nobody's measurement, as sentences for every output: guessed numbers, other versions, age."""
        guessed = sorted(path for path, source in self.sources.items() if source.startswith("assumed"))
        found = list(self.notes)
        if guessed:
            shown = ", ".join(guessed[:6]) + (f" and {len(guessed) - 6} more" if len(guessed) > 6 else "")
            found.append(f"profile {self.name}: assumed, not measured: {shown}")
        if self.measured is not None:
            found += self._staleness(self.measured, today or date.today())
        return tuple(found)

    def _staleness(self, measured: Measurement, today: date) -> list[str]:
        found = []
        age = (today - date.fromisoformat(measured.date)).days
        if age > STALE_DAYS:
            found.append(f"profile {self.name} was measured {age} days ago; run `autopar calibrate` again")
        used = measured.versions.get("torch")
        if used is not None and used != (installed := _version("torch")):
            found.append(f"profile {self.name} was measured with torch {used}, this is {installed}")
        return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
