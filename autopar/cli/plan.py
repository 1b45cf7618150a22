"""`autopar plan`: capture a model without memory, search how to split it, say why, and write the plan."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cache.captures import CapturedModel, captured_model
from autopar.cache.store import cache_folder
from autopar.cli.options.model_argument import ClusterOption, Hidden, Json, Layers, ModelArgument, Specialise
from autopar.cli.options.plan_options import default_global_batch, values_by_word
from autopar.cli.options.search_options import (
    Fix,
    Forbid,
    Measured,
    Objective,
    Profile,
    Seed,
    Study,
    Timeout,
    Top,
    Trials,
)
from autopar.cli.output import console, print_json, print_sections, progress
from autopar.cli.results.plan_result import result_sections
from autopar.errors import InfeasibleError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.explanation import sections
from autopar.ir.plan import Plan
from autopar.models.load import is_factory
from autopar.planning.options import TOP, TRIALS, PlanOptions
from autopar.search.result.format import nothing_fits

if TYPE_CHECKING:
    from autopar.search.result.result import SearchResult


def plan(
    model: ModelArgument,
    cluster: ClusterOption,
    options: PlanOptions,
    objective: Objective = "time",
    fix: Fix = None,
    forbid: Forbid = None,
    top: Top = TOP,
    trials: Trials = TRIALS,
    timeout: Timeout = None,
    seed: Seed = 0,
    study: Study = None,
    profile: Profile = None,
    measured: Measured = None,
    layers: Layers = None,
    hidden: Hidden = None,
    specialise: Specialise = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan to this file (JSON).", show_default=False)
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a page about the search to this file (HTML).", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest split of MODEL over a cluster, and explain it. Needs no GPU and no memory for the weights.

    The search compares all legal combinations of degrees, ZeRO stage, micro-batch, schedule and order of ranks. An
    option such as --tp 8 or --fix zero=1,3 narrows it. Without --global-batch, each device has one
    sequence, or the batch of a factory's example inputs.

    Example: autopar plan llama3-8b -c 64xh100 --seq-len 8192 --global-batch 128 -o plan.json
    """
    from autopar.cost_model.machine.cluster import checked_precision
    from autopar.planning.measured import profile_for

    spec = ClusterSpec.parse(cluster)
    options = replace(options, fix=values_by_word("--fix", fix or ()), forbid=values_by_word("--forbid", forbid or ()))
    wanted = checked_precision(options.precision, spec)
    options.check()
    is_own = is_factory(model)
    # on CPUs a preset computes in the float32 in which it is built
    is_named = options.precision is not None or (not is_own and wanted != "fp32")
    asked = replace(
        options,
        global_batch=options.global_batch or default_global_batch(options, spec.num_devices, None),
        objective=objective,
        top=top,
        trials=trials,
        seed=seed,
        timeout_s=timeout,
        study=study,
        report=report is not None,
        profile=profile_for(profile, measured, spec, wanted),
        precision=wanted if is_named else None,
    )
    asked.check_search(spec.num_devices)  # before the model is captured, which takes longer
    with progress(f"capturing {model}") as on_progress:
        capture = partial(
            captured_model, model, folder=cache_folder(), specialise=specialise, cluster=spec, layers=layers,
            hidden=hidden, seq_len=options.seq_len, dtype=None if is_own else "float32",
            staged=asked.is_staged,
        )  # fmt: skip
        found = _best(partial(_captured_and_searched, capture, spec, options, measured, on_progress), asked, spec)
    if out is not None and found.plan is not None:
        found.plan.save(out)
    if report is not None:
        from autopar.report.write import write_report

        write_report(found, report)
    if as_json:
        print_json(found.to_dict())
    if found.plan is None:
        raise InfeasibleError(nothing_fits(found))
    if not as_json:
        _show(found, found.plan, [path for path in (out, report) if path is not None])


def _best(search: "Callable[[PlanOptions], SearchResult]", asked: PlanOptions, cluster: ClusterSpec) -> "SearchResult":
    found = search(asked)
    if asked.precision != "fp32":
        return found
    from autopar.planning.precision import with_bf16_beside

    return with_bf16_beside(found, asked, cluster, search)


def _captured_and_searched(
    capture: Callable[..., CapturedModel],
    cluster: ClusterSpec,
    options: PlanOptions,
    measured: Path | None,
    on_progress: Callable[[str], None],
    asked: PlanOptions,
) -> "SearchResult":
    started = time.monotonic()
    captured = capture(precision=asked.precision)
    own = replace(asked, precision=asked.precision or captured.precision)
    if options.global_batch is None and captured.local_batch is not None:
        own = replace(own, global_batch=default_global_batch(options, cluster.num_devices, captured.local_batch))
    capture_s = time.monotonic() - started
    if own.timeout_s is not None:  # a capture counts too
        own = replace(own, timeout_s=max(0.0, own.timeout_s - capture_s))
    found = _searched(captured, cluster, _with_trace(own, measured, captured, cluster, on_progress), on_progress)
    return replace(
        found, notes=(*found.notes, *captured.notes, *overtime(asked, capture_s, time.monotonic() - started))
    )


def overtime(asked: PlanOptions, capture_s: float, all_s: float) -> Iterator[str]:
    """What took longer than the limit: nothing ends a capture, nor the prices without which there is no plan."""
    if asked.timeout_s is not None and all_s > asked.timeout_s + 1:
        yield (
            f"{all_s:.0f} s instead of {asked.timeout_s:g} s: {capture_s:.0f} s to build and capture the model, "
            f"{all_s - capture_s:.0f} s to choose labels and to price the shown plans"
        )


def _with_trace(
    asked: PlanOptions,
    measured: Path | None,
    captured: CapturedModel,
    cluster: ClusterSpec,
    on_progress: Callable[[str], None],
) -> PlanOptions:
    """The request with its profile corrected, if the measured steps are a trace."""
    from autopar.planning.measured import is_trace

    if not is_trace(measured):
        return asked
    from autopar.planning.search import with_trace

    return with_trace(asked, measured, captured.capture, cluster, on_progress)


def _show(found: "SearchResult", decided: Plan, written: Sequence[Path]) -> None:
    stdout = console()
    print_sections(result_sections(found), stdout)
    print_sections(sections(decided), stdout)
    for assumption in found.assumptions:
        stdout.print(f"assumed: {assumption}")
    for path in written:
        stdout.print(f"written to {path}")


def _searched(
    captured: CapturedModel, cluster: ClusterSpec, asked: PlanOptions, on_progress: Callable[[str], None]
) -> "SearchResult":
    """Searches of models that autopar builds itself are kept, as their captures are."""
    if captured.local_batch is None:
        from autopar.cache.plans import kept_search

        return kept_search(cache_folder(), captured, cluster, asked, on_progress=on_progress)
    from autopar.planning.search import search_captured

    return search_captured(captured.capture, cluster, asked, name=captured.name, on_progress=on_progress)
