"""The machine and engine of a published row: device preset and profile, links, engine."""

import contextlib
import re
from dataclasses import replace
from functools import lru_cache

from autopar.cost_model.machine.engine import NEUTRAL, Engine, engine_named, engine_of_framework
from autopar.cost_model.machine.fitted_constants import Mechanisms
from autopar.cost_model.machine.machine import Machine, links_of, speeds_of
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.cost_model.published.row import Row
from autopar.cost_model.published.words import engine_with_options
from autopar.errors import ClusterError, did_you_mean
from autopar.ir.device import device_of_preset, link_of_preset
from autopar.ir.device_presets import DevicePreset, device_names, device_preset, device_presets


@lru_cache(maxsize=256)
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


def link_warning(row: Row, preset: DevicePreset) -> str | None:
    """A sentence about a bandwidth in the text of a row's link, which is not read. None if there is none."""
    if row.inter_gb_per_s is not None or not re.search(r"\d", row.inter_link or ""):
        return None
    used = f"the preset's {preset.inter_host.bandwidth_gb_per_s.value:g} GB/s per device are used"
    return f"inter_link {row.inter_link!r} is text, inter_gb_per_s has the bandwidth; {used}"


def devices_per_host_of(row: Row, preset: DevicePreset) -> float:
    """Devices of a host. An NVLink domain is a host; the preset knows it if a row gives the devices of a tray."""
    domain = preset.devices_per_host.value if "nvl" in preset.description.lower() else 0
    return max(float(row.gpus_per_node or 0), domain) or preset.devices_per_host.value


def engine_of(row: Row) -> Engine:
    """The engine of a row's framework, or the neutral one if no profile has it, with the options of the row."""
    engine = engine_of_framework(row.framework, row.source) or engine_named(NEUTRAL)
    return engine_with_options(engine, "; ".join(filter(None, (row.framework, row.zero_detail, row.optimizer))))


def row_machine(row: Row, engine: Engine, mechanisms: Mechanisms, *, profile: DeviceProfile | None = None) -> Machine:
    """The machine that a row names, by its shipped profile unless one is given.

    Raises ClusterError for an unknown device.
    """
    preset, precision = preset_of(row.gpu_type or ""), row.precision or "bf16"
    found, device = profile or device_profile(preset.name), device_of_preset(preset)
    between = (row.inter_gb_per_s or preset.inter_host.bandwidth_gb_per_s.value) * 1e9
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
            devices_per_host=devices_per_host_of(row, preset),
        ),
        memory_bytes=memory_bytes_of(preset, row.gpu_mem_gb),
        peak_flops_per_s=speeds.peak_flops_per_s,
        host=device.host,
    )
