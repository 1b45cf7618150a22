"""Device profiles: files and values are equal, a wrong file is refused whole, and assumed numbers are named."""

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.machine.kernel_times import attention_seconds, matmul_seconds, tile_part
from autopar.cost_model.machine.presets import cluster_profile, device_profile, shipped_profiles
from autopar.cost_model.machine.profile import (
    AttentionEfficiency,
    CallCost,
    DeviceProfile,
    FitError,
    LinkProfile,
    Measurement,
    Tile,
)
from autopar.cost_model.machine.profile_io import dump_profile, load_profile, profile_to_dict
from autopar.errors import ClusterError, InputError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.device import Device, Link
from autopar.ir.device_presets import device_presets


def content() -> dict[str, Any]:
    return profile_to_dict(device_profile("a100-80gb"))


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    """A cluster whose profile lies beside it."""
    path = tmp_path / "cluster.yaml"
    path.write_text("groups: [{devices_per_host: 4, device: cpu}]\nprofile: device.yaml\n")
    (tmp_path / "device.yaml").touch()
    return path


def test_a_cluster_brings_its_profile(cluster_file: Path) -> None:
    dump_profile(measured_profile(), cluster_file.with_name("device.yaml"))
    assert cluster_profile(ClusterSpec.load(cluster_file), "cpu").name == "here"
    shipped = replace(ClusterSpec.preset("8xh100"), profile="b200")
    assert cluster_profile(shipped, "h100-sxm").name == "b200"
    assert cluster_profile(ClusterSpec.preset("8xh100"), "h100-sxm").name == "h100"
    with pytest.raises(ClusterError, match="no profile 'h100-700w'; did you mean 'h100'"):
        cluster_profile(replace(shipped, profile="h100-700w"), "h100-sxm")


def test_a_cluster_whose_profile_is_none(cluster_file: Path) -> None:
    with pytest.raises(ClusterError, match=r"profile file .* cannot be used"):
        cluster_profile(ClusterSpec.load(cluster_file), "cpu")


def measured_profile() -> DeviceProfile:
    device = ClusterSpec.preset("1xcpu").devices[0]
    link = LinkProfile(
        usual=CallCost(efficiency=0.9, call_s=1.25e-5),
        kinds={"all_reduce": CallCost(efficiency=0.5, call_s=3.1e-5)},
        link=Link(bytes_per_s=1.234e9, latency_s=7.7e-5, name="measured"),
    )
    measured = Measurement(
        date="2026-11-21",
        host="here",
        how="cpu, gloo",
        ranks=4,
        seconds=12.5,
        ranks_per_core=2.0,
        versions={"torch": "2.13.0"},
    )
    fit = {"matmul": FitError(median=0.03, p90=0.11, num_points=40)}
    sources = {path: text for path, text in device_profile("cpu").sources.items() if "inter_host" not in path}
    sources |= {f"links.in_host.kinds.all_reduce.{key}": "fitted to 12 times" for key in ("efficiency", "call_us")}
    return replace(
        device_profile("cpu"),
        name="here",
        sources=sources,
        links={"in_host": link},
        measured=measured,
        fit=fit,
        launch_s=1.7e-6,
        device=replace(device, memory_bandwidth_bytes_per_s=2e10),
    )


@pytest.mark.parametrize("profile", [*shipped_profiles().values(), measured_profile()], ids=lambda p: p.name)
def test_a_file_gives_the_profile_back(profile: DeviceProfile, tmp_path: Path) -> None:
    path = tmp_path / "device.yaml"
    dump_profile(profile, path)
    found = load_profile(path)
    assert found == profile and hash(found) == hash(profile)
    assert profile_to_dict(found) == profile_to_dict(profile)
    assert [file.name for file in tmp_path.iterdir()] == ["device.yaml"]


def test_every_profile_describes_presets_that_exist() -> None:
    names = [device for p in shipped_profiles().values() for device in (*p.devices, *p.unmeasured)]
    assert len(names) == len(set(names)) and set(names) <= set(device_presets())
    for stem, profile in shipped_profiles().items():
        assert profile.name == stem
        assert {device_presets()[name].device_type for name in profile.devices} <= {profile.device_type}


