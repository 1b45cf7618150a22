"""Running the command line in this process."""

import json
import shlex
from contextlib import nullcontext
from typing import Any
from unittest import mock

import typer
from typer.testing import CliRunner, Result

from autopar.cli.app import app_of


def autopar(*arguments: str) -> Result:
    """One command; nothing may escape as a traceback."""
    result = CliRunner().invoke(app_of(), list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert "Traceback" not in result.stdout + result.stderr
    return result


def refused(*arguments: str, status: int = 2) -> str:
    """The message of a command that must refuse its input."""
    result = autopar(*arguments)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    for line in result.stderr.splitlines():
        if "next: autopar " in line:
            _follow(shlex.split(line.partition("next: autopar ")[2], comments=True))
    return result.stderr


def _follow(words: list[str]) -> None:
    """Run the command of a `next:` line. `verify` ends when its plan is made, because ranks take seconds."""
    target = "autopar.commands.verify.verify"
    with mock.patch(target, _decided) if words[0] == "verify" and "--help" not in words else nullcontext():
        result = autopar(*words)
    assert result.exit_code == 0, (words, result.output)


def _decided(
    spec: str, *, world_size: int, degrees: Any, plan: Any, dtype: str, seed: int, specialise: bool, steps: int,
    on_progress: Any, **sizes: Any,
) -> None:  # fmt: skip
    from autopar.commands.verify import Job, decide_plan

    job = Job(spec=spec, dtype=dtype, seed=seed, specialise=specialise, **sizes)
    decide_plan(job, world_size, degrees, plan, on_progress)
    raise typer.Exit


def json_of(*arguments: str) -> Any:
    """What a command prints with --json: JSON and nothing else."""
    result = autopar(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
