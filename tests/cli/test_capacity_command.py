"""`autopar capacity`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli.app import app_of


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app_of(), ["capacity", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_table() -> None:
    code, out, _ = run("h100-sxm", "--devices", "8,1")
    assert code == 0
    lines = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [line[0] for line in lines] == ["1", "8"]
    assert "ZeRO-3" in out


def test_json() -> None:
    code, out, _ = run("a100-80gb", "--devices", "8", "--engine", "megatron", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["engine"] == "megatron"
    assert {one["way"] for one in found["largest"]} == {"DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "best plan"}


def test_without_torch() -> None:
    program = (
        "import sys; from autopar.cli import main; sys.argv = ['autopar', 'capacity', 'h100-sxm', '--devices', '8']\n"
    )
    program += "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "AssertionError" not in done.stderr
    assert "best plan" in done.stdout


def test_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, _, error = run("h100-sxm", "--devices", "1,8,64", "--chart", str(tmp_path / "capacity.svg"))
    assert code == 0, error
    assert (tmp_path / "capacity.svg").read_text().count("<use") >= 5 * 3  # a mark for every way and count


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["h1000"], "h100"),
        (["h100-sxm", "--devices", "1,x"], "whole numbers"),
        (["h100-sxm", "--devices", "0"], "must be from 1"),
        (["h100-sxm", "--engine", "megatrn"], "megatron"),
        (["h100-sxm", "--chart", "chart.txt"], "must end in .svg"),
    ],
)
def test_bad_input(arguments: list[str], said: str) -> None:
    code, out, error = run(*arguments)
    assert (code, out) == (2, "")
    assert said in error
    assert "Traceback" not in error
