"""The machine and engine of a published row: device preset and profile, links, engine."""

from autopar.cost_model.machine.engine import NEUTRAL, Engine, engine_named
from autopar.cost_model.machine.fitted_constants import Mechanisms
from autopar.cost_model.machine.machine import Machine, links_of, speeds_of
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.cost_model.published.row import ENGINE_COLUMNS, Row
from autopar.files.units import from_entry
from autopar.ir.device import Link, device_of_preset
from autopar.ir.device_presets import DevicePreset, device_preset


def memory_bytes_of(preset: DevicePreset, stated_gb: float | None) -> float:
    """Bytes of a row's device. A row states the size that the device is sold with."""
    if stated_gb is None or stated_gb == preset.memory_gb.value:
        return preset.total_memory_gb.value * 1e9
    return stated_gb * 1e9


def devices_per_host_of(row: Row, preset: DevicePreset) -> float:
    """Devices of a host. An NVLink domain is a host; the preset knows it if a row gives the devices of a tray."""
    domain = preset.devices_per_host.value if "nvl" in preset.description.lower() else 0
    return max(float(row.gpus_per_node or 0), domain) or preset.devices_per_host.value


def engine_of(row: Row) -> Engine:
    """The engine that a row names, or the neutral one, with the mechanisms of the row's columns."""
    engine = engine_named(row.engine or NEUTRAL)
    stated = {name: word for name in ENGINE_COLUMNS if (word := getattr(row, name)) is not None}
    if row.recompute_modules and row.recompute in (None, "selective"):
        stated["selective"] = list(row.recompute_modules)
    return engine.model_copy(update=stated) if stated else engine


def row_machine(row: Row, engine: Engine, mechanisms: Mechanisms, *, profile: DeviceProfile | None = None) -> Machine:
    """The machine that a row names, by its shipped profile unless one is given."""
    preset, precision = device_preset(row.gpu_type or ""), row.precision or "bf16"
    given, device = profile or device_profile(preset.name), device_of_preset(preset)
    between = (row.inter_gb_per_s or preset.inter_host.bandwidth_gb_per_s.value) * 1e9
    speeds = speeds_of(device, given, engine, mechanisms, precision=precision)
    return Machine(
        device=device,
        profile=given,
        engine=engine.computing_in(precision),
        mechanisms=mechanisms,
        precision=precision,
        speeds=speeds,
        links=links_of(
            given,
            in_host=from_entry(Link, preset.in_host),
            inter_host=from_entry(Link, preset.inter_host, bytes_per_s=between),
            devices_per_host=devices_per_host_of(row, preset),
        ),
        memory_bytes=memory_bytes_of(preset, row.gpu_mem_gb),
        peak_flops_per_s=speeds.peak_flops_per_s,
        host=device.host,
    )
