"""The next thing to try after `autopar verify` refused a model or found a difference: one command for each case."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError, CaptureError, PlanError, RankError
from autopar.planning.options import PlanOptions, command_options

if TYPE_CHECKING:
    from autopar.runtime.verify.verify import Report

_LEAST = "splits the batch only, which asks least of a model"


@contextmanager
def suggesting_next_step(model: str, world_size: int, options: PlanOptions) -> Iterator[None]:
    """Add the next thing to try to every error of a `verify` command."""
    try:
        yield
    except AutoparError as error:
        asked = {name: getattr(options, name) for name in command_options()}
        error.add_note(f"next: {next_after_refusal(error, model, world_size, asked)}")
        raise


def next_after_refusal(error: AutoparError, model: str, world_size: int, wish: Mapping[str, Any]) -> str:
    """A command for an error of `verify`, with its purpose. `wish` are the degrees of the refused command."""
    asked = {name: value for name, value in wish.items() if value is not None}
    if isinstance(error, PlanError):
        return _other_degrees(model, world_size, asked)
    if isinstance(error, CaptureError):
        return (
            f"{_command(model, world_size, asked)} --traceback  # shows the line of the model that cannot be captured"
        )
    if isinstance(error, RankError):
        return f"{_command(model, 1, {})}  # tells a fault of the model from a fault of the split"
    return "autopar verify --help  # lists the options and their values"


def next_after_difference(report: "Report", model: str) -> str:
    """A command that narrows down a difference."""
    failed = {q.name for q in report.quantities if not q.passed}
    degrees = report.plan.degrees
    if failed <= {"captured loss", "captured gradients"}:
        return (
            f"{_command(model, 1, {})}  # the split is right, and the capture differs from the module on one device too"
        )
    if degrees.tp > 1 or degrees.pp > 1:
        return f"{_command(model, degrees.world_size, {'dp': degrees.world_size})}  # {_LEAST}: is it equal?"
    return 'docs/troubleshooting.md, "The result differs"'


def _other_degrees(model: str, world_size: int, asked: Mapping[str, Any]) -> str:
    """The same command without the degrees that are refused most often."""
    if (asked.get("accumulate") or 1) > 1:
        kept = {name: value for name, value in asked.items() if name != "accumulate"}
        return f"{_command(model, world_size, kept)}  # without micro-batches"
    if {"tp", "pp"} & asked.keys():
        return f"{_command(model, world_size, {'dp': world_size})} --batch 1  # {_LEAST}"
    return f"{_command(model, 1, {})} --batch {world_size}  # one rank"


def _command(model: str, world_size: int, degrees: Mapping[str, Any]) -> str:
    words = ["autopar", "verify", model, "--world-size", str(world_size)]
    for name, value in degrees.items():
        option = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
    return shlex.join(words)
