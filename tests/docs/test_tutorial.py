"""Every command of docs/tutorial.md runs in order, and prints the lines that the page shows, but for numbers."""

import re
import shlex
from pathlib import Path

import forked
import pytest
from typer.testing import CliRunner

from autopar.cli.app import app_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
LEFT_OUT = "..."
NUMBER = re.compile(r"\b\w+(?:\.\w+)+\b|[\d.,]+(?:e[-+]\d+)?|\b(?:µs|ms|s)\b")  # also the names of tensors


def files(page: str) -> dict[str, str]:
    """The Python files that the page says to save: their first line names them."""
    blocks = re.findall(r"```python\n(# (\w+\.py).*?\n.*?)```", page, re.DOTALL)
    return {name: text for text, name in blocks}


def commands(page: str) -> list[tuple[str, list[str]]]:
    """The command lines of the page in order, each with the output that the page shows."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def shape(line: str) -> str:
    """A line without its numbers, units of time and spacing, which differ between machines."""
    return " ".join(NUMBER.sub("#", line).split())


def run(line: str, folder: Path) -> str:
    """What a command of the page prints in a folder."""
    program, *arguments = shlex.split(line)
    if program == "torchrun":
        assert arguments[:2] == ["--standalone", "--nproc-per-node"], line
        return forked.run(folder / arguments[3], arguments[4:], folder, int(arguments[2]))
    assert program == "autopar", line
    result = CliRunner().invoke(app_of(), arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, f"{line}\n{result.output}"
    return result.output


def test_every_command_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text()
    for name, text in files(page).items():
        (tmp_path / name).write_text(text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.py", "train.py"]
    monkeypatch.chdir(tmp_path)
    done = []
    for line, shown in commands(page):
        if line.startswith("pip "):
            continue
        printed = [shape(printed) for printed in run(line, tmp_path).splitlines()]
        missing = [text for text in shown if text != LEFT_OUT and shape(text) not in printed]
        assert not missing, f"{line} no longer prints\n" + "\n".join(missing) + "\nbut\n" + "\n".join(printed)
        done.append(shlex.split(line)[1] if line.startswith("autopar") else "torchrun")
    assert done == ["--version", "plan", "plan", "estimate", "verify", "torchrun", "trace"]
    assert {"plan.json", "trace.json"} <= {path.name for path in tmp_path.iterdir()}
