"""`autopar plan`: capture a model without memory, search how to split it, say why, and write the plan."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from autopar.cache.captures import CapturedModel, captured_model
from autopar.cache.store import cache_folder
from autopar.cli.options import (
    SEARCH,
    Clusters,
    Fix,
    Forbid,
    Hidden,
    Json,
    Layers,
    MeasuredOption,
    ModelArgument,
    Objective,
    Profile,
    Seed,
    Specialise,
    Tokens,
    Trains,
    default_global_batch,
    option,
    refuse_options,
    values_by_word,
)
from autopar.cli.output import console, print_ends, print_json, print_run, print_sections, progress, table
from autopar.cost_model.interval import DEFAULT_CHANCE, chance_of_fitting
from autopar.errors import InfeasibleError, Problem
from autopar.ir.cluster import ClusterSpec
from autopar.ir.explanation import Section
from autopar.ir.plan import sections
from autopar.models.load import is_factory
from autopar.planning.options import TOP, TRIALS, PlanOptions
from autopar.search.result.format import (
    chance_in_words,
    nothing_fits,
    plan_in_words,
    readable_value,
    step_in_words,
    what_does_not_fit,
)
from autopar.search.result.result import Contender, SearchResult
from autopar.words.numbers import readable_bytes, readable_rate, readable_seconds

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from autopar.cost_model.estimate import RunCost

MOST_MEASURED = 2  # plans beside the best plan
SAFER = 4  # a safer plan fails so many times less
_Top = Annotated[int, option("Number of other plans to show. (default: 5)", panel=SEARCH)]
_Trials = Annotated[
    int,
    option(f"Variations of stage cuts to try. If there are more, Optuna chooses. (default: {TRIALS})", panel=SEARCH),
]
_Timeout = Annotated[
    float | None,
    option("Seconds after which the search ends with the best plan so far and its gap. (default: none)", panel=SEARCH),
]
_Chance = Annotated[
    float,
    option("Probability with which a plan must fit, by the interval of its memory. (default: 0.9)", panel=SEARCH),
]
_Study = Annotated[
    str | None,
    option(
        "Keep the search's prices and Optuna's trials in this .log file, .db file or database URL. Later searches and "
        "other processes continue it. (default: none)",
        panel=SEARCH,
    ),
]


def plan(
    model: ModelArgument,
    cluster: Clusters,
    options: PlanOptions,
    objective: Objective = "time",
    fix: Fix = None,
    forbid: Forbid = None,
    top: _Top = TOP,
    trials: _Trials = TRIALS,
    timeout: _Timeout = None,
    chance: _Chance = DEFAULT_CHANCE,
    seed: Seed = 0,
    study: _Study = None,
    profile: Profile = None,
    measured: MeasuredOption = None,
    layers: Layers = None,
    hidden: Hidden = None,
    trains: Trains = "all",
    tokens: Tokens = None,
    specialise: Specialise = False,
    out: Annotated[Path | None, option("Write the plan to this file (JSON).", "--out", "-o")] = None,
    report: Annotated[Path | None, option("Write a page about the search to this file (HTML).")] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest split of MODEL over a cluster, and explain it. Needs no GPU and no memory for the weights.

    The search compares all legal combinations of degrees, ZeRO stage, micro-batch, schedule and order of ranks. An
    option such as --tp 8 or --fix zero=1,3 narrows it. Without --global-batch, each device has one
    sequence, or the batch of a factory's example inputs.

    Example: autopar plan llama3-8b -c 64xh100 --seq-len 8192 --global-batch 128 -o plan.json
    """
    from autopar.cost_model.machine.cluster import precision_on

    specs = [ClusterSpec.parse(each) for each in cluster]
    precisions = [precision_on(options.precision, spec) for spec in specs]
    if len(specs) > 1:
        only_one = {"--out": out, "--report": report, "--study": study, "--profile": profile, "--measured": measured}
        rule = "is of one cluster, and there are several"
        refuse_options([Problem(path=name, value=str(v), rule=rule) for name, v in only_one.items() if v is not None])
    options = replace(options, fix=values_by_word("--fix", fix), forbid=values_by_word("--forbid", forbid))
    options.check()
    request = replace(
        options, objective=objective, top=top, trials=trials, seed=seed, timeout_s=timeout, chance=chance, study=study,
        report=report is not None,
    )  # fmt: skip
    sizes = {"layers": layers, "hidden": hidden, "seq_len": options.seq_len, "trains": trains, "specialise": specialise}
    with progress(f"capturing {model}") as on_progress:
        results = [
            _planned(model, spec, wanted, options, request, sizes, (profile, measured), on_progress)
            for spec, wanted in zip(specs, precisions, strict=True)
        ]
    runs = [
        None if tokens is None or result.best is None else _whole_run(result, spec, tokens)
        for result, spec in zip(results, specs, strict=True)
    ]
    data = [
        result.to_dict() | ({} if run is None else {"run": asdict(run)})
        for result, run in zip(results, runs, strict=True)
    ]
    result = results[0]
    if out is not None and result.plan is not None:
        result.plan.save(out)
    if report is not None:
        from autopar.report.write import write_report

        write_report(result, report)
    if as_json:
        print_json(data[0] if len(data) == 1 else data)
    if all(each.plan is None for each in results):
        raise InfeasibleError(nothing_fits(result))
    if as_json or result.plan is None or len(results) > 1:
        if not as_json:
            console().print(_side_by_side(results, runs))
        return
    print_sections([*result_sections(result), *sections(result.plan)], console())
    if runs[0] is not None:
        print_run(runs[0], console())
    print_ends([f"assumed: {assumption}" for assumption in result.assumptions], out, report)


