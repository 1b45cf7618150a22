"""This host's devices as torch sees them, and the job's shape as torchrun says it. The only reader of hardware here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.errors import ClusterError, Problem
from autopar.files.units import GB, US, from_entry, si
from autopar.ir.device import Device, HostGroup, Link, device_of_preset
from autopar.ir.device_presets import device_preset, device_preset_for_torch_name, known_range

# tf32, float8 and float4 are left out: not every device has such units
_UNKNOWN_DTYPES = ("float64", "float32", "bfloat16", "float16")


def detected(environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `ClusterSpec.detect`. `environment` is where torchrun's variables are looked up."""
    import torch

    world, local = _world_sizes(environment)
    num_hosts = 1 if world is None or local is None else world // local
    if torch.cuda.is_available():
        num_local = _num_local_gpus(torch.cuda.device_count(), local)
        properties = [torch.cuda.get_device_properties(index) for index in range(num_local)]
        names = {p.name for p in properties}
        if len(names) > 1:
            raise ClusterError(
                f"this host has unlike GPUs ({', '.join(sorted(names))}); write a cluster file with a group for each"
            )
        device, in_host, inter_host, assumptions = _gpu(names.pop(), min(p.total_memory for p in properties))
    else:
        num_local = local or 1
        device, in_host, inter_host, assumptions = _cpu(num_local)
    if num_hosts > 1:
        assumptions.append(f"the other {num_hosts - 1} hosts are assumed to be like this one")
        assumptions.append(f"inter_host cannot be detected: {_figures(inter_host)} of the preset assumed")
    if num_local > 1:
        assumptions.append(f"in_host cannot be detected: {_figures(in_host)} of the preset assumed")
    group = HostGroup(num_hosts=num_hosts, devices_per_host=num_local, device=device, in_host=in_host)
    name = f"{group.num_devices}x{device.name}"
    links = {"inter_host": inter_host} if num_hosts > 1 else {}
    return {"name": name, "groups": (group,), "assumptions": tuple(assumptions), **links}


def _world_sizes(environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    sizes: dict[str, int] = {}
    problems = []
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        text = environment.get(name)
        if text is None:
            continue
        if text.isascii() and text.isdigit() and len(text) < 9 and int(text) > 0:
            sizes[name] = int(text)
        else:
            problems.append(Problem(path=name, value=text, rule="must be a whole number greater than 0"))
    world, local = sizes.get("WORLD_SIZE"), sizes.get("LOCAL_WORLD_SIZE")
    if world is not None and local is not None and world % local:
        rule = f"must be a multiple of LOCAL_WORLD_SIZE, {local}: unlike hosts need a cluster file"
        problems.append(Problem(path="WORLD_SIZE", value=world, rule=rule))
    if problems:
        raise ClusterError("the job's shape cannot be read from the environment", problems)
    # without LOCAL_WORLD_SIZE nothing says how ranks spread over hosts: one host
    return world, local if local is not None else world


def _num_local_gpus(num_visible: int, num_local_ranks: int | None) -> int:
    if num_local_ranks is not None and num_local_ranks > num_visible:
        raise ClusterError(f"{num_local_ranks} ranks on this host but torch sees {num_visible} GPUs; start one per GPU")
    return num_local_ranks or num_visible


def _gpu(torch_name: str, memory_bytes: int) -> tuple[Device, Link, Link, list[str]]:
    preset = device_preset_for_torch_name(torch_name)
    if preset is not None:
        device = replace(
            device_of_preset(preset), memory_bytes=memory_bytes, source=f"preset {preset.name}; memory from the driver"
        )
        told = ("_host", "total_memory_gb")  # links are told of below, memory is the driver's
        assumed = [a for a in preset.assumptions() if not any(path in a.partition("=")[0] for path in told)]
        return device, from_entry(Link, preset.in_host), from_entry(Link, preset.inter_host), assumed
    peaks = {dtype: _slowest(f"peak_tflops.{dtype}") for dtype in _UNKNOWN_DTYPES}
    device = Device(
        name=torch_name,
        device_type="cuda",
        peak_flops_per_s={dtype: si(peak, 1e12) for dtype, peak in peaks.items()},
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=si(_slowest("memory_bandwidth_gb_per_s"), GB),
        source="assumed: the slowest figures of any GPU preset; memory from the driver",
    )
    links = []
    for tier in ("in_host", "inter_host"):
        bandwidth, latency = _slowest(f"{tier}.bandwidth_gb_per_s"), _slowest(f"{tier}.latency_us", largest=True)
        links.append(Link(bytes_per_s=si(bandwidth, GB), latency_s=si(latency, US), name="unknown link"))
    assumed = [
        f"no preset describes {torch_name!r}: the slowest figures of any GPU preset are assumed for its peaks, memory "
        "bandwidth and links; write a cluster file with the right figures"
    ]
    return device, links[0], links[1], assumed


def _slowest(path: str, *, largest: bool = False) -> float:
    known = known_range(path, accelerators_only=True)
    assert known is not None, path
    return known[1] if largest else known[0]


def _cpu(num_local: int) -> tuple[Device, Link, Link, list[str]]:
    preset = device_preset("cpu")
    memory_bytes = _host_memory_bytes()
    assumed = list(preset.assumptions())
    device = device_of_preset(preset)
    if memory_bytes is not None:
        source = f"preset cpu; memory is this host's, divided by {num_local} ranks"
        device = replace(device, memory_bytes=max(1, memory_bytes // num_local), source=source)
    return device, from_entry(Link, preset.in_host), from_entry(Link, preset.inter_host), assumed


def _host_memory_bytes() -> int | None:
    """Physical memory, or the container's limit where that is less; None when neither can be read."""
    sizes = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            sizes.append(int(Path(name).read_text()))
        except (OSError, ValueError):
            continue
    return min((size for size in sizes if size > 0), default=None)


def _figures(link: Link) -> str:
    return f"{link.name}, {link.bytes_per_s / 1e9:g} GB/s, {link.latency_s * 1e6:g} us"
