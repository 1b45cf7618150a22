"""The machine that layouts are priced on, of a cluster or of a published run: speeds, links and memory."""

from dataclasses import dataclass, field, replace

from autopar.cost_model.machine.collectives import Transfer
from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.machine.fitted_constants import Mechanisms
from autopar.cost_model.machine.links import Links, MeasuredCalls
from autopar.cost_model.machine.profile import MOST_OF_PEAK, AttentionEfficiency, CallCost, DeviceProfile, Tile
from autopar.ir.device import Device, HostShare, Link

# The dtype of products of repeated blocks, for precisions below 16 bits. Other products, and attention, are wider.
NARROW = {"fp8": "float8", "mxfp8": "float8", "nvfp4": "float4", "mxfp4": "float4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The rates that kernels reach on one device under one engine, and the seconds to start a kernel."""

    peak_flops_per_s: float  # of the device; attention reaches a part of it
    product_flops_per_s: float  # of large products in 16 bits, or in float32 for a float32 run
    narrow_flops_per_s: float | None  # of large products in 8 or 4 bits; None if the run or the device has none
    attention: AttentionEfficiency
    tile: Tile
    bytes_per_s: float  # of memory
    launch_s: float  # of a kernel's start on the device
    host_s: float  # of a kernel's start on the host
    misaligned: float  # time of products of misaligned heads over aligned heads
    in_one_thread: bool = False  # the host is the device (CPU)
    attention_in_parts: float = 1.0  # speed of attention by parts of a sequence, over that of whole sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of device and its links, under one engine, profile and precision."""

    device: Device
    profile: DeviceProfile
    engine: Engine = field(repr=False)  # the repr of a machine names a study's profile, which has no engine
    mechanisms: Mechanisms = field(repr=False)
    precision: str = field(repr=False)
    speeds: Speeds
    links: Links
    memory_bytes: float
    peak_flops_per_s: float  # dense, of the precision; the denominator of MFU
    ranks_per_core: float = 1.0  # CPU ranks that share a core
    host: HostShare | None = None  # one device's part of its host, if known
    assumptions: tuple[str, ...] = ()

    @property
    def is_narrow(self) -> bool:
        """Whether products of repeated blocks are computed in 8 or 4 bits."""
        return self.precision in NARROW

    @property
    def overlap_slowdown(self) -> float:
        """The slowdown of a computation and a collective that run at once (`DeviceProfile`)."""
        return self.profile.overlap_slowdown

    @property
    def reserve_bytes(self) -> float:
        """Bytes that the framework itself holds on a device."""
        return self.profile.reserve_bytes


def links_of(profile: DeviceProfile, *, in_host: Link, inter_host: Link, devices_per_host: float) -> Links:
    """The links with the bandwidth and latency that collectives reach, by the profile."""
    inside = profile.link("in_host")
    near, between = inside.usual, profile.link("inter_host").usual
    kinds: dict[Transfer, CallCost] = {"send" if k == "point_to_point" else k: call for k, call in inside.kinds.items()}
    return Links(
        in_host_bytes_per_s=in_host.bytes_per_s * near.efficiency,
        in_host_latency_s=in_host.latency_s + near.call_s / 4,
        inter_host_bytes_per_s=inter_host.bytes_per_s * between.efficiency,
        inter_host_latency_s=inter_host.latency_s,
        devices_per_host=devices_per_host,
        is_switched=in_host.is_switched,
        calls=MeasuredCalls(bytes_per_s=in_host.bytes_per_s, latency_s=in_host.latency_s, kinds=kinds)
        if kinds
        else None,
    )


def speeds_of(
    device: Device, profile: DeviceProfile, engine: Engine, mechanisms: Mechanisms, *, precision: str
) -> Speeds:
    """The speeds of kernels of `precision` ("bf16", "fp8", "nvfp4", ...) on a device under an engine."""
    peaks = device.peak_flops_per_s
    wide = "bfloat16" if "bfloat16" in peaks and precision != "fp16" else "float16"
    if precision == "fp32" or wide not in peaks:
        wide = "float32"  # torch multiplies float32 in tf32 only on request
    scale = {
        "first": mechanisms.first_attention,
        "second": 1.0,
        "native": mechanisms.native_attention if profile.native_attention else 1.0,
    }[engine.attention_kernel]
    parts = {
        name: profile.sustained(min(part * scale, max(part, MOST_OF_PEAK)), device)
        for name, part in (("forward", profile.attention.forward), ("backward", profile.attention.backward))
    }
    attention: AttentionEfficiency = replace(profile.attention, **parts)
    narrow = NARROW.get(precision, "")
    if narrow == "float4" and narrow not in peaks:
        narrow = "float8"
    dispatch = {"eager": 1.0, "lean": mechanisms.lean_dispatch, "graph": mechanisms.graph_dispatch}[engine.dispatch]
    return Speeds(
        peak_flops_per_s=peaks[wide],
        product_flops_per_s=peaks[wide] * profile.sustained(profile.efficiency_of(wide), device),
        narrow_flops_per_s=peaks[narrow] * profile.sustained(profile.efficiency_of(narrow), device)
        if narrow in peaks
        else None,
        attention=attention,
        tile=profile.tile,
        bytes_per_s=device.memory_bandwidth_bytes_per_s * profile.memory_efficiency,
        launch_s=profile.launch_s,
        host_s=dispatch * profile.host_launch_s,
        misaligned=mechanisms.misaligned,
        in_one_thread=device.device_type == "cpu",
        attention_in_parts=min(1.0, 1.0 / scale),  # autopar runs parts by FlashAttention 2 (`autopar.lowering`)
    )
