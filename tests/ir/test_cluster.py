import json
import math
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
from work import lines_run

from autopar.errors import ClusterError
from autopar.files.strict_yaml import MAX_BYTES
from autopar.ir.cluster import ClusterSpec, ClusterWarning, Device, HostGroup, Link
from autopar.ir.device_presets import device_names, device_presets

GOOD = """
name: two kinds
groups:
  - num_hosts: 2
    devices_per_host: 8
    device: h100
    price_usd_per_device_hour: 2.5
  - num_hosts: 2
    devices_per_host: 4
    device:
      name: homemade
      peak_tflops: {float32: 20, bfloat16: 1e2}
      memory_gb: 24
      memory_bandwidth_gb_per_s: 900
      power_w: 300
    in_host: {bandwidth_gb_per_s: 25, latency_us: 5}
    price_usd_per_device_hour: 1
inter_host: {bandwidth_gb_per_s: 12.5, latency_us: 14, name: RoCE}
spine: {bandwidth_gb_per_s: 6.25, latency_us: 20, hosts_per_leaf: 2}
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "cluster.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def paths_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.load(write(folder, text))
    return [problem.path for problem in caught.value.problems]


def test_import_is_light() -> None:
    code = "import sys; import autopar.ir.cluster as c; c.ClusterSpec.preset('8xh100'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("text", "num_hosts", "per_host", "backend"),
    [
        ("4xcpu", 1, 4, "gloo"),
        ("8xh100", 1, 8, "nccl"),
        ("64xA100-80GB", 8, 8, "nccl"),
        ("144xgb200", 2, 72, "nccl"),
        ("2048xh800", 256, 8, "nccl"),
        ("16xH20", 2, 8, "nccl"),
    ],
)
def test_preset(text: str, num_hosts: int, per_host: int, backend: str) -> None:
    cluster = ClusterSpec.preset(text)
    assert (cluster.num_hosts, cluster.num_devices) == (num_hosts, num_hosts * per_host)
    assert (cluster.backend, cluster.device_type) == (backend, "cpu" if backend == "gloo" else "cuda")
    assert (cluster.inter_host is None) == (num_hosts == 1)
    assert not cluster.is_heterogeneous


def test_preset_figures_are_si() -> None:
    cluster = ClusterSpec.preset("16xh100")
    device = cluster.devices[0]
    assert device.peak("bfloat16") == 989.4e12
    assert (device.memory_bytes, device.memory_bandwidth_bytes_per_s) == (84_940_000_000, 3.35e12)
    assert cluster.groups[0].in_host == Link(bytes_per_s=450e9, latency_s=3.4e-6, name="NVLink 4")
    assert cluster.link(0, 7) == cluster.groups[0].in_host
    assert cluster.link(7, 8) == cluster.inter_host
    assert cluster.power_w == 16 * 700


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("8xh10", "did you mean 'h100'"),
        ("h100", "did you mean '8xh100'"),
        ("12xh100", "use 8 or 16"),
        ("0xh100", "from 1 to"),
        ("99999999xh100", "from 1 to"),
        ("8xh100; rm", "<n>x<device>"),
        ("", "<n>x<device>"),
    ],
)
def test_bad_preset_says_what_would_be_right(text: str, hint: str) -> None:
    with pytest.raises(ClusterError, match=hint.replace("(", r"\(")):
        ClusterSpec.parse(text)


def test_assumed_figures_are_listed() -> None:
    assert ClusterSpec.preset("8xmi300x").assumptions == ()  # its network is assumed, but one host has none
    assert any("inter_host.bandwidth" in text for text in ClusterSpec.preset("16xmi300x").assumptions)
    assert ClusterSpec.preset("4xcpu").assumptions


@pytest.mark.parametrize("name", device_names())
def test_round_trip_of_every_preset(name: str, tmp_path: Path) -> None:
    cluster = ClusterSpec.preset(f"576x{name}")
    assert ClusterSpec.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    cluster.dump(tmp_path / "c.yaml")
    loaded = ClusterSpec.load(tmp_path / "c.yaml")
    assert loaded == cluster and hash(loaded) == hash(cluster)
    assert sorted(os.listdir(tmp_path)) == ["c.yaml"]


def test_file_with_two_groups_and_a_spine(tmp_path: Path) -> None:
    cluster = ClusterSpec.load(write(tmp_path, GOOD))
    assert cluster.is_heterogeneous
    assert (cluster.num_hosts, cluster.num_devices, cluster.hosts_per_leaf) == (4, 24, 2)
    assert [device.name for device in cluster.devices] == ["h100-sxm", "homemade"]
    assert cluster.devices[1].peak("bfloat16") == 100e12
    assert cluster.min_memory_bytes == 24e9
    assert cluster.price_usd_per_hour == 16 * 2.5 + 8
    assert [cluster.tier(0, rank) for rank in (7, 8, 16, 23)] == ["in_host", "inter_host", "spine", "spine"]
    assert cluster.tier(16, 20) == "inter_host"
    assert cluster.link(15, 16) == cluster.spine
    # the first group's link is the preset's, and said to be
    assert len(cluster.assumptions) == 1 and cluster.assumptions[0].startswith("groups[0].in_host is not given")
    cluster.dump(tmp_path / "again.yaml")
    assert ClusterSpec.load(tmp_path / "again.yaml") == cluster
    with pytest.raises(IndexError):
        cluster.place_of(24)
    with pytest.raises(ClusterError, match="float32"):
        cluster.devices[1].peak("float23")


def test_all_problems_at_once(tmp_path: Path) -> None:
    text = """
