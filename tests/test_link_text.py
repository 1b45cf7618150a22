"""Bandwidths of links from their texts: all texts of the collection, spellings of one figure, texts without meaning."""

import csv
import importlib
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autopar.cost_model.published.row import read_rows

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "benchmarks" / "data" / "published_runs.csv"
sys.path.append(str(ROOT / "tools"))
link_text = importlib.import_module("link_text")
read_link = link_text.read_link

# Text of `inter_link`, devices of a host, rows, and GB/s of one device as they were read by eye.
BETWEEN_HOSTS = [
    (None, None, 1, None),
    (None, 8, 108, None),
    ("single node", 8, 65, None),
    ("OCI RDMA (RoCE)", 8, 2, None),
    ("400Gb/s per node", 8, 4, 6.25),
    ("800Gb/s per node", 8, 4, 12.5),
    ("4x 100Gb/s RoCE per node", 8, 54, 6.25),
    ("4x Omni-Path 100Gb/s per node", 8, 113, 6.25),
    ("4x HDR InfiniBand (ConnectX-6) per node", 8, 1, 12.5),
    ("Omni-Path 100Gb/s (Jean Zay V100 partition)", 4, 27, 12.5),
    ("simulator config: 800Gb/s per node", 8, 109, 12.5),
    ("8x HDR InfiniBand 200Gb/s per node", 8, 22, 25.0),
    ("RoCE 1600Gb/s per node", 8, 139, 25.0),
    ("8x NDR InfiniBand 400Gb/s per node", 8, 15, 50.0),
    ("RDMA 400Gb/s per GPU", 8, 33, 50.0),
    ("RDMA CX-7 400Gb/s per GPU", 8, 2, 50.0),
    ("NDR InfiniBand 400Gb/s per GPU (standard DGX H100 spec)", 8, 145, 50.0),
    ("NDR InfiniBand 400Gb/s per GPU (standard DGX B200 spec)", 8, 1, 50.0),
    ("NVIDIA GB200 NVL72 reference architecture (400Gb/s per GPU std)", 4, 33, 50.0),
]
# Text of `intra_link`, rows, and the GB/s of one device that it states.
INSIDE_A_HOST = [
    (None, 235, None),
    ("NVLink", 2, None),
    ("NVLink2", 27, None),
    ("NVLink (SXM)", 5, None),
    ("NVLink (A100-SXM4)", 54, None),
    ("NVLink (Grand Teton)", 33, None),
    ("NVLink (8 GPU per node)", 113, None),
    ("NVSwitch", 1, None),
    ("Infinity Fabric", 5, None),
    ("NVSwitch (simulator config: 150GB/s)", 169, 150.0),
    ("NVLink (A800 400GB/s)", 16, 400.0),
    ("NVLink3 600GB/s + NVSwitch (DGX A100)", 22, 600.0),
    ("NVLink4 900GB/s + NVSwitch", 17, 900.0),
    ("NVLink4 900GB/s (standard DGX H100 spec)", 145, 900.0),
    ("NVLink5 1800GB/s (NVL72 domain)", 33, 1800.0),
    ("NVLink5 1800GB/s (standard DGX B200 spec)", 1, 1800.0),
]


def gigabytes(text: str | None, devices_per_host: float) -> float | None:
    found: float | None = read_link(text, devices_per_host).bytes_per_s
    return None if found is None else found / 1e9


def test_every_text_of_the_collection() -> None:
    rows = read_rows(RUNS)
    between = Counter((row.inter_link, row.gpus_per_node, row.inter_gb_per_s) for row in rows)
    assert between == Counter({(text, devices, read): count for text, devices, count, read in BETWEEN_HOSTS})
    assert [gigabytes(text, devices or 8) for text, devices, _, _ in BETWEEN_HOSTS] == [one[3] for one in BETWEEN_HOSTS]
    inside = Counter(row.intra_link for row in rows)
    assert inside == Counter({text: count for text, count, _ in INSIDE_A_HOST})
    assert [gigabytes(text, 1) for text, _, _ in INSIDE_A_HOST] == [one[2] for one in INSIDE_A_HOST]


def test_one_text_of_the_collection_does_not_say_of_what() -> None:
    texts = {(text, devices) for text, devices, _, _ in BETWEEN_HOSTS}
    unclear = [text for text, devices in texts if read_link(text, devices or 8).warning]
    assert unclear == ["Omni-Path 100Gb/s (Jean Zay V100 partition)"]


@given(gbit=st.sampled_from([25, 56, 100, 200, 400, 800]), ports=st.integers(2, 16), devices=st.sampled_from([4, 8]))
def test_spellings_of_one_figure(gbit: int, ports: int, devices: int) -> None:
    total, gbyte = gbit * ports, f"{gbit / 8:g}"
    spellings = [
        f"{ports}x {gbit}Gb/s per node",
        f"{ports}x{gbyte}GB/s",
        f"{ports} x {gbit} Gbps InfiniBand per host",
        f"{ports}×{gbit} Gbit/s",
        f"{ports} NICs of {gbit}G per server",
        f"{ports}x {gbit}GbE/node",
        f"{gbit} gigabits per second per NIC, {ports} NICs per node",
        f"{gbit} Gb/s x{ports}",
        f"EFA {total:,} Gbps per instance",
        f"{total / 1000} Tb/s per node",
        f"{total / 8:g} GB/s per host",
        f"{total / 8 / devices!r} GB/s per GPU",
        f"RoCEv2 {total / devices!r} Gb/s/GPU",
        f"per node: {ports}x {gbyte} GB/s ({gbit} Gb/s)",
        f"{devices} GPUs per node, ConnectX-7, {ports}x {gbit}Gb/s",
        f"each node has {ports}x {gbit} Gb/s (PCIe 5.0 x16)",
        f"{total / 4 / devices!r} GB/s bidirectional per device",
    ]
    for text in spellings:
        found = read_link(text, devices)
        assert found.bytes_per_s == pytest.approx(total * 1e9 / 8 / devices), text
        assert found.warning is None, text


