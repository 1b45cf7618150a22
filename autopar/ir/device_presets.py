"""Device presets: one YAML file per device in ``presets/devices``, every number with its source.

Adding a device is adding a file; its name is the file's. Peaks are dense (without structured sparsity) and of the unit
that a matrix product uses, in 10^12 FLOP/s; GB are decimal (10^9 bytes); bandwidths are per device and *per direction*;
latencies are per hop of a collective. `memory_gb` is the size that a device is sold with. `total_memory_gb` is the size
that torch reports (``total_memory``, mostly 5 to 7 % more); plans have to fit in it. The source of an unpublished
number begins with "assumed".
"""

from __future__ import annotations

import functools
import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field

from autopar.errors import ClusterError, did_you_mean
from autopar.files.strict_model import NamedModel, SourcedNumber, StrictModel, figures_of, models_in, read_named
from autopar.files.strict_yaml import files_naming

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "float4")
DeviceType = Literal["cuda", "cpu"]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,39}$")]
Figure = SourcedNumber[Annotated[float, Field(gt=0, allow_inf_nan=False)]]


F = TypeVar("F")  # how a file writes a figure


class PresetLink(StrictModel):
    name: str
    bandwidth_gb_per_s: Figure
    latency_us: Figure
    is_switched: bool = True  # any device reaches any other at the full bandwidth; else they are linked pair by pair


class HostIn(StrictModel, Generic[F]):
    """One device's part of its host: its link to it, per direction, and of the host's memory."""

    link_gb_per_s: F
    memory_gb: F
    memory_gb_per_s: F


class ByDtype(StrictModel, Generic[F]):
    """A figure for each dtype; absent without one."""

    float64: F | None = None
    float32: F | None = None
    tf32: F | None = None
    bfloat16: F | None = None
    float16: F | None = None
    float8: F | None = None
    float4: F | None = None


class PeaksIn(ByDtype[F]):
    """Absent means that the device has no such unit."""

    float32: F


class DevicePreset(NamedModel):
    """One file of ``presets/devices``."""

    name: _Name
    description: str
    aliases: list[_Name]
    device_type: DeviceType
    torch_names: list[str]  # the text of torch.cuda.get_device_properties(i).name
    peak_tflops: PeaksIn[Figure]
    memory_gb: Figure
    total_memory_gb: Figure
    memory_bandwidth_gb_per_s: Figure
    power_w: Figure | None = None
    devices_per_host: Figure
    in_host: PresetLink
    inter_host: PresetLink
    host: HostIn[Figure] | None = None  # only offloading uses it, and says which figures are assumed

    def peaks(self) -> dict[str, Figure]:
        """Figure per dtype, for the dtypes that the device computes in."""
        figures = ((dtype, getattr(self.peak_tflops, dtype)) for dtype in DTYPES)
        return {dtype: figure for dtype, figure in figures if figure is not None}

    def figures(self) -> dict[str, Figure]:
        """The file's numbers by path, without those of the host."""
        return {path: figure for path, figure in figures_of(self) if not path.startswith("host.")}

    def assumptions(self) -> tuple[str, ...]:
        """The figures that nobody published, as sentences."""
        if self.device_type == "cpu":  # every figure is; one sentence says it
            return (f"{self.name}: {self.memory_gb.source.removeprefix('assumed: ')}",)
        figures = self.figures().items()
        return tuple(f"{self.name}: {path} = {f.value:g} ({f.source})" for path, f in figures if f.is_assumed)


@functools.cache
def device_presets() -> dict[str, DevicePreset]:
    """Every preset by its name, sorted. Raises ClusterError when a file is malformed or a name is taken twice."""
    return models_in(DevicePreset, resources.files("autopar.presets") / "devices", "device presets", ClusterError)


def device_names() -> tuple[str, ...]:
    """Every name and alias that `device_preset` accepts, sorted."""
    return tuple(sorted(name for preset in device_presets().values() for name in (preset.name, *preset.aliases)))


def device_preset(name: str) -> DevicePreset:
    """The preset of that name or alias, case ignored. Raises ClusterError naming the nearest."""
    preset = _preset_named(name.lower().replace("_", "-").replace(" ", "-"))
    if preset is None:
        raise ClusterError(f"unknown device {name[:80]!r}; {did_you_mean(name, device_names())}")
    return preset


@functools.cache
def _preset_named(wanted: str) -> DevicePreset | None:
    with resources.as_file(resources.files("autopar.presets") / "devices") as folder:
        for path in files_naming(Path(folder), wanted):
            preset, problems = read_named(DevicePreset, path)
            if problems:
                raise ClusterError("the device presets are malformed", problems)
            if preset is not None and wanted in (preset.name, *preset.aliases):
                return preset
    return None


def device_preset_for_torch_name(torch_name: str) -> DevicePreset | None:
    """The preset of the device that torch calls `torch_name`, or None. A slice of a device (MIG) is not that device."""
    wanted = re.sub(r"\s+", " ", torch_name).strip().lower()
    for preset in device_presets().values():
        if any(wanted == known.lower() for known in preset.torch_names):
            return preset
    return None


def known_range(path: str, *, accelerators_only: bool) -> tuple[float, float] | None:
    """Smallest and largest value of one figure (`DevicePreset.figures` path) over the presets; None if none has it."""
    values = [
        figure.value
        for preset in device_presets().values()
        if not (accelerators_only and preset.device_type == "cpu")
        for known, figure in preset.figures().items()
        if known == path
    ]
    return (min(values), max(values)) if values else None
