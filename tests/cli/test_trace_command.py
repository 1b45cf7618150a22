"""`autopar trace`: ranks are started, the trace is written, and the table lists its tracks."""

import json
from pathlib import Path

import pytest
from run import autopar, json_of, refused

from autopar.cost_model.machine.profile_io import load_profile

pytest.importorskip("transformers")

RECOMPUTED = ("--recompute", "full", "--recompute-blocks", "1,0")


def test_trace_writes_a_file_and_says_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    sizes = ("--pp", "2", "--micro-batches", "2", "--hidden", "32", "--seq-len", "8")
    options = (*sizes, *RECOMPUTED, "--out", str(path))
    result = autopar("trace", "gpt2", "-n", "2", *options)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"written to {path}" in result.stdout and "rank 1: pp 1 dp 0 tp 0" in result.stdout
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["name"]) for e in events if e["ph"] == "X" and "call" not in e["args"]}
    assert {(stage, f"{stage}{kind}{m}") for stage in (0, 1) for kind in "FB" for m in (0, 1)} <= names
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    _beside_an_estimate(path)


def _beside_an_estimate(path: Path) -> None:
    """The same plan priced: every term has both sides, and the corrected profile is one."""
    target = path.with_name("corrected.yaml")
    sizes = ("--layers", "2", "--hidden", "32", "--seq-len", "8", "--pp", "2", "--micro-batches", "2")
    priced = ("estimate", "gpt2", "-c", "2xcpu", *sizes, "--trace", str(path))
    plan = (*priced, *RECOMPUTED)
    data = json_of(*plan, "--correct", str(target))["trace"]
    assert {"compute", "point-to-point", "idle"} <= {term["name"] for term in data["terms"]}
    assert sum(term["measured_s"] for term in data["terms"]) == pytest.approx(data["measured_s"])
    profile = load_profile(target)
    assert profile.name == "cpu-corrected" and data["corrected"] == str(target)
    assert any("scaled for" in source for source in profile.sources.values())
    shown = autopar(*plan, "--profile", str(target))
    assert shown.exit_code == 0, shown.output
    assert "beside trace.json" in shown.stdout and "the optimizer is no part of a trace" in shown.stdout
    assert "recompute: in the trace; none was estimated; got 'full'" in refused(*priced)
    message = refused(*priced, "--recompute", "full", "--recompute-blocks", "0,1")
    assert "recompute_blocks: in the trace; (0, 1) was estimated; got (1, 0)" in message


def test_plan_options_are_checked_before_ranks_start() -> None:
    assert "tp: must divide the 4 ranks" in refused("trace", "gpt2", "-n", "4", "--tp", "3")
    assert "no plan file missing.json" in refused("trace", "gpt2", "-n", "4", "--plan", "missing.json")
