"""`autopar verify`: run the same steps on one device and on ranks started here, and compare everything.

A refusal or a difference ends with the next thing to try: one command for each case.
"""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.command import FAILED, Answer
from autopar.cli.options import (
    MAX_RANKS,
    Hidden,
    Layers,
    LocalBatch,
    ModelArgument,
    Specialise,
    Trains,
    WorldSize,
    naming,
    option,
    refuse_options,
)
from autopar.cli.output import console, print_ends, print_verdict, progress, table
from autopar.errors import AutoparError, CaptureError, InputError, PlanError, Problem, RankError
from autopar.ir.explanation import sizes_in_words
from autopar.ir.plan import Plan
from autopar.models.load import is_factory
from autopar.planning.degrees import resolve_degrees
from autopar.planning.options import PlanOptions, command_options
from autopar.presets.models import model_names, model_preset

if TYPE_CHECKING:
    from autopar.runtime.verify.verify import Report

SMALL_LAYERS, SMALL_HIDDEN, SMALL_HIDDEN_BY_3, SMALL_SEQ_LEN = 2, 64, 96, 32
_LEAST = "splits the batch only, which asks least of a model"
_VERDICTS = {"equal": "ok", "different": "DIFFERS", "cannot be judged": "NOT JUDGED"}


def verify(
    model: ModelArgument,
    world_size: WorldSize,
    options: PlanOptions,
    plan: Annotated[
        Path | None,
        option("Plan file to verify. It holds all degrees: give none beside it."),
    ] = None,
    layers: Layers = None,
    hidden: Hidden = None,
    trains: Trains = "all",
    specialise: Specialise = False,
    batch: LocalBatch = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of both runs: float64, float32 or bfloat16. Each has its tolerance.")
    ] = "float64",
    steps: Annotated[int, typer.Option(help="AdamW steps to run.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
) -> Answer:
    """Compare MODEL split over CPU ranks with MODEL on one device: loss, outputs, gradients, clip norm, weights.

    The command starts the ranks on this machine and runs the same AdamW steps on both sides. Without --plan, a preset
    or config has 2 layers, hidden size 64 and 32 tokens, unless options say otherwise.

    Example: autopar verify gpt2 --world-size 4 --tp 2 --dp 2 --zero 3

    Exit status: 0 equal, 1 different, 2 wrong input.
    """
    path = None if plan is None else str(plan)
    command = VerifyCommand(model=model, world_size=world_size, specialise=specialise, plan=path, trains=trains)
    with suggesting_next_step(command, options), naming(plan), progress("importing torch") as on_progress:
        wish, sizes = wish_and_sizes(
            model, world_size, options, plan, layers=layers, hidden=hidden, batch=batch, steps=steps
        )
        from autopar.commands.verify import verify as run

        report = run(
            model,
            world_size=world_size,
            degrees=wish,
            plan=plan,
            dtype=dtype,
            steps=steps,
            seed=seed,
            specialise=specialise,
            trains=trains,
            on_progress=on_progress,
            **sizes,
        )

    def show() -> None:
        _show(report, model, sizes)
        if not report.passed:
            console().print(f"next: {next_after_difference(report, command)}", soft_wrap=True)  # to be copied

    return Answer(data=report.to_dict(), show=show, status=0 if report.passed else FAILED)


def _show(report: "Report", model: str, sizes: dict[str, Any]) -> None:
    out = console()
    words = ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None)
    title = f"{model}{f' ({words})' if words else ''}"
    out.print(f"{title}: {sizes_in_words(report.plan.degrees)}, in {report.seconds:.1f} s")
    columns = ("compared with one device", "worst error", "limit", "", "place of the worst error")
    rows = [(q.name, f"{q.max_error:.1e}", f"{q.limit:.0e}", _VERDICTS[q.outcome], q.where) for q in report.quantities]
    out.print(table(columns, rows, right=columns[1:3]))
    print_ends([f"note: {note}" for note in report.notes])
    bad = [q for q in report.quantities if not q.passed]
    failed = [q.name if q.outcome == "different" else f"{q.name} ({q.outcome})" for q in bad]
    print_verdict(failed, "the parallel steps equal the single-device steps")


# ---- sizes ----


