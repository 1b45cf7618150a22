"""`autopar plan`: what it prints and writes, and what it refuses once the model is known."""

import json
from pathlib import Path

import pytest
from run import autopar, json_of, refused

from autopar.ir.plan import Plan

pytest.importorskip("transformers")
SMALL = ("--layers", "2", "--hidden", "64", "--seq-len", "32")
HERE = Path(__file__).parent


@pytest.fixture
def in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def test_plan_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    shown = autopar("plan", "llama3-8b", "-c", "4xcpu", "--tp", "2", "--dp", "2", "--out", str(path), *SMALL)
    assert shown.exit_code == 0, shown.stderr
    found = Plan.load(path)
    assert (found.degrees.tp, found.degrees.dp_shard, found.degrees.zero) == (2, 2, 3)
    assert Plan.from_dict(json.loads(found.to_json())) == found
    assert shown.stdout.startswith("Every operator has a rule.")  # what has no rule comes first
    for words in ("tp 2 × dp_shard 2 = 4 ranks, ZeRO-3", "vocabulary-parallel", "column-parallel", "row-parallel"):
        assert words in shown.stdout
        assert words in found.explain()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert autopar("plan", "gpt2", "-c", "4xcpu", "--tp", "2", "--out", str(tmp_path / name), *SMALL).exit_code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_json_and_derived_sizes() -> None:
    found = json_of("plan", "gpt2", "-c", "4xcpu", "--tp", "2", "--global-batch", "16", "--micro-batch", "2", *SMALL)
    assert found["degrees"]["accumulate"] == 4
    assert (found["batch"], found["sequence"]) == (4, 32)
    assert Plan.from_dict(found).degrees.dp == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--tp", "4", "--seq-len", "30", "--sequence-parallel"),
            ("sequence length 30", "degrees 3 and 5"),
        ),
        (("--tp", "7", "--dp", "1"), ("12 heads", "nearest legal degrees 6 and 12")),
    ],
)
def test_indivisible_sizes_are_named(tmp_path: Path, arguments: tuple[str, ...], says: tuple[str, ...]) -> None:
    ranks = "7xcpu" if "7" in arguments else "4xcpu"
    out = tmp_path / "plan.json"
    message = refused("plan", "gpt2", "-c", ranks, "--layers", "2", "--out", str(out), *arguments)
    assert all(words in message for words in says), message
    assert not out.exists()


def test_a_plan_that_cannot_fit_is_refused() -> None:
    message = refused("plan", "llama3-8b", "-c", "2xcpu", "--tp", "2", "--layers", "4", "--seq-len", "64", status=3)
    assert "a device has 8 GB" in message and "split the state over more devices" in message


def test_unwritable_target() -> None:
    message = refused("plan", "gpt2", "-c", "2xcpu", "--out", "/nonexistent/plan.json", *SMALL)
    assert "/nonexistent/plan.json cannot be written" in message


@pytest.mark.usefixtures("in_this_folder")
def test_model_that_does_not_export_names_module_and_line() -> None:
    message = refused("plan", "cli_models:branching", "-c", "2xcpu")
    source = (HERE / "cli_models.py").read_text().splitlines()
    line = next(n for n, text in enumerate(source, 1) if "the line that must be named" in text)
    assert "Branching" in message
    assert f"cli_models.py:{line}" in message


@pytest.mark.usefixtures("in_this_folder")
def test_operators_without_rule_come_first() -> None:
    shown = autopar("plan", "cli_models:plain", "-c", "2xcpu", "--tp", "2").stdout
    assert shown.startswith("No rule: computed whole on every rank")
    first = shown.partition("Plan for")[0]
    row = next(line for line in first.splitlines() if "bessel_j0" in line)
    assert row.split()[-2:] == ["512", "bytes"]  # its input, kept for the backward pass
    assert row.split()[-3] in ("µs", "ms")


@pytest.mark.usefixtures("in_this_folder")
def test_factory_that_fails_and_sizes_for_a_factory() -> None:
    assert "no such weights" in refused("plan", "cli_models:broken", "-c", "2xcpu")
    assert "a factory decides its own sizes" in refused("plan", "cli_models:plain", "-c", "2xcpu", "--seq-len", "8")


def test_bugs_are_short_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    import autopar.planning
    from autopar.cli import app

    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(autopar.planning, "program_for", fail)
    short = CliRunner().invoke(app.app, ["plan", "gpt2", "-c", "2xcpu", *SMALL])
    assert (short.exit_code, "Traceback" in short.stderr) == (1, False)
    assert "unexpected ZeroDivisionError: planted" in short.stderr
    long = CliRunner().invoke(app.app, ["plan", "gpt2", "-c", "2xcpu", "--traceback", *SMALL])
    assert (long.exit_code, "Traceback" in long.stderr) == (1, True)
    monkeypatch.setenv("AUTOPAR_DEBUG", "1")
    assert "Traceback" in CliRunner().invoke(app.app, ["plan", "gpt2", "-c", "2xcpu", *SMALL]).stderr
