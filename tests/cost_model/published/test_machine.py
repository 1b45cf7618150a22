"""The machine of a published row: its device by name, its links as a sentence, its engine."""

from dataclasses import replace

import pytest

from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.published.machine import (
    engine_of,
    inter_host_bytes_per_s,
    memory_bytes_of,
    preset_of,
    row_machine,
)
from autopar.cost_model.published.row import Row
from autopar.errors import ClusterError


@pytest.mark.parametrize(
    "name, preset",
    [
        ("A100-80", "a100-80gb"),
        ("A100", "a100-80gb"),
        ("V100-16", "v100-16gb"),
        ("H100-SXM", "h100-sxm"),
        ("H100-SXM-96GB-HBM2e", "h100-96gb-hbm2e"),
        ("GB200", "gb200"),
        ("MI325X", "mi325x"),
    ],
)
def test_device(name: str, preset: str) -> None:
    assert preset_of(name).name == preset


@pytest.mark.parametrize(("stated_gb", "gigabytes"), [(None, 84.94), (80, 84.94), (64, 64)])
def test_memory_is_what_torch_reports_of_the_size_that_is_stated(stated_gb: float | None, gigabytes: float) -> None:
    assert memory_bytes_of(preset_of("H100-SXM"), stated_gb) == pytest.approx(gigabytes * 1e9)


def test_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ClusterError, match="TPUv4"):
        preset_of("TPUv4")


@pytest.mark.parametrize(
    "text, devices, gigabytes",
    [
        ("8x HDR InfiniBand 200Gb/s per node", 8, 25.0),
        ("4x Omni-Path 100Gb/s per node", 8, 6.25),
        ("NDR InfiniBand 400Gb/s per GPU (standard DGX H100 spec)", 8, 50.0),
        ("RoCE 1600Gb/s per node", 8, 25.0),
        ("simulator config: 800Gb/s per node", 8, 12.5),
        ("4x HDR InfiniBand (ConnectX-6) per node", 8, 12.5),
    ],
)
def test_links_as_stated(text: str, devices: int, gigabytes: float) -> None:
    assert inter_host_bytes_per_s(text, devices) == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize("text", [None, "", "single node", "RoCE"])
def test_links_that_are_not_stated(text: str | None) -> None:
    assert inter_host_bytes_per_s(text, 8) is None


def machine_of(row: Row) -> Machine:
    return row_machine(row, engine_of(row), mechanisms())


def test_an_nvlink_domain_is_a_host() -> None:
    for device, expected in (("GB200", 72), ("A100-80", 4)):
        assert machine_of(Row(id="r", gpu_type=device, gpus_per_node=4)).links.devices_per_host == expected


@pytest.mark.parametrize(("device", "is_switched"), [("V100-16", False), ("MI300X", False), ("H100-SXM", True)])
def test_switches_are_the_preset_s(device: str, is_switched: bool) -> None:
    machine = machine_of(Row(id="r", gpu_type=device, precision="fp16"))
    assert machine.links.is_switched == is_switched


@pytest.mark.parametrize(("device", "faster"), [("H100-SXM", True), ("A100-80", False)])
def test_kernels_for_a_device_are_its_profile_s(device: str, faster: bool) -> None:
    """TransformerEngine prefers cuDNN's attention on Hopper and later, FlashAttention 2 before."""
    row = Row(id="r", gpu_type=device, framework="Megatron-Core")
    native = machine_of(row).speeds.attention.forward
    second = machine_of(replace(row, framework="torchtitan"))
    assert (native > second.speeds.attention.forward) == faster


def test_a_row_without_framework_gets_one_that_fits() -> None:
    assert engine_of(Row(id="r", gpu_type="A100-80", pp=4)).name == "megatron"
    assert engine_of(Row(id="r", gpu_type="A100-80", pp=1)).name == "fsdp"
