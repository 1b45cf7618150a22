"""The command line in an environment of its own: `.ci/run` runs this file with the newest and the lowest dependencies.

The model's module prints at import, from Python and past it, so that what a package prints is in no JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from written_runs import end, line, start, write

from autopar.cli.app import COMMANDS, app_of
from autopar.ir.plan import Plan

pytestmark = pytest.mark.long

MODEL = """
import atexit, os, torch
from torch import nn

print("from python")
os.write(1, b"past python\\n")
atexit.register(print, "at the end")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"loss": x.pow(2).mean()}

def factory():
    return Model(), {"x": torch.randn(8, 32)}
"""
OWN = "printing:factory"
PUBLISHED = Path(__file__).resolve().parents[1] / "benchmarks" / "data" / "published_runs.csv"
LINES: dict[str, tuple[str, ...]] = {
    "models": (),
    "clusters": (),
    "capacity": ("h100",),
    "plan": (OWN, "-c", "2xcpu"),
    "estimate": (OWN, "-c", "2xcpu", "--tp", "2"),
    "coverage": (OWN, "-c", "2xcpu"),
    "verify": (OWN, "-n", "2", "--tp", "2", "--steps", "2"),
    "trace": (OWN, "-n", "2", "--pp", "2"),
    "tune": (OWN, "-c", "2xcpu", "--trials", "1", "--no-calibrate"),
    "doctor": ("--ranks", "2"),
    "calibrate": ("--minutes", "0.05"),
    "validate": ("runs.csv",),
    "status": ("run",),
    "checkpoint": ("saved",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smoke")
    (path / "printing.py").write_text(MODEL)
    (path / "runs.csv").write_text("".join(PUBLISHED.read_text(encoding="utf-8").splitlines(keepends=True)[:3]))
    (path / "saved").mkdir()
    write(path / "run", [start(), line(0), end()])
    return path


def output(folder: Path, *arguments: str) -> str:
    """What a command prints to stdout, as a process of its own with an empty cache."""
    environment = os.environ | {"AUTOPAR_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "autopar", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if OWN in arguments:
        assert {"from python", "past python", "at the end"} <= set(done.stderr.splitlines())
    assert "HiGHS" not in done.stderr  # newer releases print a banner
    return done.stdout


@pytest.mark.parametrize("name", LINES)
def test_json_is_one_document(name: str, folder: Path) -> None:
    found: Any = json.loads(output(folder, name, *LINES[name], "--json"))
    assert isinstance(found, (dict, list))
    assert found or name == "checkpoint"


def test_no_command_with_json_is_left_out() -> None:
    commands = get_command(app_of()).commands  # type: ignore[attr-defined]
    with_json = {name for name in COMMANDS if any("--json" in option.opts for option in commands[name].params)}
    assert set(LINES) == with_json


@pytest.mark.parametrize(
    "asked",
    [
        (OWN, "-c", "4xcpu", "--global-batch", "16"),
        ("gpt2", "-c", "8xh100", "--global-batch", "48"),
        ("mixtral-8x7b", "-c", "16xh100", "--layers", "2", "--global-batch", "32"),
    ],
    ids=["own", "gpt2", "mixtral"],
)
def test_a_plan_is_written_and_read(asked: tuple[str, ...], folder: Path) -> None:
    text = output(folder, "plan", *asked, "--out", "plan.json")
    assert "written to plan.json" in text
    assert Plan.load(folder / "plan.json").degrees.world_size == int(asked[2].partition("x")[0])


@pytest.mark.parametrize(
    "asked",
    [
        (OWN, "-n", "2", "--zero", "3"),
        ("gpt2", "-n", "4", "--pp", "2", "--tp", "2", "--micro-batches", "2"),
    ],
    ids=["zero", "pipeline"],
)
def test_a_plan_equals_one_device(asked: tuple[str, ...], folder: Path) -> None:
    assert "passed" in output(folder, "verify", *asked, "--steps", "2")
