"""What `autopar estimate --trace` adds: the estimate beside a real step, and the profile that it corrects."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.options.checks import problems_of_target, refuse_options
from autopar.cli.output import console, table
from autopar.errors import Problem
from autopar.files.strict_text import values_of
from autopar.ir.cluster import ClusterSpec
from autopar.ir.explanation import readable_seconds

if TYPE_CHECKING:
    from autopar.cost_model.estimate import Estimate
    from autopar.cost_model.fit.predicted_vs_measured import Comparison
    from autopar.cost_model.machine.profile import DeviceProfile

Trace = Annotated[
    Path | None,
    typer.Option(help="Compare with this measured step of the same plan (see `autopar trace`).", show_default=False),
]
Correct = Annotated[
    Path | None,
    typer.Option(help="With --trace: write the profile, corrected by the trace, to this file.", show_default=False),
]
CORRECTED = "-corrected"
MAX_NAME = 60


def check_trace_options(trace: Path | None, correct: Path | None, engine: str) -> "dict[str, Any] | None":
    """The trace's content, read before a model is built; everything wrong with the options at once."""
    problems = []
    if trace is None and correct is not None:
        problems.append(Problem(path="--correct", rule="needs a measured step", suggestion="add --trace FILE"))
    if trace is not None and engine != "autopar":
        rule = "a trace is of autopar's engine, so the estimate must be of this engine too"
        problems.append(Problem(path="--trace", value=engine, rule=rule, suggestion="leave out --engine"))
    refuse_options(problems + problems_of_target("--correct", correct))
    if trace is None:
        return None
    from autopar.cost_model.fit.profile_parts import WRITTEN_BY, measured_parts, read_trace

    with values_of(trace, WRITTEN_BY):
        content = read_trace(trace)
        measured_parts(content)
    return dict(content)


def compared(
    made: "Estimate",
    trace: "dict[str, Any] | None",
    correct: Path | None,
    profile: "DeviceProfile",
    cluster: ClusterSpec,
) -> "Comparison | None":
    """The estimate beside the trace, if there is one. With `correct` the profile is written there, with the constants
    behind the terms that are off scaled, under a name of its own."""
    if trace is None:
        return None
    from autopar.cost_model.fit.predicted_vs_measured import BAND, corrected
    from autopar.cost_model.fit.profile_comparison import compare_trace, tiers_of
    from autopar.cost_model.machine.profile_io import dump_profile

    found = compare_trace(made, trace, band=BAND)
    if correct is not None:
        new = corrected(profile, found, tiers=tiers_of(cluster, made.degrees))
        name = profile.name.removesuffix(CORRECTED)[: MAX_NAME - len(CORRECTED)] + CORRECTED
        dump_profile(replace(new, name=name), correct)
    return found


def trace_to_dict(found: "Comparison", correct: Path | None) -> dict[str, Any]:
    """Plain data for JSON; `outside` names the terms that are off, the worst first."""
    return {
        "band": found.band,
        "predicted_s": found.total.predicted_s,
        "measured_s": found.total.measured_s,
        "terms": [asdict(term) for term in found.terms],
        "outside": [term.name for term in found.outside],
        "corrected": None if correct is None else str(correct),
    }


def show_trace(found: "Comparison", trace: Path, correct: Path | None) -> None:
    from autopar.cost_model.fit.profile_comparison import sentence

    out = console()
    off = {term.name for term in found.outside}
    rows = [
        (
            term.name,
            readable_seconds(term.predicted_s),
            readable_seconds(term.measured_s),
            f"{term.predicted_s / term.measured_s:.2f}" if term.measured_s else "",
            "off" if term.name in off else "",
        )
        for term in (*found.terms, found.total)
    ]
    columns = (f"beside {trace.name}", "predicted", "measured", "ratio", "")
    out.print()
    out.print(table(columns, rows, right=columns[1:4]))
    out.print(sentence(found))
    out.print("the optimizer is no part of a trace, and not compared")
    if correct is not None:
        out.print(f"corrected profile written to {correct}; estimate again with --profile {correct}")
