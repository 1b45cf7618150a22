"""`autopar clusters`: the devices that a cluster may be made of."""

from collections.abc import Sequence

from autopar.cli.command import Answer
from autopar.cli.output import console, table
from autopar.ir.device_presets import DevicePreset, device_presets


def clusters() -> Answer:
    """List the device presets: <n>x<device> such as 8xh100 or 4xcpu is a cluster.

    Example: autopar clusters --json
    """
    presets = list(device_presets().values())
    return Answer(data=[_entry(preset) for preset in presets], show=lambda: _show(presets))


def _show(presets: Sequence[DevicePreset]) -> None:
    columns = (
        "device",
        "also",
        "sold as GB",
        "torch says GB",
        "bfloat16 TFLOP/s",
        "per host",
        "in-host GB/s",
        "inter-host GB/s",
    )
    rows = []
    for preset in presets:
        bfloat16 = preset.peak_tflops.bfloat16
        figures = (preset.memory_gb, preset.total_memory_gb, bfloat16, preset.devices_per_host)
        links = (preset.in_host.bandwidth_gb_per_s, preset.inter_host.bandwidth_gb_per_s)
        cells = ["-" if figure is None else f"{figure.value:g}" for figure in (*figures, *links)]
        rows.append((preset.name, ", ".join(preset.aliases), *cells))
    out = console()
    out.print(table(columns, rows, right=columns[2:]))
    out.print("\nA cluster is <n>x<device> such as 8xh100, a YAML file, or detect.")


def _entry(preset: DevicePreset) -> dict[str, object]:
    figures = {path: figure.value for path, figure in preset.figures().items()}
    sources = {path: figure.source for path, figure in preset.figures().items()}
    about = preset.model_dump(include={"name", "aliases", "description", "device_type"})
    return about | {"figures": figures, "sources": sources}
