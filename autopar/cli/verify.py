"""`autopar verify`: run the same steps on one device and on ranks started here, and compare everything."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.options import (
    Hidden,
    Json,
    Layers,
    LocalBatch,
    ModelArgument,
    Specialise,
    WorldSize,
    check_numbers,
    naming,
    option,
    wish_and_sizes,
)
from autopar.cli.output import console, print_ends, print_json, print_verdict, progress, table
from autopar.commands.next_step import VerifyCommand, next_after_difference, suggesting_next_step
from autopar.ir.explanation import sizes_in_words
from autopar.planning.options import PlanOptions

if TYPE_CHECKING:
    from autopar.runtime.verify.verify import Report

_FAILED = 1
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
    specialise: Specialise = False,
    batch: LocalBatch = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of both runs: float64, float32 or bfloat16. Each has its tolerance.")
    ] = "float64",
    steps: Annotated[int, typer.Option(help="AdamW steps to run.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare MODEL split over CPU ranks with MODEL on one device: loss, outputs, gradients, clip norm, weights.

    The command starts the ranks on this machine and runs the same AdamW steps on both sides. Without --plan, a preset
    or config has 2 layers, hidden size 64 and 32 tokens, unless options say otherwise.

    Example: autopar verify gpt2 --world-size 4 --tp 2 --dp 2 --zero 3

    Exit status: 0 equal, 1 different, 2 wrong input.
    """
    path = None if plan is None else str(plan)
    command = VerifyCommand(model=model, world_size=world_size, specialise=specialise, plan=path)
    with suggesting_next_step(command, options), naming(plan), progress("importing torch") as on_progress:
        check_numbers(world_size=world_size, steps=steps, batch=batch)
        wish, sizes = wish_and_sizes(model, world_size, options, plan, layers=layers, hidden=hidden, batch=batch)
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
            on_progress=on_progress,
            **sizes,
        )
    if as_json:
        print_json(report.to_dict())
    else:
        _show(report, model, sizes)
    if not report.passed:
        if not as_json:
            console().print(f"next: {next_after_difference(report, command)}", soft_wrap=True)  # to be copied
        raise typer.Exit(_FAILED)


def _show(report: "Report", model: str, sizes: dict[str, Any]) -> None:
    out = console()
    words = ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None)
    out.print(f"{model}{f' ({words})' if words else ''}: {sizes_in_words(report.plan)}, in {report.seconds:.1f} s")
    columns = ("compared with one device", "worst error", "limit", "", "place of the worst error")
    rows = [(q.name, f"{q.max_error:.1e}", f"{q.limit:.0e}", _VERDICTS[q.outcome], q.where) for q in report.quantities]
    out.print(table(columns, rows, right=columns[1:3]))
    print_ends([f"note: {note}" for note in report.notes])
    bad = [q for q in report.quantities if not q.passed]
    failed = [q.name if q.outcome == "different" else f"{q.name} ({q.outcome})" for q in bad]
    print_verdict(failed, "the parallel steps equal the single-device steps")