version: 1
groups:
  - num_hosts: true
    devices_per_host: 8.0
    device: h10
    in_hots: {bandwidth_gb_per_s: 1}
  - num_hosts: 1000000000000000000000000000000
    devices_per_host: 0
    device: {name: x, peak_tflops: {float32: .nan, bf16: 3}, memory_gb: .inf, memory_bandwidth_gb_per_s: 1e30}
    in_host: {bandwidth_gb_per_s: "1e9", latency_us: -2}
intr_host: {}
intr_host: {}
"""
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.load(write(tmp_path, text))
    found = {problem.path: problem for problem in caught.value.problems}
    device = "groups[1].device"
    assert set(found) == {
        "groups[0].num_hosts", "groups[0].devices_per_host", "groups[0].device", "groups[0].in_hots",
        "groups[1].num_hosts", "groups[1].devices_per_host", "groups[1].in_host.bandwidth_gb_per_s",
        "groups[1].in_host.latency_us", f"{device}.peak_tflops.float32", f"{device}.peak_tflops.bf16",
        f"{device}.memory_gb", f"{device}.memory_bandwidth_gb_per_s", "intr_host",
    }  # fmt: skip
    assert found["groups[0].device"].suggestion == "did you mean 'h100'?"
    assert found["groups[0].in_hots"].suggestion == "did you mean 'in_host'?"
    assert found[f"{device}.peak_tflops.bf16"].suggestion == "did you mean 'bfloat16'?"
    assert found["groups[1].in_host.bandwidth_gb_per_s"].suggestion == "write 1e9 without quotes"
    assert str(caught.value).count("\n") == len(caught.value.problems)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("groups: [{devices_per_host: 2, device: {name: x, peak_tflops: {float32: 1}, memory_gb: 1, "
         "memory_bandwidth_gb_per_s: 9}}]", "groups[0].in_host"),
        ("groups: [{num_hosts: 2, devices_per_host: 1, device: {name: x, peak_tflops: {float32: 1}, memory_gb: 1, "
         "memory_bandwidth_gb_per_s: 9}}]", "inter_host"),
        ("groups: [{devices_per_host: 1, device: h100}, {devices_per_host: 1, device: cpu}]", "groups"),
        ("groups: [{num_hosts: 2, devices_per_host: 1, device: h100}]\n"
         "spine: {bandwidth_gb_per_s: 1, latency_us: 1, hosts_per_leaf: 3}", "spine.hosts_per_leaf"),
        ("groups: []", "groups"),
        ("groups: [3]", "groups[0]"),
        ("version: 2\ngroups: [{devices_per_host: 1, device: h100}]", "version"),
        ("", ""),
        ("[1, 2]", ""),
    ],
)  # fmt: skip
def test_single_problems(tmp_path: Path, text: str, path: str) -> None:
    assert paths_of(tmp_path, text) == [path]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 60_000,
        '{"a":' * 12_000,
        "- " * 30_000,
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        "a: &a [*a]",
        "groups: [" + "1," * 32_000 + "]",
        "a: " + "9" * 60_000,
        "x" * 10_000_000,
        bytes(range(256)) * 100,
        b"groups: \0",
        "groups: !!python/object/apply:os.system [x]",
        "groups: []\n---\ngroups: []",
        "groups: {a: 1",
        "? [1, 2]\n: 3",
        "? {a: 1}\n: 3",
        "a: 2020-99-99",
        "\n".join(f"k{i}: 1" for i in range(4_900)),
    ],
    ids=lambda value: str(value[:12]),
)
def test_hostile_files_are_refused_with_work_that_grows_with_their_size(tmp_path: Path, text: str | bytes) -> None:
    path = write(tmp_path, text)
    ClusterSpec.preset("1xcpu")  # the presets' own reading is not counted

    def refused() -> None:
        with pytest.raises(ClusterError):
            ClusterSpec.load(path)

    assert lines_run(refused) < 20_000 + 250 * min(len(text), MAX_BYTES)


def test_a_profile_stays_with_its_cluster(tmp_path: Path) -> None:
    text = "groups: [{devices_per_host: 2, device: h100}]\nprofile: "
    assert ClusterSpec.load(write(tmp_path, text + "b200")).profile == "b200"
    (tmp_path / "device.yaml").touch()
    cluster = ClusterSpec.load(write(tmp_path, text + "./device.yaml"))
    assert cluster.profile is not None and Path(cluster.profile).samefile(tmp_path / "device.yaml")
    (tmp_path / "elsewhere").mkdir()
    cluster.dump(tmp_path / "elsewhere" / "again.yaml")
    assert ClusterSpec.load(tmp_path / "elsewhere" / "again.yaml") == cluster


@pytest.mark.parametrize("value", ["none.yaml", "3", "[h100]", "''", '"a\\0.yaml"', "x" * 900 + ".yaml", "h10", "./"])
def test_a_profile_that_is_not_there(tmp_path: Path, value: str) -> None:
    assert paths_of(tmp_path, f"groups: [{{devices_per_host: 2, device: h100}}]\nprofile: {value}") == ["profile"]


def test_things_that_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none.yaml", Path("/dev/zero")):
        with pytest.raises(ClusterError):
            ClusterSpec.load(path)


def test_implausible_values_warn_and_plausible_ones_do_not(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ClusterSpec.load(write(tmp_path, GOOD))
    text = GOOD.replace("memory_gb: 24", "memory_gb: 24000").replace("latency_us: 14", "latency_us: 0.001")
    with pytest.warns(ClusterWarning) as caught:
        ClusterSpec.load(write(tmp_path, text))
    sentences = [str(warning.message) for warning in caught]
    assert [sentence.split(" = ")[0] for sentence in sentences] == [
        "groups[1].device.memory_gb",
        "inter_host.latency_us",
    ]


def test_values_spelt_out_are_checked() -> None:
    link = Link(bytes_per_s=1e9, latency_s=1e-6)
    device = Device(
        name="x", device_type="cpu", peak_flops_per_s={"float32": 1e9}, memory_bytes=1, memory_bandwidth_bytes_per_s=1
    )
    assert hash(device) == hash(device)
    for bad in (math.nan, math.inf, 0, -1, True):
        with pytest.raises(ClusterError):
            Link(bytes_per_s=bad, latency_s=1)
        with pytest.raises(ClusterError):
            HostGroup(num_hosts=bad, devices_per_host=1, device=device, in_host=link)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="in_host"):
        ClusterSpec(name="x", groups=(HostGroup(num_hosts=1, devices_per_host=2, device=device, in_host=None),))
    group = HostGroup(num_hosts=2, devices_per_host=2, device=device, in_host=link)
    with pytest.raises(ClusterError, match="inter_host"):
        ClusterSpec(name="x", groups=(group,))
    with pytest.raises(ClusterError, match="at least one"):
        ClusterSpec(name="x", groups=())
    with pytest.raises(ClusterError, match="together"):
        ClusterSpec(name="x", groups=(group,), inter_host=link, spine=link)


# ---- detect ----


def pretend(monkeypatch: pytest.MonkeyPatch, names: list[str], memory_bytes: int = 0, **environment: int | str) -> None:
    import torch

    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    found = [types.SimpleNamespace(name=name, total_memory=memory_bytes) for name in names]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])


def test_detect_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, [], WORLD_SIZE=4, LOCAL_WORLD_SIZE=4)
    cluster = ClusterSpec.parse("detect")
    assert (cluster.num_hosts, cluster.num_devices, cluster.backend) == (1, 4, "gloo")
    assert cluster.assumptions
    pretend(monkeypatch, [])
    assert ClusterSpec.detect().num_devices == 1


def test_detect_known_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ["NVIDIA H200"] * 8, 150_000_000_000, WORLD_SIZE=16, LOCAL_WORLD_SIZE=8)
    cluster = ClusterSpec.detect()
    assert (cluster.num_hosts, cluster.num_devices, cluster.backend) == (2, 16, "nccl")
    assert cluster.min_memory_bytes == 150_000_000_000
    assert cluster.devices[0].peak("bfloat16") == 989.4e12
    assert any("hosts are assumed to be like this one" in text for text in cluster.assumptions)
    pretend(monkeypatch, ["NVIDIA H200"] * 8, 150_000_000_000)
    assert (ClusterSpec.detect().num_devices, ClusterSpec.detect().inter_host) == (8, None)


def test_detect_assumes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("total_memory_gb" in text for text in ClusterSpec.preset("8xh20").assumptions)
    pretend(monkeypatch, ["NVIDIA H20"] * 8, 101_000_000_000)
    assert not any("total_memory_gb" in text for text in ClusterSpec.detect().assumptions)


def test_detect_unknown_gpu_is_conservative_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ["NVIDIA H100 80GB HBM3 MIG 1g.10gb"], 10_000_000_000)
    cluster = ClusterSpec.detect()
    gpus = [preset for preset in device_presets().values() if preset.device_type == "cuda"]
    assert cluster.devices[0].peak("float32") == min(gpu.peak_tflops.float32.value for gpu in gpus) * 1e12
    assert "no preset describes" in cluster.assumptions[0]


@pytest.mark.parametrize(
    ("names", "environment", "message"),
    [
        (["NVIDIA H200", "NVIDIA L40S"], {}, "unlike GPUs"),
        (["NVIDIA H200"], {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}, "2 ranks on this host but torch sees 1"),
        ([], {"WORLD_SIZE": 5, "LOCAL_WORLD_SIZE": 2}, "multiple of LOCAL_WORLD_SIZE"),
        ([], {"WORLD_SIZE": "four", "LOCAL_WORLD_SIZE": 0}, "WORLD_SIZE: must be a whole number"),
    ],
)
def test_detect_refuses(
    monkeypatch: pytest.MonkeyPatch, names: list[str], environment: dict[str, int | str], message: str
) -> None:
    pretend(monkeypatch, names, 1_000_000_000, **environment)
    with pytest.raises(ClusterError, match=message):
        ClusterSpec.detect()


def test_the_documented_file_loads(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    cluster = ClusterSpec.load(write(tmp_path, text.split("```yaml\n")[1].split("```")[0]))
    assert (cluster.num_devices, cluster.hosts_per_leaf) == (40, 4)