def _planned(
    model: str,
    cluster: ClusterSpec,
    wanted: str,
    options: PlanOptions,
    request: PlanOptions,
    sizes: Mapping[str, Any],
    corrections: tuple[Path | None, Path | None],
    on_progress: Callable[[str], None],
) -> SearchResult:
    """The best plan of a model on one cluster, perhaps in the `wanted` precision of its devices.

    `corrections` are a profile and measured steps.
    """
    is_own = is_factory(model)
    # on CPUs a preset computes in the float32 in which it is built
    is_named = options.precision is not None or (not is_own and wanted != "fp32")
    request = replace(
        request,
        global_batch=options.global_batch or default_global_batch(options, cluster.num_devices, None),
        profile=_corrected(*corrections, cluster, wanted),
        precision=wanted if is_named else None,
    )
    request.check_search(cluster.num_devices)  # before the model is captured, which takes longer
    capture = partial(
        captured_model, model, folder=cache_folder(), cluster=cluster, dtype=None if is_own else "float32",
        staged=request.is_staged, **sizes,
    )  # fmt: skip
    search = partial(_captured_and_searched, capture, cluster, options, corrections[1], on_progress)
    result: SearchResult = search(request)
    if request.precision == "fp32":
        from autopar.planning.precision import with_bf16_beside

        result = with_bf16_beside(result, request, cluster, search)
    return result


def _side_by_side(results: Sequence[SearchResult], runs: Sequence["RunCost | None"]) -> "Table | Group":
    """The best plans on several clusters, the fastest first."""
    columns = ("cluster", "plan", "step", "tokens/s", "fits with", "days", "US dollars", "kWh with hosts")
    rows = []
    for result, run in zip(results, runs, strict=True):
        best = result.best
        if best is None:
            rows.append((0.0, (result.cluster, "no plan fits", *[""] * 6)))
            continue
        per_s = result.global_batch * result.sequence / best.step_s
        cost = (
            [""] * 3
            if run is None
            else [f"{run.days:,.1f}", *("" if v is None else f"{v:,.0f}" for v in (run.price_usd, run.site_kwh))]
        )
        chance = chance_in_words(result.chance_of_fitting or 0.0).removeprefix("fits with ")
        cells = (plan_in_words(best.degrees), readable_seconds(best.step_s), readable_rate(per_s), chance, *cost)
        rows.append((per_s, (result.cluster, *cells)))
    rows.sort(key=lambda row: -row[0])
    return table(columns, [cells for _, cells in rows], right=columns[2:])