@pytest.mark.parametrize(("device", "like"), [("rtx5080", "rtx4090"), ("rtx6000-ada", "l40s"), ("gh200", "h100-sxm")])
def test_a_card_without_measured_runs_says_so_and_has_a_wide_interval(device: str, like: str) -> None:
    profile, known = device_profile(device), device_profile(like)
    assert profile.efficiency == known.efficiency and known.is_of_device and not profile.is_of_device
    assert f"no measured run of device {device} is known" in profile.notes[0] and like in profile.notes[0]


def test_a_device_without_a_profile_gets_the_default_and_says_so() -> None:
    profile = device_profile("mi250x-like")
    assert profile.name == "default"
    assert "'mi250x-like'" in profile.assumptions()[0] and "autopar calibrate" in profile.assumptions()[0]
    assert not any("no profile" in sentence for sentence in device_profile("a100-40gb").assumptions())


def test_all_problems_of_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    wrong = deepcopy(content())
    wrong["launch_ms"] = wrong.pop("launch_us")
    wrong["memory_efficiency"]["value"] = True
    wrong["efficiency"]["bfloat16"]["value"] = float("nan")
    wrong["efficiency"]["bf16"] = {"value": 0.5, "source": "a misspelt dtype"}
    wrong["tile"]["m"]["value"] = "128"
    wrong["overlap_slowdown"]["value"] = 0.5
    wrong["links"]["in_host"]["call_us"] = {"value": -1, "source": "negative"}
    del wrong["reserve_gb"]["source"]
    from ruamel.yaml import YAML

    with path.open("w") as file:
        YAML(typ="safe", pure=True).dump(wrong, file)
    with pytest.raises(ClusterError) as caught:
        load_profile(path)
    paths = {problem.path for problem in caught.value.problems}
    wrong = "launch_us launch_ms memory_efficiency.value efficiency.bfloat16.value efficiency.bf16 tile.m.value"
    assert paths == {*wrong.split(), "overlap_slowdown.value", "links.in_host.call_us.value", "reserve_gb.source"}
    message = str(caught.value)
    assert "did you mean 'launch_us'?" in message and "true and false are not numbers" in message


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("!!python/object/apply:os.system ['true']", "tags"),
        ("a: &x [1]\nb: *x", "anchors"),
        ("version: 1\nversion: 1", "duplicate key"),
        ("%YAML 1.1\n---\nversion: no", "must be YAML 1.2"),
        ("[" * 500, "levels of nesting"),
        ("\0\1\2", "NUL"),
        ("x" * 70_000, "at most 65536 bytes"),
        ("- 1", "must be a mapping"),
        ("", "must be a mapping"),
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=rule):
        load_profile(path)


def written(content: dict[str, Any], folder: Path) -> Path:
    path = folder / "device.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


def test_a_profile_needs_a_dtype_a_date_and_one_type_of_device(tmp_path: Path) -> None:
    wrong = content()
    wrong["efficiency"] = {}
    with pytest.raises(ClusterError, match="efficiency: needs at least one dtype"):
        load_profile(written(wrong, tmp_path))
    wrong = profile_to_dict(measured_profile())
    wrong["device"]["device_type"] = "cuda"
    with pytest.raises(ClusterError, match=r"device\.device_type"):
        load_profile(written(wrong, tmp_path))
    wrong = profile_to_dict(measured_profile())
    wrong["measured"]["date"] = "2026-13-41"
    with pytest.raises(ClusterError, match=r"measured\.date"):
        load_profile(written(wrong, tmp_path))


def test_nothing_is_written_where_it_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        dump_profile(measured_profile(), tmp_path / "missing" / "device.yaml")
    assert list(tmp_path.iterdir()) == []


