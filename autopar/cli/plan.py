"""`autopar plan`: capture a model without memory, search how to split it, say why, and write the plan."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from autopar.cache.captures import CapturedModel, captured_model
from autopar.cache.store import cache_folder
from autopar.cli.options import (
    SEARCH,
    ClusterOption,
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
    Trains,
    default_global_batch,
    option,
    values_by_word,
)
from autopar.cli.output import console, print_ends, print_json, print_sections, progress
from autopar.cost_model.interval import DEFAULT_CHANCE, chance_of_fitting
from autopar.errors import InfeasibleError
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
    cluster: ClusterOption,
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

    spec = ClusterSpec.parse(cluster)
    options = replace(options, fix=values_by_word("--fix", fix), forbid=values_by_word("--forbid", forbid))
    wanted = precision_on(options.precision, spec)
    options.check()
    is_own = is_factory(model)
    # on CPUs a preset computes in the float32 in which it is built
    is_named = options.precision is not None or (not is_own and wanted != "fp32")
    request = replace(
        options,
        global_batch=options.global_batch or default_global_batch(options, spec.num_devices, None),
        objective=objective,
        top=top,
        trials=trials,
        seed=seed,
        timeout_s=timeout,
        chance=chance,
        study=study,
        report=report is not None,
        profile=_corrected(profile, measured, spec, wanted),
        precision=wanted if is_named else None,
    )
    request.check_search(spec.num_devices)  # before the model is captured, which takes longer
    with progress(f"capturing {model}") as on_progress:
        capture = partial(
            captured_model, model, folder=cache_folder(), specialise=specialise, cluster=spec, layers=layers,
            hidden=hidden, seq_len=options.seq_len, dtype=None if is_own else "float32",
            staged=request.is_staged, trains=trains,
        )  # fmt: skip
        search = partial(_captured_and_searched, capture, spec, options, measured, on_progress)
        result = search(request)
        if request.precision == "fp32":
            from autopar.planning.precision import with_bf16_beside

            result = with_bf16_beside(result, request, spec, search)
    if out is not None and result.plan is not None:
        result.plan.save(out)
    if report is not None:
        from autopar.report.write import write_report

        write_report(result, report)
    if as_json:
        print_json(result.to_dict())
    if result.plan is None:
        raise InfeasibleError(nothing_fits(result))
    if not as_json:
        print_sections([*result_sections(result), *sections(result.plan)], console())
        print_ends([f"assumed: {assumption}" for assumption in result.assumptions], out, report)


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
