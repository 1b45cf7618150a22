"""`autopar validate`: predictions of published training runs beside their measurements."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.command import Answer
from autopar.cli.options import option, positional, problems_of_target, refuse_options
from autopar.cli.output import console, print_ends, progress, table
from autopar.errors import InputError, did_you_mean, nearest
from autopar.files.atomic import write_text
from autopar.report.validate_report import as_percent, figures, ids_by_text, validation_page

if TYPE_CHECKING:
    from autopar.cost_model.published.row import Row, RowFile
    from autopar.cost_model.published.validation import By, Measures, Validation

_TIERS = ("core", "all")
MAX_IDS = 8
MAX_REASONS = 20


def validate(
    runs: Annotated[
        Path,
        positional("RUNS.csv", "CSV file with the columns of benchmarks/data/README.md, or vTrain's sweep."),
    ],
    tier: Annotated[str, typer.Option(help="Rows to predict: core (rows whose tier is core) or all.")] = "all",
    by: Annotated[
        str, typer.Option(help="Column that splits the table: source_key, gpu_type or group.")
    ] = "source_key",
    out: Annotated[
        Path | None,
        option("Write id,seconds,peak_bytes,fits of every predicted row to this file (CSV)."),
    ] = None,
    report: Annotated[Path | None, option("Write a picture and tables to this file (HTML).")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse the file if a row cannot be used or a column is unknown.")
    ] = False,
) -> Answer:
    """Predict step time and memory of published training runs, and compare with their measurements.

    A prediction sees the model, the machine and the layout of a run, never its results. An error is
    predicted / measured - 1. The last lines name the rows that cannot be used or modelled, with the reason, and the
    unknown columns.

    Example: autopar validate benchmarks/data/published_runs.csv --tier core
    """
    column = _column(by)
    if tier not in _TIERS:
        raise InputError(f"--tier {tier!r} is not known; {did_you_mean(tier, _TIERS)}")
    _check_targets(runs, out, report)
    from autopar.cost_model.published.row import read_row_file
    from autopar.cost_model.published.validation import validate_rows

    with progress(f"reading {runs}") as on_progress:
        file = read_row_file(runs, is_strict=strict)
        rows = _of_tier(runs, file.rows, tier)
        on_progress(f"predicting {len(rows)} rows")
        from autopar.cost_model.published.estimate import estimate_rows

        result = validate_rows(rows, estimate_rows, by=column)
    if report is not None:
        left_out = f", {len(file.left_out)} more left out" if file.left_out else ""
        subtitle = f"{len(rows)} rows of tier {tier}{left_out}; autopar validate"
        page = validation_page(result, title=runs.name, subtitle=subtitle)
        write_text(report, page)
    if out is not None:
        write_text(out, predictions_csv(result))
    left = [{"id": row.id, "reason": row.reason} for row in file.left_out]
    data = result.to_dict() | {"left_out": left, "unknown_columns": list(file.unknown_columns)}

    def show() -> None:
        _show(result)
        _show_unread(file)
        print_ends((), report, out)

    return Answer(data=data, show=show)


def predictions_csv(result: "Validation") -> str:
    """``id,seconds,peak_bytes,fits`` of the modelled rows. `fits` is empty if the device's memory is unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("id", "seconds", "peak_bytes", "fits"))
    for row in (compared.predicted for compared in result.compared):
        if row is not None:
            fits = "" if row.fits is None else str(row.fits).lower()
            writer.writerow((row.id, repr(float(row.seconds)), round(row.peak_bytes), fits))
    return text.getvalue()


def _column(by: str) -> "By":
    from autopar.cost_model.published.validation import BY

    for column in BY:
        if by == column:
            return column
    raise InputError(f"--by {by!r} is not known; {did_you_mean(by, BY)}")


def _of_tier(runs: Path, rows: "Sequence[Row]", tier: str) -> "list[Row]":
    wanted = [row for row in rows if tier == "all" or row.tier == tier]
    if not rows:
        raise InputError(f"{runs} has a header and no rows")
    if not wanted:
        tiers = ", ".join(sorted({row.tier or "none" for row in rows})[:5])
        raise InputError(f"none of the {len(rows)} rows of {runs} has tier {tier} ({tiers} only): use --tier all")
    return wanted


