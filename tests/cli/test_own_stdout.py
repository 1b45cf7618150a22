"""Only the command writes to stdout; what models and libraries print goes to stderr."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from suites import long
from typer.testing import CliRunner

from autopar.cli.command import register
from autopar.cli.output import console, print_json

PRINTING = """
import atexit, ctypes, os
from torch import nn
import torch

print("from python")
os.write(1, b"past python\\n")
ctypes.CDLL(None).printf(b"kept in the buffer of C until the end\\n")
atexit.register(print, "at the end")

def factory():
    print("while it is built")
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, (torch.zeros(4, 16), torch.zeros(4, 4)), nn.functional.mse_loss
"""


@pytest.mark.parametrize("shape", [("--json",), long(())], ids=["json", "text"])
def test_a_printing_model(shape: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "printing.py").write_text(PRINTING)
    command = [sys.executable, "-m", "autopar", "estimate", "printing:factory", "-c", "2xcpu", "--tp", "2", *shape]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    others = {"from python", "past python", "while it is built", "at the end"}
    assert others <= set(done.stderr.splitlines())
    assert not others & set(done.stdout.splitlines()) and "of C" not in done.stdout
    if shape:
        assert json.loads(done.stdout)["step_s"] > 0
    else:
        assert "step" in done.stdout


def chatty(text: Annotated[str, typer.Argument()] = "mine") -> None:
    """Print as a library does, and then the result."""
    print("from a library")
    sys.stdout.write("more of it\n")
    print_json({"text": text})
    console().print("a table")


def test_every_command_has_it() -> None:
    """In this process too, where stdout is no file."""
    app = typer.Typer()
    register(app, chatty)
    found = CliRunner().invoke(app, ["ours"])
    assert (found.exit_code, found.stdout) == (0, '{\n "text": "ours"\n}\na table\n')
    assert found.stderr == "from a library\nmore of it\n"


def test_stdout_is_as_before_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()
    register(app, chatty)
    CliRunner().invoke(app, [])
    console().print("later")
    print("and plain")
    assert capsys.readouterr() == ("later\nand plain\n", "")