def _corrected(profile: Path | None, measured: Path | None, cluster: ClusterSpec, precision: str) -> Any:
    if profile is measured is None:
        return None
    from autopar.planning.measured import profile_for

    return profile_for(profile, measured, cluster, precision)


def _captured_and_searched(
    capture: Callable[..., CapturedModel],
    cluster: ClusterSpec,
    options: PlanOptions,
    measured: Path | None,
    on_progress: Callable[[str], None],
    request: PlanOptions,
) -> SearchResult:
    started = time.monotonic()
    captured = capture(precision=request.precision)
    narrowed = replace(request, precision=request.precision or captured.precision)
    if options.global_batch is None and captured.local_batch is not None:
        batch = default_global_batch(options, cluster.num_devices, captured.local_batch)
        narrowed = replace(narrowed, global_batch=batch)
    capture_s = time.monotonic() - started
    if narrowed.timeout_s is not None:  # a capture counts too
        narrowed = replace(narrowed, timeout_s=max(0.0, narrowed.timeout_s - capture_s))
    if measured is not None:
        from autopar.planning.search import with_trace

        narrowed = with_trace(narrowed, measured, captured.capture, cluster, on_progress)
    if captured.local_batch is None:  # searches of models that autopar builds itself are kept, as their captures are
        from autopar.cache.plans import kept_search

        result = kept_search(cache_folder(), captured, cluster, narrowed, on_progress=on_progress)
    else:
        from autopar.planning.captured_search import search_captured

        result = search_captured(captured.capture, cluster, narrowed, name=captured.name, on_progress=on_progress)
    late = overtime(request, capture_s, time.monotonic() - started)
    return replace(result, notes=(*result.notes, *captured.notes, *late))


def overtime(request: PlanOptions, capture_s: float, all_s: float) -> Iterator[str]:
    """What took longer than the limit: nothing ends a capture, nor the prices without which there is no plan."""
    if request.timeout_s is not None and all_s > request.timeout_s + 1:
        yield (
            f"{all_s:.0f} s instead of {request.timeout_s:g} s: {capture_s:.0f} s to build and capture the model, "
            f"{all_s - capture_s:.0f} s to choose labels and to price the shown plans"
        )


def result_sections(result: SearchResult) -> list[Section]:
    """The best plan, the next plans with reasons, and the candidates that were ruled out."""
    return [_best(result), _others(result), _not_possible(result)]


def _best(result: SearchResult) -> Section:
    from autopar.report.words import proof_in_words

    best = result.best
    assert best is not None
    of_a_step, rate = step_in_words(result.global_batch, result.sequence)
    per_s = result.global_batch * result.sequence / best.step_s
    lines = [
        plan_in_words(best.degrees),
        *([] if result.unit == "s" else [f"{result.objective} {readable_value(best.value, result.unit)}"]),
        f"{readable_seconds(best.step_s)} a step of {of_a_step}: {readable_rate(per_s)} {rate}, "
        f"{readable_rate(per_s / best.num_devices)} of a device",
        f"{readable_bytes(best.peak_bytes)} of {readable_bytes(result.device_bytes)} on the fullest device: "
        f"{chance_in_words(result.chance_of_fitting or 0.0)}",
        *_safer(result),
    ]
    if result.step_interval_s is not None and result.peak_interval_bytes is not None:
        step = " to ".join(map(readable_seconds, result.step_interval_s))
        peak = " to ".join(map(readable_bytes, result.peak_interval_bytes))
        lines.append(f"80 % interval: {step} a step, {peak}")
    lines += [
        proof_in_words(result),
        *(note for note in result.notes if result.plan is None or note not in result.plan.notes),
        f"engine {result.engine}, profile {result.profile}; searched in {result.seconds:.1f} s",
    ]
    some = "" if best.num_devices == result.num_devices else f"{best.num_devices:,} of "
    where = f"{some}{result.num_devices:,} device{'s' * (result.num_devices > 1)}, {result.precision}"
    title = f"{result.model} on {result.cluster}, {where}: the best of {result.counted.candidates:,} candidates"
    return Section(title=title, lines=tuple(lines))