def _check_targets(runs: Path, out: Path | None, report: Path | None) -> None:
    """Refuse before any work what cannot be written in the end."""
    refuse_options([*problems_of_target("--out", out), *problems_of_target("--report", report)])
    for name, path in (("--out", out), ("--report", report)):
        if path is not None and path.exists() and runs.exists() and path.samefile(runs):
            raise InputError(f"{name} {path} is the file of the runs: name another")
    if out is not None and report is not None and out.absolute() == report.absolute():
        raise InputError(f"--out and --report both name {out}: name two files")


def _show(result: "Validation") -> None:
    out = console()
    overall = result.overall
    out.print(_headline(overall), style="bold")
    out.print()
    columns = (
        *(result.by_column, "rows", "modelled", "timed", "median", "mean", "p90", "worst", "bias"),
        *("memory", "median", "p90", "bias", "groups", "rank corr.", "regret"),
    )
    lines = [(name, *_cells(part)) for name, part in result.by.items()]
    out.print(table(columns, [*lines, ("all", *_cells(overall))], right=columns[1:]))
    out.print()
    weighed = result.mean_over_sources
    if weighed["step_time"] is not None:
        memory = "" if weighed["memory"] is None else f", of memory {as_percent(weighed['memory'])}"
        text = f"every source weighed once: mean of the median errors {as_percent(weighed['step_time'])}{memory}"
        out.print(text)
    _show_rest(result)


def _headline(overall: "Measures") -> str:
    share = f"{overall.modelled} of {overall.rows} rows modelled"
    if overall.stated < overall.rows:
        share += f" ({overall.stated_modelled} of the {overall.stated} that state enough)"
    if overall.step_time.n == 0:
        return share
    time = overall.step_time
    return f"{share}; step time: median error {as_percent(time.median)}, p90 {as_percent(time.p90)}"


def _show_rest(result: "Validation") -> None:
    out = console()
    ranking, oom = result.overall.ranking, result.overall.oom
    if ranking.groups:
        out.print(
            f"{ranking.groups} groups of layouts of the same work ({ranking.layouts} layouts): rank correlation "
            f"{ranking.correlation_median:.2f} in the median group, {ranking.correlation_p10:.2f} in the worst tenth; "
            f"measured regret {as_percent(ranking.regret_median)} and {as_percent(ranking.regret_p90)}"
        )
    for inside, count, what in (
        (result.overall.time_inside, result.overall.step_time.n, "step times"),
        (result.overall.memory_inside, result.overall.memory.n, "peak memories"),
    ):
        if count:
            out.print(f"{inside} of {count} measured {what} are in the 80% interval of the prediction")
    if oom.oom_rows:
        text = f"{oom.oom_predicted} of {oom.oom_rows} rows that ran out of memory are predicted not to fit"
        out.print(text)
    if oom.ok_rows:
        text = f"{oom.ok_predicted_oom} of {oom.ok_rows} rows that ran are predicted not to fit"
        out.print(text)
    _show_by_reason("warning", ((text, row_id) for row_id, text in result.warnings))
    _show_by_reason("not modelled", ((row.reason, row.id) for row in result.unmodelled))


def _show_unread(file: "RowFile") -> None:
    """Rows that were left out, and columns that nothing reads."""
    from autopar.cost_model.published.row import COLUMNS

    _show_by_reason("left out", ((row.reason, row.id) for row in file.left_out))
    if file.unknown_columns:
        near = {name: nearest(name, COLUMNS) for name in file.unknown_columns}
        names = [f"{name[:80]!r}" + (f" (did you mean {hint!r}?)" if hint else "") for name, hint in near.items()]
        console().print(f"columns that are not known, and not read: {_shown(names)}", style="yellow")


def _show_by_reason(what: str, rows: Iterable[tuple[str, str]]) -> None:
    ids_by_reason = ids_by_text(rows)
    for reason, ids in list(ids_by_reason.items())[:MAX_REASONS]:
        console().print(f"{what}, {reason}: {_shown(ids)}", style="yellow")
    if len(ids_by_reason) > MAX_REASONS:
        console().print(f"{what}: and {len(ids_by_reason) - MAX_REASONS} more reasons (--json)", style="yellow")


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_IDS} more" if len(names) > MAX_IDS else ""
    return f"{', '.join(names[:MAX_IDS])}{more}"


def _cells(part: "Measures") -> tuple[str, ...]:
    ranking = part.ranking
    correlation = "" if ranking.correlation_median is None else f"{ranking.correlation_median:.2f}"
    return (*figures(part), str(ranking.groups or ""), correlation, as_percent(ranking.regret_median))
