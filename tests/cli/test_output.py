"""Printing: names from the user are shown unchanged, and tables are whole on a narrow terminal."""

import io
import re

import pytest
from rich.console import Group
from rich.text import Text
from run import autopar
from typer.testing import CliRunner

from autopar.cli import output
from autopar.cli.app import COMMANDS, app_of
from autopar.cli.output import console, table

WIDTH = 80
LEAST_TEXT = 32  # columns of an option's text in the help
SMALL = ("--layers", "2", "--hidden", "64", "--seq-len", "16")
SHOWN = [
    ("models",),
    ("clusters",),
    ("capacity", "h100"),
    ("estimate", "gpt2", "-c", "4xcpu", "--tp", "2", *SMALL),
    ("plan", "gpt2", "-c", "4xcpu", *SMALL, "--global-batch", "8"),
    ("coverage", "gpt2", "--tp", "2", *SMALL),
    ("validate", "benchmarks/data/published_runs.csv", "--tier", "core"),
]


def test_names_with_colons_stay_text(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("mine:factory: pp 2 × tp 2")
    assert capsys.readouterr().out == "mine:factory: pp 2 × tp 2\n"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("  proven: no plan is better", ["  proven: no plan is", "    better"]),
        ("  +3.4%  tp 2 × dp 32 ZeRO-2", ["  +3.4%  tp 2 × dp 32", "         ZeRO-2"]),
        ("title of two lines:\n a " + "x" * 30, ["title of two lines:", " a", f"   {'x' * 21}", f"   {'x' * 9}"]),
    ],
    ids=["text", "label", "long word"],
)
def test_further_lines_of_a_long_text_are_indented(
    line: str, shown: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "WIDTH_WITHOUT_TERMINAL", 24)
    console().print(line)
    console().print(Group(Text(line)))
    assert [text.rstrip() for text in capsys.readouterr().out.splitlines()] == shown * 2


def test_a_spinner_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", screen)
    with output.progress("starting") as on_progress:
        on_progress("small:factory: capturing [red]")
    assert "small:factory: capturing [red]" in screen.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 200])
def test_every_cell_is_whole_at_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "WIDTH_WITHOUT_TERMINAL", width)
    columns = ("name", "GB", "", "description", "source of the description")
    rows = [
        ("first", "1.5", "latest", "a long text of many words that no terminal has in a column", "and another"),
        ("the second", "1,234.5", "", "short", "https://example.org/" + "x" * 30),
    ]
    console().print(table(columns, rows, right=("GB",)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    shown = "".join("".join(lines).split())
    for cell in (cell for row in rows for cell in row):
        assert "".join(cell.split()) in shown
    assert lines[0].startswith("name")


def test_the_last_numbers_stand_below_their_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "WIDTH_WITHOUT_TERMINAL", 30)
    columns = ("name", "median", "p90", "memory", "median", "p90")
    console().print(table(columns, [("first", "1%", "222,222%", "3", "4%", "5%")], right=columns[1:]))
    head, row, *below = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "median", "p90"] and row.split() == ["first", "1%", "222,222%"]
    assert " ".join(below).split() == ["memory", "3,", "median", "4%,", "p90", "5%"]


@pytest.mark.parametrize("words", SHOWN, ids=lambda words: words[0])
def test_commands_are_whole_on_a_narrow_terminal(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    wide = autopar(*words).stdout
    monkeypatch.setattr(output, "WIDTH_WITHOUT_TERMINAL", WIDTH)
    result = autopar(*words)
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= WIDTH
    wide_words = [word.removesuffix(",") for word in wide.split()]
    numbers = [word for word in wide_words if word.replace(",", "").replace(".", "").isdecimal()]
    shown = [word.removesuffix(",") for word in result.stdout.split()]
    assert not [number for number in numbers if number not in shown and words[0] not in ("plan", "estimate")]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_whole_on_a_narrow_terminal(command: str) -> None:
    shown = CliRunner().invoke(app_of([command]), [command, "--help"], env={"COLUMNS": "80"}).stdout
    assert "…" not in shown and max(map(len, shown.splitlines())) <= WIDTH
    before_texts = re.findall(r"(?m)^│ .*?<[\w\[\]]+> +|^│ .* --no-[\w-]+ +", shown)
    assert before_texts and WIDTH - max(map(len, before_texts)) >= LEAST_TEXT
