"""Samples of a known profile with noise. A fit must find the profile again."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autopar.cost_model.fit.links import sent_and_hops
from autopar.cost_model.machine.kernel_times import (
    attention_flops,
    attention_seconds,
    collective_seconds,
    matmul_seconds,
    memory_seconds,
    tile_part,
)
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.machine.profile import DeviceProfile, Measurement
from autopar.ir.device import Device
from autopar.ir.samples import Sample, Work

DEVICE = Device(
    name="planted",
    device_type="cuda",
    peak_flops_per_s={"bfloat16": 3e14, "float32": 2e13},
    memory_bytes=10**10,
    memory_bandwidth_bytes_per_s=2e12,
    source="a planted device",
)
MEASURED = Measurement(date="2026-11-21", host="here", how="planted", ranks=1, seconds=1.0)
BYTES = {"bfloat16": 2, "float32": 4}
M, N, K = (32, 100, 512, 2048, 8192), (48, 128, 1000, 4096), (64, 256, 1024, 8192)


def planted(**changes: object) -> DeviceProfile:
    base = device_profile("a100-80gb")
    return replace(base, name="planted", devices=("planted",), device=DEVICE, **changes)  # type: ignore[arg-type]


def samples_of(profile: DeviceProfile, *, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    """What measuring the profile's device would give; `noise` is the standard deviation of the logarithm."""
    random = np.random.default_rng(seed)
    exact = [*_products(profile), *_attention(profile), *_memory(profile), *_launch(profile), *_links(profile)]
    return [replace(one, seconds=float(one.seconds * np.exp(noise * random.normal()))) for one in exact]


def _products(profile: DeviceProfile) -> Iterator[Sample]:
    for part, dtype, counts in (
        ("matmul", "bfloat16", (1,)),
        ("matmul", "float32", (1,)),
        ("products", "bfloat16", (64,)),
    ):
        for m, n, k, count in ((m, n, k, count) for m in M for n in N for k in K for count in counts):
            reached = profile.efficiency[dtype] if part == "matmul" else profile.attention.products
            seconds = matmul_seconds(
                flops=(flops := 2.0 * count * m * n * k),
                moved_bytes=count * BYTES[dtype] * (m * k + k * n + m * n),
                part=reached * tile_part(profile.tile, m, n, k, count),
                peak_flops_per_s=DEVICE.peak(dtype),
                bytes_per_s=DEVICE.memory_bandwidth_bytes_per_s * profile.memory_efficiency,
                launch_s=profile.launch_s,
            )
            numbers = {"count": count, "m": m, "n": n, "k": k}
            yield _sample(part, dtype, flops, seconds, numbers)


def _attention(profile: DeviceProfile) -> Iterator[Sample]:
    for length in (256, 512, 1024, 2048, 4096, 16384):
        for is_backward in (0, 1):
            flops = float(attention_flops(32, length, length, 128, is_causal=True))
            seconds = attention_seconds(
                flops=flops,
                keys=length,
                attention=profile.attention,
                peak_flops_per_s=DEVICE.peak("bfloat16"),
                launch_s=profile.launch_s,
                is_backward=bool(is_backward),
            )
            numbers = {"count": 32, "m": length, "n": length, "k": 128, "is_causal": 1, "is_backward": is_backward}
            yield _sample("attention", "bfloat16", flops, seconds, numbers)


def _memory(profile: DeviceProfile) -> Iterator[Sample]:
    for size in (2.0**20, 2.0**24, 2.0**28, 2.0**30):
        speed = DEVICE.memory_bandwidth_bytes_per_s * profile.memory_efficiency
        yield _sample(
            "memory", "copy", size, memory_seconds(moved_bytes=size, bytes_per_s=speed, launch_s=profile.launch_s)
        )


def _launch(profile: DeviceProfile) -> Iterator[Sample]:
    yield _sample("launch", "device", 1000, 1000 * profile.launch_s)
    yield _sample("launch", "host", 400, 400 * profile.host_launch_s)


def _links(profile: DeviceProfile) -> Iterator[Sample]:
    for tier, hosts in (("in_host", 1), ("inter_host", 2)):
        one = profile.links.get(tier)  # type: ignore[call-overload]
        if one is None or one.link is None:
            continue
        for kind, call in one.kinds.items():
            for ranks in (2, 8) if kind != "point_to_point" else (2,):
                for size in (2.0**10, 2.0**14, 2.0**18, 2.0**22, 2.0**26):
                    sent, steps = sent_and_hops(kind, size, ranks)
                    seconds = collective_seconds(
                        sent_bytes=sent,
                        hops=steps,
                        bytes_per_s=one.link.bytes_per_s,
                        latency_s=one.link.latency_s,
                        call=call,
                    )
                    yield _sample("collective", kind, size, seconds, {"ranks": ranks, "hosts": hosts})


def _sample(part: str, name: str, amount: float, seconds: object, numbers: dict[str, float] | None = None) -> Sample:
    work = Work(part=part, name=name, amount=amount, numbers=numbers or {})  # type: ignore[arg-type]
    return Sample(work=work, seconds=float(seconds))  # type: ignore[arg-type]
