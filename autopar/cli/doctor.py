"""`autopar doctor`: check and measure the ranks of a torchrun job, or CPU ranks started here."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.command import FAILED, Answer
from autopar.cli.options import option, problems_of_ranks, refuse_options
from autopar.cli.output import console, print_ends, print_verdict, progress, table
from autopar.errors import Problem
from autopar.ir.cluster import ClusterSpec
from autopar.words.numbers import readable_seconds

if TYPE_CHECKING:
    from autopar.commands.diagnosis import Diagnosis


def doctor(
    ranks: Annotated[
        int | None,
        option("Start this many CPU ranks on this machine.", "--ranks", "-n"),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", "-c", help="Cluster whose speeds are expected, as for `autopar plan`. (default: detect)"
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for a rank that does not answer; then all ranks end.")
    ] = 120.0,
) -> Answer:
    """Check that a cluster computes right, measure its speed, and name slow ranks. Run it first on a new cluster.

    It compares tiny runs with one rank: every conversion of generated code, FSDP2, and a two-stage pipeline. Then it
    measures devices and links on all ranks at once, and prints the figures of the cluster description beside them.

    Example on this machine: autopar doctor --ranks 4

    Example on a cluster: torchrun --nproc-per-node 8 -m autopar doctor

    Exit status: 0 right, 1 a check or a rank failed, 2 wrong input.
    """
    problems = problems_of_ranks(ranks)
    if timeout <= 0:
        problems.append(Problem(path="--timeout", value=timeout, rule="must be greater than 0"))
    refuse_options(problems)
    with progress("importing torch") as on_progress:
        from autopar.commands.doctor import examine, examine_here, leave

        if ranks is not None:
            on_progress(f"{ranks} ranks at work")
            spec = None if cluster is None else ClusterSpec.parse(cluster)
            diagnosis = examine_here(ranks, spec, timeout_s=timeout)
        else:
            diagnosis = examine(ClusterSpec.parse(cluster or "detect"), timeout_s=timeout, on_progress=on_progress)
            leave()
    status = 0 if diagnosis.passed else FAILED
    if os.environ.get("RANK", "0") != "0":
        raise typer.Exit(status)
    return Answer(data=diagnosis.to_dict(), show=lambda: _show(diagnosis), status=status)


def _show(diagnosis: "Diagnosis") -> None:
    out = console()
    number = len(diagnosis.ranks)
    out.print(f"{number} rank{'s' * (number > 1)} of {diagnosis.cluster}, {diagnosis.backend}\n", style="bold")
    columns = ("compared with one rank", "worst", "allowed", "", "worst place, or number compared")
    rows = []
    for check in diagnosis.checks:
        error = "no number" if check.error is None else f"{check.error:.1e}"
        where = f"rank {check.rank}: {check.where}" if check.error != 0 else f"{check.num_compared} comparisons"
        rows.append((check.name, error, f"{check.tolerance:.0e}", "ok" if check.passed else "WRONG", where))
    out.print(table(columns, rows, right=columns[1:3]))
    out.print()
    headings = ("measured", "median of ranks", "worst", "on rank", "cluster says", "reached")
    figures = []
    for figure in diagnosis.figures:
        (rank, worst), promised = figure.worst, figure.promised
        says = reached = ""
        if promised is not None:
            part = promised / figure.middle if figure.unit == "s" else figure.middle / promised
            says, reached = _figure(promised, figure.unit), f"{part:.0%}"
        middle, slowest = _figure(figure.middle, figure.unit), _figure(worst, figure.unit)
        figures.append((figure.name, middle, slowest, str(rank), says, reached))
    out.print(table(headings, figures, right=headings[1:]))
    for rank, parts in diagnosis.slow_ranks.items():
        where = f"rank {rank} ({diagnosis.ranks[rank].device} on {diagnosis.ranks[rank].host})"
        what = ", ".join(f"{name} {1 - part:.0%} under the median" for name, part in parts.items())
        out.print(f"slow: {where}: {what}", style="yellow")
    print_ends([f"note: {note}" for note in diagnosis.notes])
    failed = [f"{c.name} on rank {c.rank}" for c in diagnosis.checks if not c.passed]
    print_verdict(failed, "these ranks compute the same as one rank")


def _figure(value: float, unit: str) -> str:
    if unit == "s":
        return readable_seconds(value)
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:,.2f} {name}{unit}"
    return f"{value:,.0f} {unit}"