@pytest.mark.parametrize(
    ("text", "per_device"),
    [
        ("NDR 400 x8", 50),
        ("8x NDR", 50),
        ("8 NDR ports per node", 50),
        ("8x NDR 400 (one per GPU)", 50),
        ("one 800Gb/s NIC per 2 GPUs", 50),
        ("dual 200 Gb/s HDR per GPU", 50),
        ("3.2 Tb/s per node (8x 400Gb/s)", 50),
        ("400 Gb/s (50 GB/s) per GPU", 50),
        ("400 Gb/s per direction per GPU", 50),
        ("4x HDR100 per node", 6.25),
        ("2x 200 HDR per node", 6.25),
        ("46.566 GiB/s per GPU", 50),
        ("8x XDR per node", 100),
        ("InfiniBand 800 Gb/s per node (4x HDR)", 12.5),
        ("800 Gb/s per node, HDR x4", 12.5),
        ("3.2Tb/s per node, NDR", 50),
        ("8x 400 Gb/s NDR InfiniBand (1:1)", 50),
        ("InfiniBand: 2 x 100 Gb/s EDR rails", 3.125),
        ("64 nodes, 8x 200Gb/s per node", 25),
    ],
)
def test_ports_counts_and_generations(text: str, per_device: float) -> None:
    assert gigabytes(text, 8) == pytest.approx(per_device, rel=1e-4)
    assert read_link(text, 8).warning is None


@pytest.mark.parametrize("text", [None, "", "single node", "RoCE", "ConnectX-7", "NVLink 4", "8 GPUs per node", "A100"])
def test_texts_without_a_figure(text: str | None) -> None:
    assert read_link(text, 8) == read_link(None, 8)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RDMA 400", "cannot be read"),
        ("8x 400 GBPS", "cannot be read"),  # the letter's case was lost
        ("8x 50GB", "cannot be read"),
        ("8x InfiniBand", "cannot be read"),
        ("0 Gb/s per node", "cannot be read"),
        ("400Gb/s per 0 GPUs", "cannot be read"),
        ("8 ports per 0 nodes, 400Gb/s", "cannot be read"),
        ("0x 400Gb/s", "cannot be read"),
        (f"{'9' * 350}Gb/s per node", "cannot be read"),
        ("400Gb/s per rack", "no port, device or host"),
        ("100Gb/s and 200Gb/s", "contradict each other"),
        ("2x 4x 100Gb/s per node", "cannot be read"),
        ("8x 400Gb/s " * 100, "longer than 400 characters"),
    ],
)
def test_a_figure_without_meaning_is_a_warning(text: str, says: str) -> None:
    found = read_link(text, 8)
    assert found.bytes_per_s is None
    assert says in (found.warning or "")


@pytest.mark.parametrize("text", ["400 Gbps", "InfiniBand NDR", "EFA 3200 Gbps"])
def test_a_figure_of_nothing_is_of_a_port_or_a_host_with_a_warning(text: str) -> None:
    found = read_link(text, 8)
    assert found.bytes_per_s == 50e9
    assert found.warning == "does not say per port, device or host; read as 50 GB/s per device"


@given(st.text(alphabet="1248 0.,xX×/()-GTMgbBps" + "perGPUnodeNDRHDRNICeach", max_size=60))
@example("1x0 per 0 GPU/node 0 Gb/s x0")
def test_no_text_ends_in_an_exception(text: str) -> None:
    found = read_link(text, 8)
    assert found.bytes_per_s is None or 0 < found.bytes_per_s < float("inf")


def test_a_file_gets_the_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The column of the collection is what the tool writes."""
    rows = list(csv.DictReader(RUNS.open(newline="")))
    written = ("inter_gb_per_s", "engine", "pointwise", "dispatch", "tensor_overlap", "family", "shard_ranks")
    with (tmp_path / "old.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in rows[0] if name not in written], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "old.csv"), "--out", str(tmp_path / "new.csv")])
    importlib.import_module("published_columns").main()
    assert (tmp_path / "new.csv").read_text() == RUNS.read_text()
    assert "'Omni-Path 100Gb/s (Jean Zay V100 partition)' does not say" in capsys.readouterr().out


def test_the_documentation_reads_these_texts() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    lines = page.partition("read as, GB/s per device |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert len(lines) == 4
    for line in lines:
        texts, result = line.strip("|").split("|")
        expected = float(result.partition(",")[0]) if result.strip()[0].isdigit() else None
        for text in re.findall("`([^`]+)`", texts):
            found = read_link(text, 8)
            assert (found.bytes_per_s and found.bytes_per_s / 1e9) == expected, text
            assert (found.warning is not None) == ("with a warning" in result), text
