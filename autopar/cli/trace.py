"""`autopar trace`: one step on ranks started here, as a trace that Perfetto shows."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.options.model_argument import Hidden, Json, Layers, ModelArgument
from autopar.cli.options.small_model import check_numbers, sizes_of_plan, small_sizes
from autopar.cli.output import console, print_json, progress, table
from autopar.ir.explanation import sizes_in_words
from autopar.planning.options import PlanOptions

if TYPE_CHECKING:
    from autopar.ir.plan import Plan
    from autopar.runtime.profile.chrome_trace import TrackTime


def trace(
    model: ModelArgument,
    world_size: Annotated[int, typer.Option("--world-size", "-n", help="Ranks to start on this machine.")],
    options: PlanOptions,
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the trace there.")] = Path("trace.json"),
    plan: Annotated[Path | None, typer.Option(help="Trace this plan file.", show_default=False)] = None,
    layers: Layers = None,
    hidden: Hidden = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of one data-parallel rank in one step.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    as_json: Json = False,
) -> None:
    """Run one step of MODEL on CPU ranks and write what each rank did when, for ui.perfetto.dev or chrome://tracing.

    A process for each rank, named with its coordinates; in it a track for compute (passes of stages, and in them blocks
    by name), one for the collectives of each mesh dimension (kind and bytes) and one for the messages between pipeline
    stages. On GPUs, call `ParallelModel.trace(path, batch)` in your own script under torchrun: it writes the same.

    Sizes are small unless given, as for `autopar verify`.
    """
    check_numbers(world_size=world_size, batch=batch)
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "seq_len": options.seq_len, "batch": batch}
    if plan is not None:
        wish = None
        sizes |= sizes_of_plan(plan, model, world_size, options, batch)
    else:
        wish = options.wish()
        sizes |= small_sizes(model, world_size, options, sizes)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_LOGS", "-dtensor")
    with progress("importing torch") as on_progress:
        from autopar.commands.profile import trace_model

        decided, times = trace_model(
            model,
            out,
            world_size=world_size,
            degrees=wish,
            plan=None if plan is None else str(plan),
            dtype=dtype,
            seed=seed,
            on_progress=on_progress,
            **sizes,
        )
    if as_json:
        print_json({"trace": str(out), "plan": decided.to_dict(), "tracks": [asdict(one) for one in times]})
    else:
        _show(model, decided, times, out)


def _show(model: str, plan: "Plan", times: list["TrackTime"], path: Path) -> None:
    out = console()
    first, last = min(one.start_us for one in times), max(one.end_us for one in times)
    out.print(f"{model}: {sizes_in_words(plan)}; one step of {(last - first) / 1e3:.1f} ms", markup=False)
    columns = ("rank", "track", "slices", "busy ms", "of the step")
    rows = [
        (
            one.rank,
            one.track,
            str(one.num_slices),
            f"{one.busy_us / 1e3:.1f}",
            f"{one.busy_us / max(last - first, 1e-9):.0%}",
        )
        for one in times
    ]
    out.print(table(columns, rows, right=columns[2:]))
    out.print(f"written to {path}; open it at https://ui.perfetto.dev", markup=False)
