from pathlib import Path

import pytest

from autopar.errors import ClusterError
from autopar.files.strict_model import read_named
from autopar.ir.device import device_of_preset
from autopar.ir.device_presets import (
    DevicePreset,
    device_names,
    device_preset,
    device_preset_for_torch_name,
    device_presets,
    known_range,
)

REQUIRED = (
    "v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "a800-80gb", "h100-sxm", "h100-pcie", "h100-96gb-hbm2e", "h200",
    "h20", "h800", "b200", "b300", "gb200", "gb300", "mi250x", "mi300x", "mi325x", "mi350x", "mi355x", "l40s",
    "rtx4090", "rtx5090", "cpu", "gh200", "p100-16gb", "p100-pcie-16gb", "t4", "titan-rtx", "rtx2080ti", "rtx3080",
    "rtx3090", "rtx3090ti", "rtx4080", "rtx5060ti", "rtx5070ti", "rtx5080", "a10", "a10g", "a40", "a4000", "a5000",
    "a6000", "l4", "rtx4000-ada", "rtx6000-ada", "rtx-pro-6000",
)  # fmt: skip


def test_all_devices_are_there() -> None:
    assert set(REQUIRED) <= set(device_presets())


@pytest.mark.parametrize("name", sorted(device_presets()))
def test_every_number_has_a_source_and_is_of_a_possible_size(name: str) -> None:
    preset = device_presets()[name]
    assert all(len(figure.source) > 8 for figure in preset.figures().values())
    peaks = {dtype: figure.value for dtype, figure in preset.peaks().items()}
    # narrower is never slower
    for wider, narrower in (
        ("float32", "tf32"),
        ("tf32", "bfloat16"),
        ("float32", "float16"),
        ("float16", "float8"),
        ("float8", "float4"),
    ):
        if wider in peaks and narrower in peaks:
            assert peaks[wider] <= peaks[narrower]
    assert peaks.get("bfloat16", peaks["float16"]) == peaks["float16"]
    assert preset.in_host.bandwidth_gb_per_s.value >= preset.inter_host.bandwidth_gb_per_s.value or name == "cpu"
    assert preset.devices_per_host.value == int(preset.devices_per_host.value)
    if name != "cpu":
        # a peak taken with sparsity, or bandwidth of both directions, would stand out here
        assert 20 <= peaks["float16"] * 1e3 / preset.memory_bandwidth_gb_per_s.value <= 450
        assert preset.in_host.bandwidth_gb_per_s.value <= 900


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("h100", "h100-sxm"),
        ("H100_SXM", "h100-sxm"),
        ("a100", "a100-80gb"),
        ("a800", "a800-80gb"),
        ("h800-sxm", "h800"),
        ("H20", "h20"),
        ("v100", "v100-32gb"),
        ("a100-40", "a100-40gb"),
        ("h100-96gb", "h100-96gb-hbm2e"),
        ("rtx-4090", "rtx4090"),
        ("gb200-nvl72", "gb200"),
        ("B300", "b300"),
        ("MI350X", "mi350x"),
        ("RTX_5090", "rtx5090"),
        ("RTX 3090 Ti", "rtx3090ti"),
        ("RTX A6000", "a6000"),
        ("p100", "p100-16gb"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    assert device_preset(alias).name == name


def test_names_are_unique_and_unknown_ones_are_refused() -> None:
    assert len(device_names()) == len(set(device_names()))
    with pytest.raises(ClusterError, match="did you mean 'mi300x'"):
        device_preset("mi300")
    torch_names = [name for preset in device_presets().values() for name in preset.torch_names]
    assert len(torch_names) == len(set(torch_names))


def test_torch_names() -> None:
    found = device_preset_for_torch_name("NVIDIA H100 80GB HBM3")
    assert found is not None and found.name == "h100-sxm"
    assert device_preset_for_torch_name("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None


@pytest.mark.parametrize(("name", "in_host"), [("h100", 450), ("h800", 200), ("h20", 450)])
def test_only_the_h800_has_less_nvlink(name: str, in_host: float) -> None:
    preset, full = device_preset(name), device_preset("h100")
    assert preset.in_host.bandwidth_gb_per_s.value == in_host
    assert preset.inter_host.bandwidth_gb_per_s.value == full.inter_host.bandwidth_gb_per_s.value
    found = device_preset_for_torch_name(preset.torch_names[0])
    assert found is not None and found.name == preset.name


def test_the_hbm2e_h100_is_what_its_benchmark_says() -> None:
    preset = device_preset("h100-96gb-hbm2e")
    assert (preset.memory_gb.value, preset.memory_bandwidth_gb_per_s.value) == (96, 2400)
    assert any("bfloat16" in text for text in preset.assumptions())  # its exact peak was never published


@pytest.mark.parametrize("name", sorted(device_presets()))
def test_memory_is_what_torch_reports_and_the_size_sold_is_near(name: str) -> None:
    preset = device_presets()[name]
    total, sold = preset.total_memory_gb, preset.memory_gb
    assert 0.97 * sold.value < total.value <= 1.0738 * sold.value  # at most the size sold, read as GiB
    assert total.source.startswith("assumed") or "https://" in total.source
    assert device_of_preset(preset).memory_bytes == round(total.value * 1e9)


def test_known_range() -> None:
    assert known_range("memory_gb", accelerators_only=True) == (10, 288)
    assert known_range("nothing", accelerators_only=True) is None


def test_a_malformed_preset_names_file_and_field(tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    path.write_text("name: other\nmemory_gb: {value: 3}\nmemory_gbs: 3\n")
    preset, problems = read_named(DevicePreset, path)
    assert preset is None
    paths = [problem.path for problem in problems]
    assert "new.yaml: memory_gb.source" in paths and "new.yaml: memory_gbs" in paths


def test_the_documentation_has_these_figures() -> None:
    text = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    for name, preset in device_presets().items():
        half = preset.peak_tflops.bfloat16 or preset.peak_tflops.float16
        assert half is not None
        figures = (preset.memory_gb, preset.total_memory_gb, half, preset.devices_per_host)
        links = (preset.in_host.bandwidth_gb_per_s, preset.inter_host.bandwidth_gb_per_s)
        aliases = ", ".join(f"`{alias}`" for alias in preset.aliases)
        row = " | ".join([f"| `{name}`", aliases, *(f"{figure.value:g}" for figure in (*figures, *links))]) + " |"
        assert row in text
