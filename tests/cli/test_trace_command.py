"""`autopar trace`: ranks are started, the trace is written, the table says what is on it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from run import refused

pytest.importorskip("transformers")


@pytest.mark.timeout(300)
def test_trace_writes_a_file_and_says_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = ("--pp", "2", "--micro-batches", "2", "--hidden", "32", "--seq-len", "8", "--out", str(path))
    command = [sys.executable, "-m", "autopar", "trace", "gpt2", "-n", "2", *options]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"written to {path}" in result.stdout and "rank 1: pp 1 dp 0 tp 0" in result.stdout
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["name"]) for e in events if e["ph"] == "X" and "call" not in e["args"]}
    assert {(stage, f"{stage}{kind}{m}") for stage in (0, 1) for kind in "FB" for m in (0, 1)} <= names
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_plan_options_are_checked_before_ranks_start() -> None:
    assert "tp: must divide the 4 ranks" in refused("trace", "gpt2", "-n", "4", "--tp", "3")
    assert "no plan file missing.json" in refused("trace", "gpt2", "-n", "4", "--plan", "missing.json")
