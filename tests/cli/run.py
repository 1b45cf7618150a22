"""Running the command line in this process."""

import json
from typing import Any

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
    return result.stderr


def json_of(*arguments: str) -> Any:
    """What a command prints with --json: JSON and nothing else."""
    result = autopar(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
