"""The next thing to try after `autopar verify` refused a model or found a difference: one command for each case."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError, CaptureError, PlanError, RankError
from autopar.models.load import is_factory
from autopar.planning.options import PlanOptions, command_options

if TYPE_CHECKING:
    from autopar.runtime.verify.verify import Report

_LEAST = "splits the batch only, which asks least of a model"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCommand:
    """The arguments of a `verify` command that its suggestions repeat."""

    model: str
    world_size: int
    specialise: bool = False
    plan: str | None = None

    def same_words(self, degrees: Mapping[str, Any]) -> str:
        """The command with the same degrees or plan."""
        words = self.words(degrees=degrees)
        return words if self.plan is None else f"{words} {shlex.join(['--plan', self.plan])}"

    def words(self, world_size: int | None = None, degrees: Mapping[str, Any] | None = None) -> str:
        """The command with other degrees."""
        words = ["autopar", "verify", self.model, "--world-size", str(world_size or self.world_size)]
        for name, value in (degrees or {}).items():
            option = name.replace("_", "-")
            words += [f"--{'' if value else 'no-'}{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
        return shlex.join([*words, "--specialise"] if self.specialise else words)


@contextmanager
def suggesting_next_step(command: VerifyCommand, options: PlanOptions) -> Iterator[None]:
    """Add the next thing to try to every error of a `verify` command."""
    try:
        yield
    except AutoparError as error:
        asked = {name: getattr(options, name) for name in command_options()}
        error.add_note(f"next: {next_after_refusal(error, command, asked)}")
        raise


def next_after_refusal(error: AutoparError, command: VerifyCommand, wish: Mapping[str, Any]) -> str:
    """A command for an error of `verify`, with its purpose. `wish` are the degrees of the refused command."""
    asked = {name: value for name, value in wish.items() if value is not None}
    if isinstance(error, PlanError):
        return _other_degrees(command, asked)
    if isinstance(error, CaptureError) and error.option == "specialise":
        return f"{replace(command, specialise=True).same_words(asked)}  # takes the branch of the example inputs"
    if isinstance(error, CaptureError):
        return 'docs/troubleshooting.md, "It does not capture"'
    if isinstance(error, RankError):
        return f"{command.words(1)}  # tells a fault of the model from a fault of the split"
    return "autopar verify --help  # lists the options and their values"


def next_after_difference(report: "Report", command: VerifyCommand) -> str:
    """A command that narrows down a difference."""
    failed = {q.name for q in report.quantities if not q.passed}
    degrees = report.plan.degrees
    if all(name.startswith("captured ") for name in failed):
        return f"{command.words(1)}  # the split is right, and the capture differs from the module on one device too"
    if degrees.tp > 1 or degrees.cp > 1 or degrees.pp > 1:
        return f"{command.words(degrees.world_size, {'dp': degrees.world_size})}  # {_LEAST}: is it equal?"
    return 'docs/troubleshooting.md, "The result differs"'


def _other_degrees(command: VerifyCommand, asked: Mapping[str, Any]) -> str:
    """The same command without the degrees that are refused most often. A factory has its own batch of a rank."""
    data = command.words(degrees={"dp": command.world_size})
    one, all_ = ("", "") if is_factory(command.model) else (" --batch 1", f" --batch {command.world_size}")
    if {"tp", "cp", "pp"} & asked.keys():
        return f"{data}{one}  # {_LEAST}"
    if (asked.get("accumulate") or 1) > 1:
        return f"{data}  # without micro-batches"
    return f"{command.words(1)}{all_}  # one rank"