def test_measured_figures_replace_those_of_the_device() -> None:
    profile, device = measured_profile(), ClusterSpec.preset("1xcpu").devices[0]
    applied = profile.applied_to(replace(device, memory_bytes=123))
    assert (applied.memory_bytes, applied.memory_bandwidth_bytes_per_s) == (123, 2e10)
    gpu = ClusterSpec.preset("1xh100").devices[0]
    assert device_profile("h100-sxm").applied_to(gpu) == gpu
    with pytest.raises(ClusterError, match="is of a cpu device"):
        profile.applied_to(gpu)


def test_age_and_other_versions_are_told() -> None:
    profile = measured_profile()
    assert any("400 days ago" in one for one in profile.assumptions(today=date(2027, 12, 26)))
    assert profile.measured is not None
    other = replace(profile, measured=replace(profile.measured, versions={"torch": "2.9.1"}))
    assert any("with torch 2.9.1" in one for one in other.assumptions(today=date(2026, 11, 22)))
    build = f"{metadata.version('torch').partition('+')[0]}+cu999"  # another build of the torch that is installed
    own = replace(profile, measured=replace(profile.measured, versions={"torch": build}))
    assert not any("with torch" in one for one in own.assumptions(today=date(2026, 11, 22)))


def test_what_was_not_measured_is_like_what_was() -> None:
    profile = measured_profile()
    assert profile.efficiency_of("float32") == profile.efficiency["float32"]
    assert profile.efficiency_of("tf32") == profile.efficiency["float32"]
    assert profile.efficiency_of("float8") == min(profile.efficiency.values())
    assert profile.link("in_host").of("all_reduce").efficiency == 0.5
    assert profile.link("inter_host").of("all_gather").efficiency == 0.9
    assert profile.link("spine").link is None


sizes = st.integers(1, 8192)


@settings(max_examples=200, deadline=None)
@given(m=sizes, n=sizes, k=sizes, count=st.integers(1, 64), scale=st.integers(1, 4))
def test_the_part_that_tiling_leaves(m: int, n: int, k: int, count: int, scale: int) -> None:
    tile = Tile(m=128, n=64, k_half=200, units=108)
    part = float(tile_part(tile, m, n, k, count))
    assert 0 < part < 1
    assert float(tile_part(tile, m, n, k * scale, count)) >= part
    assert float(tile_part(tile, m, n, k, count * scale)) >= part
    waves = m * n * count  # of full tiles; a quarter of one is lost
    whole = float(tile_part(tile, 128 * m, 64 * n, k, 108 * count))
    assert whole == pytest.approx(waves / (waves + 0.25) * k / (k + 200))
    alone = float(tile_part(replace(tile, units=1), 128 * m, 64 * n, k, count))  # one unit has no waves
    assert alone == pytest.approx(k / (k + 200))
    several = tile_part(tile, np.array([m, n]), np.array([n, m]), k, count)
    assert several.shape == (2,) and several[0] == pytest.approx(part)


def test_a_product_takes_the_longer_of_computing_and_moving() -> None:
    times = matmul_seconds(
        flops=[1e9, 1e3], moved_bytes=[1e3, 1e9], part=0.5, peak_flops_per_s=1e9, bytes_per_s=1e9, launch_s=0.25
    )
    assert times.tolist() == [2.25, 1.25]


def test_attention_goes_backward_with_five_products_for_two() -> None:
    """Dao 2023, "FlashAttention-2", section 3.1.2: the scores are computed again, and four gradients follow."""
    equal = AttentionEfficiency(products=0.5, forward=0.5, backward=0.5, length_half=1e-9)
    forward, backward = (
        attention_seconds(
            flops=2e9, keys=1024, attention=equal, peak_flops_per_s=1e9, launch_s=0.0, is_backward=is_backward
        )
        for is_backward in (False, True)
    )
    assert float(backward / forward) == pytest.approx(5 / 2)


def test_devices_keep_their_own_figures() -> None:
    device = Device(
        name="x", device_type="cuda", peak_flops_per_s={"float32": 1e12}, memory_bytes=1, memory_bandwidth_bytes_per_s=1
    )
    assert device_profile("x").applied_to(device) == device


def test_profiles_do_not_wait_for_torch() -> None:
    program = "import sys; from autopar.cost_model.machine.presets import device_profile; device_profile('h100-sxm'); "
    program += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
