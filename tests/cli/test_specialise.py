"""``--specialise``: every command that captures a model has it, and refusals name it with the line and the value."""

from pathlib import Path

import pytest
from run import autopar, refused
from suites import long

MODEL = "cli_models:masked"
COMMANDS = (
    ("plan", MODEL, "-c", "2xcpu"),
    ("estimate", MODEL, "-c", "2xcpu"),
    ("coverage", MODEL, "--tp", "2"),
    ("verify", MODEL, "-n", "2", "--tp", "2"),
    ("trace", MODEL, "-n", "2", "--tp", "2"),
)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_refusal_names_the_option_of_the_command(command: tuple[str, ...]) -> None:
    message = refused(*command)
    assert "cli_models.py:" in message and "`if hidden.any():" in message
    assert "reads True, which is computed of input 'hidden'" in message
    assert "or pass --specialise: a batch with another value is then captured again" in message
    assert "specialise=True" not in message


def test_verify_suggests_the_same_command_with_the_option() -> None:
    assert "--world-size 2 --tp 2 --specialise  #" in refused(*COMMANDS[3])


def test_verify_says_that_a_plan_file_does_not_hold_the_option(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    assert autopar("plan", MODEL, "-c", "2xcpu", "--tp", "2", "--specialise", "--out", path).exit_code == 0
    message = refused("verify", MODEL, "-n", "2", "--plan", path)
    assert "pass --specialise" in message and "a plan file does not hold this option" in message
    assert f"autopar verify {MODEL} --world-size 2 --specialise --plan {path}  #" in message


@pytest.mark.parametrize("command", [COMMANDS[0], *map(long, COMMANDS[1:3])], ids=lambda command: command[0])
def test_the_option_takes_the_branch(command: tuple[str, ...]) -> None:
    result = autopar(*command, "--specialise")
    assert result.exit_code == 0, result.stderr
    assert "cli_models:masked" in result.stdout


def test_a_loss_that_is_no_function_is_named() -> None:
    message = refused("coverage", "cli_models:not_a_loss")
    assert "loss_fn: must be a function of (output, target)" in message
