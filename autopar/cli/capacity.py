"""`autopar capacity`: the largest model per number of devices, under data parallelism, ZeRO and the best plan."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.command import Answer
from autopar.cli.options import option, positional
from autopar.cli.output import console, print_ends, table
from autopar.errors import InputError
from autopar.words.numbers import readable_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autopar.cost_model.capacity import Largest

COUNTS = "1,8,64,512,4096"


def capacity(
    device: Annotated[str, positional("DEVICE", "A device preset: h100-sxm, a100-80gb, ...")],
    devices: Annotated[str, typer.Option(help="Numbers of devices, with commas between them.")] = COUNTS,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    engine: Annotated[
        str, typer.Option(help="Framework whose training state is counted: autopar, megatron, fsdp, ...")
    ] = "autopar",
    chart: Annotated[Path | None, option("Write the table as a picture (.svg or .png).")] = None,
) -> Answer:
    """Show the largest model that fits on 1, 8, 64, ... devices of one kind.

    Models are shaped like Llama 3. Each micro-batch has one sequence, and every block is recomputed. The column "best
    plan" is the best of all tensor, pipeline and data-parallel degrees with any ZeRO stage.

    Example: autopar capacity h100-sxm --devices 8,64,512
    """
    counts = _counts(devices)
    if chart is not None and chart.suffix not in (".svg", ".png"):
        raise InputError(f"--chart {chart}: must end in .svg or .png")
    from autopar.cost_model.capacity import capacity as largest
    from autopar.cost_model.machine.engine import engine_named
    from autopar.cost_model.machine.fitted_constants import mechanisms
    from autopar.cost_model.published.machine import row_machine
    from autopar.cost_model.published.row import Row

    machine = row_machine(Row(id="capacity", gpu_type=device), engine_named(engine), mechanisms())
    models, name = largest(counts, machine, seq_len), machine.device.name
    if chart is not None:
        draw(models, f"Largest model on {name}, sequences of {seq_len:,} tokens", chart)
    data = {"device": name, "sequence": seq_len, "engine": engine, "largest": [asdict(f) for f in models]}
    each = readable_bytes(machine.memory_bytes)
    title = f"{name}, {each} each; engine {engine}, sequences of {seq_len:,} tokens\n"
    return Answer(data=data, show=lambda: _show(title, counts, models, chart))


def _show(title: str, counts: "Sequence[int]", models: "Sequence[Largest]", chart: Path | None) -> None:
    from autopar.cost_model.capacity import WAYS

    out, rows = console(), []
    out.print(title)
    for count in counts:
        mine = {r.way: r for r in models if r.devices == count}
        best = mine[WAYS[-1]]
        plan = f"tp {best.tp} × pp {best.pp} × dp {best.dp}, ZeRO {best.zero}" if best.parameters else ""
        rows.append(
            [f"{count:,}", *(f"{n / 1e9:,.1f}B" if (n := mine[way].parameters) else "none fits" for way in WAYS), plan]
        )
    out.print(table(["devices", *WAYS, "best plan"], rows, right=["devices", *WAYS]))
    print_ends((), chart)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--devices {text[:80]!r}: must be whole numbers such as {COUNTS}") from None
    if len(counts) > 64:
        raise InputError(f"--devices names {len(counts)} numbers; give at most 64")
    return sorted(set(counts))


def draw(rows: "Sequence[Largest]", title: str, path: Path) -> None:
    """Parameters over devices, one line for each way. Raises InputError if it cannot draw or write."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("--chart needs matplotlib: pip install 'matplotlib>=3.11,<4'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for way in dict.fromkeys(r.way for r in rows):
        mine = [r for r in rows if r.way == way and r.parameters]
        axes.plot([r.devices for r in mine], [r.parameters for r in mine], marker="o", label=way)
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="parameters", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)
