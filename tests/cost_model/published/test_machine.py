"""The machine of a published row: its device by name, its links as a sentence, its engine."""

import math
from dataclasses import replace

import pytest

from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.machine.presets import shipped_profiles
from autopar.cost_model.machine.profile import MOST_OF_PEAK
from autopar.cost_model.published.machine import (
    engine_of,
    memory_bytes_of,
    row_machine,
)
from autopar.cost_model.published.row import Row
from autopar.errors import ClusterError
from autopar.ir.device_presets import device_preset


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
    assert device_preset(name).name == preset


@pytest.mark.parametrize(("stated_gb", "gigabytes"), [(None, 84.94), (80, 84.94), (64, 64)])
def test_memory_is_what_torch_reports_of_the_size_that_is_stated(stated_gb: float | None, gigabytes: float) -> None:
    assert memory_bytes_of(device_preset("H100-SXM"), stated_gb) == pytest.approx(gigabytes * 1e9)


def test_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ClusterError, match="TPUv4"):
        device_preset("TPUv4")


@pytest.mark.parametrize("stated, gigabytes", [(50.0, 50.0), (6.25, 6.25), (None, 25.0)])
def test_links_between_hosts_are_stated_or_the_preset_s(stated: float | None, gigabytes: float) -> None:
    row = Row(id="r", gpu_type="A100-80", gpus_per_node=8, inter_gb_per_s=stated)
    usual = machine_of(replace(row, inter_gb_per_s=None)).links.inter_host_bytes_per_s
    assert machine_of(row).links.inter_host_bytes_per_s == pytest.approx(usual * gigabytes / 25)


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
    row = Row(id="r", gpu_type=device, engine="megatron")
    native = machine_of(row).speeds.attention.forward
    second = machine_of(replace(row, engine="fsdp"))
    assert (native > second.speeds.attention.forward) == faster


def test_a_row_states_mechanisms_beside_its_engine() -> None:
    row = Row(id="r", gpu_type="A100-80")
    assert engine_of(row).name == "neutral"
    engine = engine_of(replace(row, engine="fsdp", attention="materialised", offload="optimizer"))
    assert (engine.name, engine.attention, engine.offload) == ("fsdp", "materialised", "optimizer")
    assert engine.pointwise == engine_of(replace(row, engine="fsdp")).pointwise


@pytest.mark.parametrize(
    ("device", "precision", "dtype"),
    [
        ("B200", "nvfp4", "float4"),
        ("GB300", "nvfp4", "float4"),
        ("MI355X", "mxfp4", "float4"),
        ("B300", "mxfp8", "float8"),
        ("H100-SXM", "nvfp4", "float8"),  # without 4-bit units
    ],
)
def test_products_in_4_bits_have_a_rate_of_their_own(device: str, precision: str, dtype: str) -> None:
    machine = machine_of(Row(id="r", gpu_type=device, precision=precision))
    part = machine.profile.sustained(machine.profile.efficiency_of(dtype), machine.device)
    expected = machine.device.peak_flops_per_s[dtype] * part
    assert machine.speeds.narrow_flops_per_s == expected
    assert machine.profile.efficiency_of("float4") == machine.profile.efficiency_of("float8")
    wide = machine_of(Row(id="r", gpu_type=device)).speeds
    assert wide.narrow_flops_per_s is None
    assert (machine.speeds.product_flops_per_s, machine.speeds.attention) == (wide.product_flops_per_s, wide.attention)


def test_a_device_without_8_bit_units_computes_in_16() -> None:
    assert machine_of(Row(id="r", gpu_type="A100-80", precision="nvfp4")).speeds.narrow_flops_per_s is None


FAMILIES = {
    "B300": "b200", "MI350X": "mi300", "H800": "h100", "RTX 5090": "geforce", "L40S": "workstation",
    "MI250X": "default",
}  # fmt: skip


@pytest.mark.parametrize(("device", "profile"), FAMILIES.items())
def test_devices_share_the_profile_of_their_family(device: str, profile: str) -> None:
    assert machine_of(Row(id="r", gpu_type=device)).profile.name == profile


@pytest.mark.parametrize(
    ("device", "part"),
    [
        ("H100-SXM", 1.0),  # the device that the profile describes
        ("H100-SXM-96GB-HBM2e", math.sqrt(500 / 700)),  # the same units at 500 W
        ("H100-PCIe", math.sqrt(350 / 756 / (700 / 989.4))),
        ("GB300", math.sqrt(1400 / 1200)),
        ("B200", math.sqrt(1000 / 2250 / (1200 / 2500))),
    ],
)
def test_products_and_attention_follow_the_power_within_a_generation(device: str, part: float) -> None:
    machine = machine_of(Row(id="r", gpu_type=device, precision="bf16", engine="fsdp"))
    profile, speeds = machine.profile, machine.speeds
    assert speeds.product_flops_per_s == pytest.approx(
        part * profile.efficiency_of("bfloat16") * machine.peak_flops_per_s, rel=1e-3
    )
    assert speeds.attention.forward == pytest.approx(part * profile.attention.forward, rel=1e-3)


def test_no_device_reaches_more_than_most_of_its_peak_by_power() -> None:
    """An H20 has 400 W for the units of a seventh of an H100. Its peak is the limit, not its power."""
    machine = machine_of(Row(id="r", gpu_type="H20", precision="bf16", engine="fsdp"))
    assert machine.speeds.product_flops_per_s == pytest.approx(MOST_OF_PEAK * machine.peak_flops_per_s)


def test_a_device_without_a_known_power_reaches_what_the_profile_says() -> None:
    device = replace(machine_of(Row(id="r", gpu_type="H100-PCIe")).device, power_w=None)
    profile = shipped_profiles()["h100"]
    assert profile.sustained(0.5, device) == 0.5