def _whole_run(result: SearchResult, cluster: ClusterSpec, tokens: float) -> "RunCost":
    """The whole run under the best plan, on the devices that it uses."""
    from autopar.cost_model.estimate import run_cost

    best = result.best
    assert best is not None
    whole = run_cost(cluster, tokens, result.global_batch * result.sequence, best.step_s, None)
    part = best.num_devices / result.num_devices
    costs = {n: getattr(whole, n) for n in ("device_hours", "price_usd", "energy_kwh", "site_kwh")}
    scaled: dict[str, Any] = {name: None if cost is None else part * cost for name, cost in costs.items()}
    return replace(whole, **scaled)


def _safer(result: SearchResult) -> list[str]:
    """Near the limit, the fastest plan that is safer, and what it costs."""
    best, interval = result.best, result.peak_interval_bytes
    if best is None or interval is None or (result.chance_of_fitting or 1.0) > 1 - (1 - result.chance) / SAFER:
        return []
    for plan in sorted(result.front, key=lambda plan: plan.value):
        room = [bound * plan.peak_bytes / best.peak_bytes for bound in interval]
        chance = chance_of_fitting(plan.peak_bytes, result.device_bytes, (room[0], room[1]))
        if chance >= 1 - (1 - result.chance) / SAFER:
            more = plan.value / best.value - 1
            return [f"safer: {plan_in_words(plan.degrees)}, {chance_in_words(chance)} and takes {more:.1%} more"]
    return []


def _others(result: SearchResult) -> Section:
    shown = {}  # by the plan in words: how much more than the best plan, the plan with its name, the reason
    for plan in sorted((*result.baselines, *result.others), key=lambda plan: plan.value):
        words = plan_in_words(plan.degrees)
        if plan.name and result.best is not None and plan.degrees == result.best.degrees and plan.fits:
            shown[words] = ("best", f"{plan.name} is the best plan", "")
        elif words not in shown:
            named = f"{plan.name}: {words}" if plan.name else words
            shown[words] = (_more(result, plan), named, "; ".join(filter(None, (_value(result, plan), plan.reason))))
    width = max((len(more) for more, _, _ in shown.values()), default=0)
    lines = []
    for more, named, reason in shown.values():
        lines += [f"{more:>{width}}  {named}", *([f"{'':{width}}    {reason}"] if reason else [])]
    if count := len(result.like_best):
        lines.append(
            f"a measurement may put the next {'plan' if count == 1 else f'{count} plans'} before the best plan; "
            f"measure the best plan and the next {min(count, MOST_MEASURED)}"
        )
    title = "Next plans, and plans that people choose by hand"
    return Section(title=title, lines=tuple(lines or ["no other plan was priced"]))


def _more(result: SearchResult, plan: Contender) -> str:
    """How much larger a plan's value is than the best value."""
    if not plan.fits or result.best is None:
        return "too big"
    more = plan.value / result.best.value - 1
    return f"+{more:,.1%}" if more >= 0.0005 else "<0.1%"


def _value(result: SearchResult, plan: Contender) -> str:
    step = readable_seconds(plan.step_s)
    return step if result.unit == "s" else f"{readable_value(plan.value, result.unit)}, {step} a step"


def _not_possible(result: SearchResult) -> Section:
    counted = result.counted
    lines = [what_does_not_fit(counted), *(f"{degrees}: {why}" for degrees, why in counted.refused.items())]
    return Section(title="Candidates that were ruled out", lines=tuple(lines))
