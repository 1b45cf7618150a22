"""`autopar trace`: one step on ranks started here, as a trace that Perfetto shows."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.command import Answer
from autopar.cli.options import (
    Hidden,
    Layers,
    LocalBatch,
    ModelArgument,
    Specialise,
    Trains,
    WorldSize,
    naming,
    option,
)
from autopar.cli.output import console, progress, table
from autopar.cli.verify import wish_and_sizes
from autopar.ir.explanation import sizes_in_words
from autopar.planning.options import PlanOptions

if TYPE_CHECKING:
    from autopar.ir.plan import Plan
    from autopar.runtime.profile.chrome_trace import TrackTime


def trace(
    model: ModelArgument,
    world_size: WorldSize,
    options: PlanOptions,
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the trace to this file.")] = Path("trace.json"),
    plan: Annotated[Path | None, option("Plan file to run.")] = None,
    layers: Layers = None,
    hidden: Hidden = None,
    trains: Trains = "all",
    specialise: Specialise = False,
    batch: LocalBatch = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the model: float64, float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
) -> Answer:
    """Run one step of MODEL on CPU ranks, and write a trace of every rank for ui.perfetto.dev or chrome://tracing.

    Each rank has a track for computation, one for the collectives of each mesh dimension, and one for messages between
    pipeline stages. Slices name the stage, the block, the collective and its bytes.

    Without --plan, a preset or config has 2 layers, hidden size 64 and 32 tokens, unless options say otherwise.

    Example: autopar trace gpt2 --world-size 4 --tp 2 --pp 2 --micro-batches 4 --out trace.json

    On GPUs, call `parallel.trace(path, batch)` in your own script under torchrun.
    """
    wish, sizes = wish_and_sizes(model, world_size, options, plan, layers=layers, hidden=hidden, batch=batch)
    with naming(plan), progress("importing torch") as on_progress:
        from autopar.commands.verify import Job, trace_model

        job = Job(spec=model, dtype=dtype, seed=seed, specialise=specialise, trains=trains, **sizes)
        decided, times = trace_model(job, out, world_size=world_size, degrees=wish, plan=plan, on_progress=on_progress)
    data = {"trace": str(out), "plan": decided.to_dict(), "tracks": [asdict(t) for t in times]}
    return Answer(data=data, show=lambda: _show(model, decided, times, out))


def _show(model: str, plan: "Plan", times: list["TrackTime"], path: Path) -> None:
    out = console()
    first, last = min(t.start_us for t in times), max(t.end_us for t in times)
    out.print(f"{model}: {sizes_in_words(plan.degrees)}; one step of {(last - first) / 1e3:.1f} ms")
    columns = ("rank", "track", "slices", "busy ms", "of the step")
    rows = [
        (
            t.rank,
            t.track,
            str(t.num_slices),
            f"{t.busy_us / 1e3:.1f}",
            f"{t.busy_us / max(last - first, 1e-9):.0%}",
        )
        for t in times
    ]
    out.print(table(columns, rows, right=columns[2:]))
    out.print(f"written to {path}; open it at https://ui.perfetto.dev")
