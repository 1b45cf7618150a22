"""Help and listings: their text, and that they do not import torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run import autopar, json_of, refused
from typer.testing import CliRunner

import autopar as package
from autopar.cli.app import COMMANDS, app_of
from autopar.ir.device_presets import device_presets
from autopar.presets.models import model_presets

EXAMPLES = Path(__file__).parent.parent / "report" / "examples"
HEAVY = ("torch", "transformers", "sympy", "highspy", "optuna")
LIGHT_COMMANDS = (
    ["--help"],
    ["--version"],
    ["plan", "--help"],
    ["estimate", "--help"],
    ["coverage", "--help"],
    ["verify", "--help"],
    ["trace", "--help"],
    ["doctor", "--help"],
    ["doctor", "--ranks", "0"],
    ["validate", "--help"],
    ["validate", "no_such.csv"],
    ["calibrate", "--help"],
    ["capacity", "--help"],
    ["calibrate", "--ranks", "0", "--minutes", "0"],
    ["report", "--help"],
    ["status", "--help"],
    ["status", "missing"],
    ["report", str(EXAMPLES / "pipeline.json"), "--perfetto", os.devnull + "/trace.json"],
    ["models"],
    ["clusters", "--json"],
    ["plan", "lama3-8b", "--cluster", "4xcpu"],
    ["plan", "gpt2", "--cluster", "4xcpu", "--tp", "3"],
    ["estimate", "gpt2", "--cluster", "4xcpu", "--tp", "3"],
    ["estimate", "lama3-8b", "--cluster", "8xh100"],
    ["verify", "gpt2", "--world-size", "3", "--tp", "2", "--dp", "2"],
)


def test_without_torch() -> None:
    """All commands run in one process, so the first that imports too much is named."""
    program = f"""
import sys
from autopar.cli import main
for arguments in {LIGHT_COMMANDS!r}:
    sys.argv = ["autopar", *arguments]
    try:
        main()
    except SystemExit as end:
        assert end.code in (None, 0, 2), (arguments, end.code)
    assert not set({HEAVY!r}) & set(sys.modules), arguments
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_version() -> None:
    assert autopar("--version").stdout.strip() == f"autopar {package.__version__}"


def test_every_command_has_help() -> None:
    top = autopar("--help").stdout
    for command in COMMANDS:
        assert command in top
        assert autopar(command, "--help").exit_code == 0


def test_a_command_alone_is_as_among_all() -> None:
    for command in COMMANDS:
        alone = CliRunner().invoke(app_of([command, "--help"]), [command, "--help"])
        assert alone.stdout == autopar(command, "--help").stdout
        assert CliRunner().invoke(app_of([command]), ["--version"]).exit_code == 0
    assert "No such command 'plann'" in refused("plann")


def test_commands_share_the_plan_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("plan", "estimate", "coverage", "verify", "trace"):
        shown = autopar(command, "--help").stdout
        names = ("tp", "dp", "dp-replicate", "zero", "micro-batch", "accumulate", "global-batch", "seq-len")
        for option in (*names, "sequence-parallel", "no-sequence-parallel", "per-micro-batch"):
            assert f"--{option}" in shown, (command, option)


def test_models() -> None:
    shown = autopar("models").stdout
    assert all(name in shown for name in model_presets())
    listed = {entry["name"]: entry for entry in json_of("models")}
    assert listed.keys() == model_presets().keys()
    assert listed["llama3-8b"]["num_parameters"] == 8_030_261_248
    assert listed["llama3-8b"]["num_layers"] == 32
    assert listed["clip-vit-l-14"]["num_layers"] == 36  # both towers


def test_clusters() -> None:
    shown = autopar("clusters").stdout
    assert all(name in shown for name in device_presets())
    listed = {entry["name"]: entry for entry in json_of("clusters")}
    assert listed["h100-sxm"]["figures"]["memory_gb"] == 80


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan", "lama3-8b", "-c", "4xcpu"), "did you mean 'llama3-8b'?"),
        (("plan", "gpt2", "-c", "4xcpi"), "did you mean 'cpu'?"),
        (("plan", "gpt2", "-c", "12xh100"), "use 8 or 16"),
        (("plan", "nowhere/config.json", "-c", "4xcpu"), "nowhere"),
        (("plan", "no_such_module:factory", "-c", "4xcpu"), "no module named 'no_such_module'"),
        (("plan", "gpt2", "-c", "4xcpu", "--tp", "3"), "tp: must divide the 4 devices; got 3 (nearest: 2 or 4)"),
        (("estimate", "gpt2", "-c", "4xcpu", "--tp", "3"), "tp: must divide the 4 ranks; got 3 (nearest: 2 or 4)"),
        (("estimate", "gpt2", "-c", "8xcpu", "--tp", "2", "--dp", "2"), "use dp_shard 4"),
        (("estimate", "gpt2", "-c", "4xcpu", "--tp", "2", "--global-batch", "7"), "nearest: 6 or 8"),
        (("verify", "gpt2", "-n", "4", "--plan", "missing.json"), "no plan file missing.json"),
        (("verify", "gpt2", "-n", "4", "--steps", "0"), "--steps: must be at least 1"),
        (("verify", "gpt2", "-n", "9999"), "at most 64 ranks"),
        (("doctor", "--ranks", "0"), "--ranks: must be from 1 to 64"),
        (("doctor", "--ranks", "2", "--timeout", "-1"), "--timeout: must be greater than 0"),
        (("doctor", "--ranks", "2", "--cluster", "4xcpu"), "4 devices, --ranks starts 2"),
        (("doctor", "--ranks", "8", "--cluster", "8xh100"), "use torchrun"),
        (("trace", "gpt2", "-n", "0"), "--world-size: must be at least 1"),
        (("trace", "gpt2", "-n", "2", "--out", "/nonexistent/trace.json"), "/nonexistent/trace.json cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_is_one_message(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(*arguments)


def test_all_violations_at_once() -> None:
    message = refused("plan", "gpt2", "-c", "4xcpu", "--zero", "7", "--accumulate", "0", "--global-batch", "-1")
    assert "--zero: must be 0, 1, 2 or 3; got 7" in message
    assert "--accumulate: must be at least 1" in message
    assert "--global-batch: must be a whole number of at least 1; got -1" in message
    message = refused("plan", "gpt2", "-c", "4xcpu", "--tp", "3", "--dp", "3")
    assert all(f"{name}: must divide" in message for name in ("tp", "dp_shard"))
    message = refused(
        "estimate", "gpt2", "-c", "4xcpu", "--tp", "3", "--dp", "3", "--accumulate", "5", "--global-batch", "10"
    )
    assert all(f"{name}: must divide" in message for name in ("tp", "dp_shard"))
    assert "global_batch: must be divisible by the 3" in message


def test_unknown_option_and_missing_argument() -> None:
    assert "--tpp" in refused("plan", "gpt2", "-c", "4xcpu", "--tpp", "3")
    assert "--cluster" in refused("plan", "gpt2")
