"""`autopar verify`: run the same steps on one device and on ranks started here, and compare everything."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.options.model_argument import Hidden, Json, Layers, ModelArgument
from autopar.cli.options.small_model import check_numbers, sizes_of_plan, small_sizes
from autopar.cli.output import console, print_json, progress, table
from autopar.ir.explanation import sizes_in_words
from autopar.ir.plan import Plan
from autopar.planning.options import PlanOptions

if TYPE_CHECKING:
    from autopar.runtime.verify.verify import Report

_FAILED = 1


def verify(
    model: ModelArgument,
    world_size: Annotated[int, typer.Option("--world-size", "-n", help="Ranks to start on this machine.")],
    options: PlanOptions,
    plan: Annotated[Path | None, typer.Option(help="Verify this plan file.", show_default=False)] = None,
    layers: Layers = None,
    hidden: Hidden = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of one data-parallel rank in one step.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16; each has its tolerance.")] = "float64",
    steps: Annotated[int, typer.Option(help="AdamW steps.")] = 3,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare MODEL split over CPU ranks with MODEL on one device: loss, outputs, gradients, clip norm, weights.

    Without --plan, a preset or config is shrunk to 2 layers of width 64 and sequences of 32 tokens unless --layers,
    --hidden and --seq-len say otherwise. Exit status: 0 equal, 1 different, 2 bad input.
    """
    check_numbers(world_size=world_size, steps=steps, batch=batch)
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "seq_len": options.seq_len, "batch": batch}
    if plan is not None:
        wish = None
        sizes |= sizes_of_plan(plan, model, world_size, options, batch)
    else:
        wish = options.wish()
        sizes |= small_sizes(model, world_size, options, sizes)
    # remarks of libraries about things that are on purpose; the ranks inherit this
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_LOGS", "-dtensor")
    with progress("importing torch") as on_progress:
        from autopar.commands.verify import verify as run

        report = run(
            model,
            world_size=world_size,
            degrees=wish,
            plan=None if plan is None else str(plan),
            dtype=dtype,
            steps=steps,
            seed=seed,
            on_progress=on_progress,
            **sizes,
        )
    if as_json:
        print_json(report.to_dict())
    else:
        _show(report, model, sizes)
    if not report.passed:
        raise typer.Exit(_FAILED)


def _show(report: "Report", model: str, sizes: dict[str, Any]) -> None:
    plan = Plan.from_dict(dict(report.plan))
    out = console()
    words = ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None)
    out.print(
        f"{model}{f' ({words})' if words else ''}: {sizes_in_words(plan)}, in {report.seconds:.1f} s", markup=False
    )
    columns = ("compared with one device", "worst error", "tolerance", "", "where the worst is")
    rows = [
        (q.name, f"{q.max_error:.1e}", f"{q.tolerance:.0e}", "ok" if q.passed else "DIFFERS", q.where)
        for q in report.quantities
    ]
    out.print(table(columns, rows, right=columns[1:3]))
    for note in report.notes:
        out.print(f"note: {note}", markup=False)
    failed = [q.name for q in report.quantities if not q.passed]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "passed: the parallel steps equal the single-device steps"
    out.print(verdict, markup=False, style="bold red" if failed else "bold green")