def wish_and_sizes(
    model: str,
    world_size: int,
    options: PlanOptions,
    plan: Path | None,
    *,
    layers: int | None,
    hidden: int | None,
    batch: int | None,
    **numbers: int,
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The degrees that were asked for, None with a plan file, and all sizes of the model; `numbers` are checked too."""
    problems = [
        Problem(path="--" + name.replace("_", "-"), value=value, rule="must be at least 1")
        for name, value in (("world_size", world_size), ("batch", batch), *numbers.items())
        if value is not None and value < 1
    ]
    if world_size > MAX_RANKS:
        rule = f"must be at most {MAX_RANKS} ranks on one machine"
        problems.append(Problem(path="--world-size", value=world_size, rule=rule))
    refuse_options(problems)
    given = {"layers": layers, "hidden": hidden, "seq_len": options.seq_len, "batch": batch}
    if plan is not None:
        return None, given | _sizes_of_plan(plan, model, world_size, options, batch)
    return options.wish(), given | _small_sizes(model, world_size, options, given)


def _sizes_of_plan(
    path: Path, model: str, world_size: int, options: PlanOptions, batch: int | None
) -> dict[str, int | None]:
    """Batch and sequence that the plan was made for, unless they were given."""
    options.refuse_beside_plan()
    plan = Plan.load(path)
    if model.lower() in model_names() and plan.model not in ("", model_preset(model).name):
        raise PlanError(f"plan file {path} was made for model {plan.model}, not {model}; plan again for {model}")
    if plan.degrees.world_size != world_size:
        raise PlanError(
            f"plan file {path} is for {plan.degrees.world_size} ranks ({sizes_in_words(plan.degrees)}), "
            f"not {world_size}; use --world-size {plan.degrees.world_size}, or plan again for {world_size}"
        )
    if is_factory(model):
        return {}
    return {"seq_len": plan.sequence, "batch": plan.degrees.local_batch if batch is None else batch}


def _small_sizes(model: str, world_size: int, options: PlanOptions, sizes: dict[str, Any]) -> dict[str, int]:
    """Small sizes for the options that were left open; the degrees divide them."""
    if is_factory(model):
        if options.global_batch is not None:
            raise InputError(f"--global-batch: a factory decides its own sizes; change {model} instead")
        return {}
    if sizes["batch"] is None:
        degrees = options.degrees(world_size)
    else:
        degrees = resolve_degrees(options.wish(), world_size, sizes["batch"], global_batch=options.global_batch)
    hidden = SMALL_HIDDEN if degrees.tp % 3 else SMALL_HIDDEN_BY_3
    small = {"layers": SMALL_LAYERS, "hidden": hidden, "seq_len": SMALL_SEQ_LEN if degrees.tp % 3 else 48}
    small["batch"] = degrees.local_batch
    return {name: value for name, value in small.items() if sizes[name] is None}


# ---- the next thing to try ----


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCommand:
    """The arguments of a `verify` command that its suggestions repeat."""

    model: str
    world_size: int
    specialise: bool = False
    plan: str | None = None
    trains: str = "all"

    def same_words(self, degrees: Mapping[str, Any]) -> str:
        """The command with the same degrees or plan."""
        words = self.words(degrees=degrees)
        return words if self.plan is None else f"{words} {shlex.join(['--plan', self.plan])}"

    def words(self, world_size: int | None = None, degrees: Mapping[str, Any] | None = None) -> str:
        """The command with other degrees."""
        words = ["autopar", "verify", self.model, "--world-size", str(world_size or self.world_size)]
        words += ["--trains", self.trains] if self.trains != "all" else []
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
        wish = {name: getattr(options, name) for name in command_options()}
        error.add_note(f"next: {next_after_refusal(error, command, wish)}")
        raise


def next_after_refusal(error: AutoparError, command: VerifyCommand, wish: Mapping[str, Any]) -> str:
    """A command for an error of `verify`, with its purpose. `wish` are the degrees of the refused command."""
    given = {name: value for name, value in wish.items() if value is not None}
    if isinstance(error, PlanError):
        return _other_degrees(command, given)
    if isinstance(error, CaptureError) and error.option == "specialise":
        return f"{replace(command, specialise=True).same_words(given)}  # takes the branch of the example inputs"
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


def _other_degrees(command: VerifyCommand, given: Mapping[str, Any]) -> str:
    """The same command without the degrees that are refused most often. A factory has its own batch of a rank."""
    data = command.words(degrees={"dp": command.world_size})
    single, all_ = ("", "") if is_factory(command.model) else (" --batch 1", f" --batch {command.world_size}")
    if {"tp", "cp", "pp"} & given.keys():
        return f"{data}{single}  # {_LEAST}"
    if (given.get("accumulate") or 1) > 1:
        return f"{data}  # without micro-batches"
    return f"{command.words(1)}{all_}  # one rank"
