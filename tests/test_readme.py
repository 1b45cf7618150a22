"""Commands of README and docs work. Heavy commands (make, torchrun) have tests of their own."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli.app import app_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "examples/README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))

OURS = ("autopar", "benchmarks", "cost_model", "examples", "runtime", "search", "tests", "tools")


def shell_lines() -> list[str]:
    """Every line of the pages' shell blocks and every inline command, comments stripped."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        text = text.replace("\\\n", " ")  # a line that goes on in the next
        for kind, block in re.findall(r"```(sh|console)\n(.*?)```", text, re.DOTALL):
            lines = [line.strip() for line in block.splitlines()]
            typed = lines if kind == "sh" else [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            found += [line.partition(" #")[0].strip() for line in typed]
        found += re.findall(r"`((?:torchrun|autopar) [^`]+)`", text)
    return list(dict.fromkeys(line for line in found if line.startswith(("autopar ", "make ", "torchrun "))))


COMMANDS = shell_lines()


def test_there_are_commands() -> None:
    assert {"make demo", "make test"} <= set(COMMANDS)
    assert any(line.startswith("autopar plan llama3-8b") for line in COMMANDS)


@pytest.mark.parametrize("line", [line for line in COMMANDS if re.match(r"autopar [a-z]", line)])
def test_options_exist(line: str) -> None:
    """Every option of every command is one that the command has."""
    command, *arguments = shlex.split(line.partition(",")[0])[1:]
    shown = CliRunner().invoke(app_of(), [command, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, line
    for option in (argument for argument in arguments if argument.startswith("-")):
        assert option in shown.stdout, line


@pytest.mark.parametrize("line", [line for line in COMMANDS if line in ("autopar models", "autopar clusters")])
def test_listings_run(line: str) -> None:
    assert CliRunner().invoke(app_of(), shlex.split(line)[1:]).exit_code == 0


def test_the_refusal_in_the_docs_is_what_is_said() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    shown = re.search(r"```console\n\$ (.*?)\n(.*?)```", text, re.DOTALL)
    assert shown is not None
    result = CliRunner().invoke(app_of(), shlex.split(shown[1])[1:])
    assert (result.exit_code, result.stderr) == (2, shown[2])


def test_the_plan_command_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    line = next(line for line in COMMANDS if line.startswith("autopar plan llama3-8b"))
    arguments = shlex.split(line)[1:]
    arguments[arguments.index("plan.json")] = str(tmp_path / "plan.json")
    result = CliRunner().invoke(app_of(), [*arguments, "--layers", "2", "--seq-len", "64"])
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "plan.json").is_file()


def test_files_that_the_pages_name_exist() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text()
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page} names {target}"


def test_the_defaults_in_the_docs_are_the_code_s() -> None:
    from autopar.cli import verify as small_model
    from autopar.planning.degrees import DEFAULT_MICRO_BATCH

    text = " ".join((ROOT / "docs/cli.md").read_text().split())
    assert f"| {DEFAULT_MICRO_BATCH} | | `--accumulate`" in text
    assert f"{small_model.SMALL_LAYERS} layers of width {small_model.SMALL_HIDDEN}" in text
    assert f"sequences of {small_model.SMALL_SEQ_LEN} tokens" in text


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_modules_and_files_that_the_pages_name_exist(page: str) -> None:
    """Paths of source files, and dotted names of autopar in backticks and imports."""
    text = (ROOT / page).read_text()
    paths = {path for path in re.findall(r"`([a-z_]+/[a-z_\d/]+\.\w+)[`:]", text) if path.partition("/")[0] in OURS}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    names = set(re.findall(r"`(autopar(?:\.\w+)+)[`(]", text))
    for module, imported in re.findall(r"^\s*from (autopar[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
        names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    assert [name for name in sorted(names) if not _is_there(name)] == []


def _is_there(name: str) -> bool:
    """Whether a dotted name leads from autopar through its modules to something."""
    found: object = importlib.import_module("autopar")
    parts = name.split(".")
    for i, part in enumerate(parts[1:], start=1):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[: i + 1]))
            except ModuleNotFoundError:
                return False
    return True


def test_the_picture_of_the_rooms_names_every_package() -> None:
    picture = (ROOT / "docs/architecture.md").read_text().partition("## The rooms")[2].split("```")[1]
    named = set(re.findall(r"\w+", picture))
    rooms = {
        path.parent.name for top in ("search", "cost_model", "runtime") for path in (ROOT / top).glob("*/__init__.py")
    }
    rooms |= {path.parent.name for path in (ROOT / "autopar").glob("*/__init__.py")} - {"_torch"}
    assert rooms - named == set()


def test_the_table_of_a_plan_names_every_field() -> None:
    from autopar.ir.plan import Plan

    section = (
        (ROOT / "docs/architecture.md").read_text().partition("## What does a `Plan` hold?")[2].partition("\n## ")[0]
    )
    named = {
        name
        for line in section.splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    }
    assert {field.name for field in fields(Plan)} - named == set()


def test_the_table_of_conversions_is_the_code_s() -> None:
    from autopar.lowering.conversions import CONVERSIONS

    row = re.compile(r"^\| (\w) → (\w)'? \| `(\w+)` \| ([\w -]+) \| ([\w -]+) \|$", re.MULTILINE)
    rows = row.findall((ROOT / "docs/architecture.md").read_text())
    plain = [tuple(cell.replace("-", "_").replace(" ", "_") for cell in cells) for cells in rows]
    assert plain == [(c.source, c.target, c.function, c.forward, c.backward) for c in CONVERSIONS.values()]


def test_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    """Three words in a row of every message stand in a string of the source; the rest may be values."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    quoted = [text.split() for cell in first_cells for text in re.findall(r"`([^`]+)`", cell)]
    messages = [words for words in quoted if len(words) > 3]
    assert len(messages) > 15
    texts = "\n".join(_strings())
    runs = {" ".join(words): [" ".join(words[i : i + 3]) for i in range(len(words) - 2)] for words in messages}
    assert [message for message, parts in runs.items() if not any(part in texts for part in parts)] == []


def _strings() -> Iterator[str]:
    """Every string of the source, without the values that are put into it."""
    for top in ("autopar", "cost_model", "search", "runtime"):
        for file in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
