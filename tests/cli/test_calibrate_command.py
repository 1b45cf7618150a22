"""`autopar calibrate`: measures, fits, prints, and writes a file that is a profile."""

import json
from pathlib import Path

import pytest
from run import autopar, refused

from autopar.cost_model.machine.profile_io import load_profile
from autopar.ir.cluster import ClusterSpec

THREE_SECONDS = ("--minutes", "0.05")


def calibrate(*options: str) -> str:
    result = autopar("calibrate", *THREE_SECONDS, *options)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_ranks_are_measured_and_the_profile_is_written(tmp_path: Path) -> None:
    path = tmp_path / "device.yaml"
    shown = calibrate("--ranks", "2", "--out", str(path))
    assert f"written to {path}" in shown and "median error" in shown and "gloo, 2 ranks at once" in shown
    for row in ("products float32", "attention forward", "memory", "launch", "in_host all_reduce", "overlap slowdown"):
        assert row in shown
    profile = load_profile(path)
    assert profile.measured is not None and profile.measured.ranks == 2
    assert set(profile.measured.versions) >= {"autopar", "torch", "python"}
    assert {"memory", "matmul", "attention", "in_host.all_reduce"} <= set(profile.fit)
    link = profile.links["in_host"]
    assert link.link is not None and link.kinds.keys() >= {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert profile.applied_to(ClusterSpec.preset("2xcpu").devices[0]).peak("float32") > 1e8
    guessed = [path for path, source in profile.sources.items() if not source.startswith("measured 20")]
    assert all("inter_host" in path for path in guessed), guessed
    assert not any("measured with torch" in sentence for sentence in profile.assumptions())
    assert [file.name for file in tmp_path.iterdir()] == ["device.yaml"]


@pytest.mark.long
def test_one_process_as_json() -> None:
    found = json.loads(calibrate("--json"))
    assert found.keys() == {"profile", "fit", "samples", "num_skipped", "spread"}
    assert found["profile"]["device"]["device_type"] in ("cpu", "cuda")
    assert found["profile"]["measured"]["ranks"] == 1
    assert all(sample["seconds"] > 0 for sample in found["samples"])
    assert {sample["work"]["part"] for sample in found["samples"]} >= {"matmul", "attention", "memory", "launch"}


def test_bad_options_are_told_at_once_and_nothing_is_measured(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "device.yaml"
    message = refused("calibrate", "--ranks", "65", "--minutes", "-1", "--out", str(missing))
    assert all(text in message for text in ("--ranks: must be from 1 to 64", "--minutes: must be above 0", "--out"))
    assert "folder that exists" in refused("calibrate", "--out", str(tmp_path))


def test_ranks_of_torchrun_are_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "under torchrun" in refused("calibrate", "--ranks", "2")
