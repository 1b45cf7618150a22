"""The machine and engine of a published row: device preset and profile, links as its text states them, engine."""

import contextlib
import re
from dataclasses import replace

from autopar.cost_model.machine.engine import Engine, engine_named, engine_of_framework
from autopar.cost_model.machine.fitted_constants import Mechanisms
from autopar.cost_model.machine.machine import Machine, links_of, speeds_of
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.cost_model.published.row import Row
from autopar.errors import ClusterError, did_you_mean
from autopar.ir.device import device_of_preset, link_of_preset
from autopar.ir.device_presets import DevicePreset, device_names, device_preset, device_presets

_BITS_PER_BYTE = 8
# "8x HDR InfiniBand 200Gb/s per node", "RDMA 400Gb/s per GPU", "400 Gb/s per node"
_RATE = re.compile(r"(?:(\d+)x [^0-9]*)?(\d+) ?Gb/s per (GPU|node)", re.IGNORECASE)
_SINGLE = re.compile(r"(\d+)x (HDR|NDR|EDR)", re.IGNORECASE)
_PORT_GBIT = {"EDR": 100.0, "HDR": 200.0, "NDR": 400.0}  # InfiniBand Trade Association roadmap, 4 lanes


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
    """Bytes of a row's device. A row states the size that the device is sold with.

    If this size is the preset's, the result is the size that torch reports. Otherwise it is the stated size.
    """
    if stated_gb is None or stated_gb == preset.memory_gb.value:
        return preset.total_memory_gb.value * 1e9
    return stated_gb * 1e9


def inter_host_bytes_per_s(text: str | None, devices_per_host: float) -> float | None:
    """Bytes/s of one device between hosts as a row's ``inter_link`` states them, or None."""
    found = _RATE.search(text or "")
    if found:
        count, rate, per = int(found[1] or 1), float(found[2]), found[3].lower()
        total = count * rate * 1e9 / _BITS_PER_BYTE
        return total / (1 if per == "gpu" else devices_per_host)
    ports = _SINGLE.search(text or "")
    if ports:
        return int(ports[1]) * _PORT_GBIT[ports[2].upper()] * 1e9 / _BITS_PER_BYTE / devices_per_host
    return None


def engine_of(row: Row) -> Engine:
    """The engine of a row's framework. Without a framework: Megatron with pipeline stages, else FSDP."""
    return engine_of_framework(row.framework) or engine_named("megatron" if (row.pp or 1) > 1 else "fsdp")


def row_machine(row: Row, engine: Engine, mechanisms: Mechanisms, *, profile: DeviceProfile | None = None) -> Machine:
    """The machine that a row names, by its shipped profile unless one is given.

    Raises ClusterError for an unknown device.
    """
    preset, precision = preset_of(row.gpu_type or ""), row.precision or "bf16"
    found, device = profile or device_profile(preset.name), device_of_preset(preset)
    # an NVLink domain is a host here; a preset knows it if a row gives the devices of a tray
    devices_per_host = max(
        float(row.gpus_per_node or 0), preset.devices_per_host.value if "nvl" in preset.description.lower() else 0
    )
    devices_per_host = devices_per_host or preset.devices_per_host.value
    stated = inter_host_bytes_per_s(row.inter_link, row.gpus_per_node or devices_per_host)
    between = stated or preset.inter_host.bandwidth_gb_per_s.value * 1e9
    speeds = speeds_of(device, found, engine, mechanisms, precision=precision)
    return Machine(
        device=device,
        profile=found,
        engine=engine,
        mechanisms=mechanisms,
        precision=precision,
        speeds=speeds,
        links=links_of(
            found,
            in_host=link_of_preset(preset.in_host),
            inter_host=replace(link_of_preset(preset.inter_host), bytes_per_s=between),
            devices_per_host=devices_per_host,
        ),
        memory_bytes=memory_bytes_of(preset, row.gpu_mem_gb),
        peak_flops_per_s=speeds.peak_flops_per_s,
    )
