"""The machine and engine of a published row: device preset and profile, links as its text states them, engine."""

import contextlib
import re
from dataclasses import dataclass, replace

from autopar.cost_model.machine.collectives import Transfer
from autopar.cost_model.machine.engine import Engine, engine_named, engine_of_framework
from autopar.cost_model.machine.fitted_constants import Mechanisms
from autopar.cost_model.machine.links import Links, MeasuredCalls
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.machine.profile import AttentionEfficiency, Call, DeviceProfile
from autopar.cost_model.published.row import Row
from autopar.cost_model.step.block_time import Speeds, host_seconds
from autopar.cost_model.step.context import Machine
from autopar.errors import ClusterError, did_you_mean
from autopar.ir.device import Device, Link, device_of_preset, link_of_preset
from autopar.ir.device_presets import DevicePreset, device_names, device_preset, device_presets

BITS_PER_BYTE = 8
FLOAT8 = ("fp8", "mxfp8", "nvfp4")  # priced as float8
# "8x HDR InfiniBand 200Gb/s per node", "RDMA 400Gb/s per GPU", "400 Gb/s per node"
_RATE = re.compile(r"(?:(\d+)x [^0-9]*)?(\d+) ?Gb/s per (GPU|node)", re.IGNORECASE)
_SINGLE = re.compile(r"(\d+)x (HDR|NDR|EDR)", re.IGNORECASE)
_PORT_GBIT = {"EDR": 100.0, "HDR": 200.0, "NDR": 400.0}  # InfiniBand Trade Association roadmap, 4 lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMachine:
    """What a row runs on: preset and engine by name decide everything but the links."""

    preset: DevicePreset
    profile: DeviceProfile
    engine: Engine
    inter_host_bytes_per_s: float
    devices_per_host: float


def preset_of(gpu_type: str) -> DevicePreset:
    """The device of a ``gpu_type`` column: a preset's name or alias, or the one whose name begins alike.

    Raises ClusterError for a device that no preset describes.
    """
    wanted = gpu_type.lower().replace("_", "-").replace(" ", "-")
    with contextlib.suppress(ClusterError):
        return device_preset(wanted)
    with contextlib.suppress(ClusterError):  # memory without its unit
        return device_preset(f"{wanted}gb")
    begin = re.match(r"[a-z]+[0-9]+[a-z]?", wanted)
    names = sorted(name for name in device_presets() if begin and re.split(r"[-.]", name)[0] == begin[0])
    if not names:
        raise ClusterError(f"unknown device {gpu_type!r}; {did_you_mean(wanted, device_names())}")
    return device_preset(names[-1])


def memory_bytes_of(preset: DevicePreset, stated_gb: float | None) -> float:
    """Bytes of a row's device. What a row states is the size that a device is sold with; of another size than the
    preset's no more is known."""
    if stated_gb is None or stated_gb == preset.memory_gb.value:
        return preset.total_memory_gb.value * 1e9
    return stated_gb * 1e9


def inter_host_bytes_per_s(text: str | None, devices_per_host: float) -> float | None:
    """Bytes/s of one device between hosts as a row's ``inter_link`` states them, or None."""
    found = _RATE.search(text or "")
    if found:
        count, rate, per = int(found[1] or 1), float(found[2]), found[3].lower()
        total = count * rate * 1e9 / BITS_PER_BYTE
        return total / (1 if per == "gpu" else devices_per_host)
    ports = _SINGLE.search(text or "")
    if ports:
        return int(ports[1]) * _PORT_GBIT[ports[2].upper()] * 1e9 / BITS_PER_BYTE / devices_per_host
    return None


def machine_of(row: Row) -> RowMachine:
    """Raises ClusterError where the device is unknown."""
    preset = preset_of(row.gpu_type or "")
    engine = engine_of_framework(row.framework) or engine_named("megatron" if (row.pp or 1) > 1 else "fsdp")
    # an NVLink domain is a host here; a preset knows it where a row gives the devices of a tray
    devices_per_host = max(
        float(row.gpus_per_node or 0), preset.devices_per_host.value if "nvl" in preset.description.lower() else 0
    )
    devices_per_host = devices_per_host or preset.devices_per_host.value
    stated = inter_host_bytes_per_s(row.inter_link, row.gpus_per_node or devices_per_host)
    return RowMachine(
        preset=preset,
        profile=device_profile(preset.name),
        engine=engine,
        inter_host_bytes_per_s=stated or preset.inter_host.bandwidth_gb_per_s.value * 1e9,
        devices_per_host=devices_per_host,
    )


def machine_for(found: RowMachine, mechanisms: Mechanisms, *, precision: str) -> Machine:
    """The time model's view of a row's machine."""
    preset, device = found.preset, device_of_preset(found.preset)
    return Machine(
        speeds=speeds_of(device, found.profile, found.engine, mechanisms, precision=precision),
        links=links_of(
            found.profile,
            in_host=link_of_preset(preset.in_host),
            inter_host=replace(link_of_preset(preset.inter_host), bytes_per_s=found.inter_host_bytes_per_s),
            devices_per_host=found.devices_per_host,
        ),
        overlap_slowdown=found.profile.overlap_slowdown,
    )


def links_of(profile: DeviceProfile, *, in_host: Link, inter_host: Link, devices_per_host: float) -> Links:
    """What collectives reach of links whose figures are given."""
    inside = profile.link("in_host")
    near, between = inside.usual, profile.link("inter_host").usual
    kinds: dict[Transfer, Call] = {"send" if k == "point_to_point" else k: call for k, call in inside.kinds.items()}
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
    """What kernels of `precision` ("bf16", "fp16", "fp8", "fp32") reach on a device under an engine."""
    peaks = device.peak_flops_per_s
    wide = "bfloat16" if "bfloat16" in peaks and precision != "fp16" else "float16"
    if precision == "fp32" or wide not in peaks:
        wide = "float32"  # torch multiplies float32 in tf32 only where that was asked for
    scale = {
        "first": mechanisms.first_attention,
        "second": 1.0,
        "native": mechanisms.native_attention if profile.native_attention else 1.0,
    }[engine.attention_kernel]
    attention: AttentionEfficiency = replace(
        profile.attention, forward=profile.attention.forward * scale, backward=profile.attention.backward * scale
    )
    has_float8 = "float8" in peaks and precision in FLOAT8
    return Speeds(
        peak_flops_per_s=peaks[wide],
        product_flops_per_s=peaks[wide] * profile.efficiency_of(wide),
        float8_flops_per_s=peaks["float8"] * profile.efficiency_of("float8") if has_float8 else None,
        attention=attention,
        tile=profile.tile,
        bytes_per_s=device.memory_bandwidth_bytes_per_s * profile.memory_efficiency,
        launch_s=profile.launch_s,
        host_s=host_seconds(engine, mechanisms, profile.host_launch_s),
        misaligned=mechanisms.misaligned,
        in_one_thread=device.device_type == "cpu",
    )
