"""`autopar estimate`: step time, throughput, utilisation and peak memory of a plan, each with its parts."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.command import Answer
from autopar.cli.options import (
    ClusterOption,
    Hidden,
    Layers,
    MeasuredOption,
    ModelArgument,
    Profile,
    Specialise,
    Tokens,
    Trains,
    naming,
    option,
    problems_of_target,
    refuse_options,
)
from autopar.cli.output import console, print_ends, print_run, progress, table
from autopar.cost_model.interval import DEFAULT_CHANCE
from autopar.errors import InputError, Problem
from autopar.files.strict_text import read_text, values_of
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import MAX_PLAN_BYTES, Plan
from autopar.models.load import is_factory, resolve_model
from autopar.planning.options import PlanOptions
from autopar.presets.models import model_names
from autopar.search.result.format import chance_in_words, plan_in_words, step_in_words
from autopar.words.numbers import readable_bytes, readable_count, readable_rate, readable_seconds

if TYPE_CHECKING:
    from autopar.cost_model.estimate import Estimate
    from autopar.cost_model.fit.predicted_vs_measured import Comparison
    from autopar.cost_model.machine.engine import Engine
    from autopar.cost_model.machine.profile import DeviceProfile

_ExactMemory = Annotated[
    bool,
    typer.Option(
        "--exact-memory",
        help="Count the tensors of a rank under autopar's engine instead of using formulas. Takes seconds more.",
    ),
]
_Grams = Annotated[float | None, option("Grams of CO2 per kWh of electricity, with --tokens. Adds CO2.")]
_Trace = Annotated[Path | None, option("Compare with this measured step of the same plan (see `autopar trace`).")]
_Correct = Annotated[Path | None, option("With --trace: write the profile, corrected by the trace, to this file.")]
CORRECTED, MAX_NAME = "-corrected", 60


def estimate(
    model: ModelArgument,
    cluster: ClusterOption,
    options: PlanOptions,
    engine: Annotated[
        str, typer.Option(help="Framework that runs the plan: autopar, or another one such as megatron or fsdp.")
    ] = "autopar",
    profile: Profile = None,
    measured: MeasuredOption = None,
    tokens: Tokens = None,
    grams_co2_per_kwh: _Grams = None,
    exact_memory: _ExactMemory = False,
    trace: _Trace = None,
    correct: _Correct = None,
    layers: Layers = None,
    hidden: Hidden = None,
    trains: Trains = "all",
    specialise: Specialise = False,
) -> Answer:
    """Predict step time and memory of MODEL under a plan on a cluster. Needs no GPU and no memory for the weights.

    You give the degrees, and autopar chooses how operators are split. Without degrees the plan is fully sharded data
    parallelism (ZeRO 3). MODEL may also be a plan file of `autopar plan --out`, which has model and degrees.

    Example: autopar estimate llama3-8b -c 64xh100 --seq-len 8192 --global-batch 128 --tp 2 --zero 1 --tokens 15e12
    """
    recorded = _checked_trace(trace, correct, engine)
    precision = options.precision
    spec, known_engine, known_profile, wanted = _inputs(
        cluster, engine, (profile, measured), precision, tokens, grams_co2_per_kwh
    )
    given = model
    model, plan = _model_and_plan(model, options)
    degrees = options.degrees(spec.num_devices) if plan is None else plan.degrees
    seq_len = options.seq_len if plan is None else plan.sequence
    with naming(None if plan is None else given), progress(f"building {model}") as on_progress:
        is_own = is_factory(model)
        batch, seq_len, dtype = (None, options.seq_len, None) if is_own else (degrees.local_batch, seq_len, "float32")
        sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "seq_len": seq_len, "batch": batch}
        built = resolve_model(model, **sizes, dtype=dtype, trains=trains)
        from autopar.planning.estimate import estimate as run
        from autopar.planning.measured import is_trace

        price = run(
            built.model,
            spec,
            plan or {name: value for name, value in options.wish().items() if name != "precision"},
            example_inputs=built.example_inputs,
            loss_fn=built.loss_fn,
            specialise=specialise,
            global_batch=options.global_batch,
            engine=known_engine,
            profile=known_profile,
            measured=measured if is_trace(measured) else None,
            precision=wanted if precision is not None or not (is_own or plan) else None,
            tokens=tokens,
            grams_co2_per_kwh=grams_co2_per_kwh,
            exact_memory=exact_memory,
            name=built.name,
            on_progress=lambda text: on_progress(f"{built.name}: {text}"),
        )
    comparison = None
    if trace is not None and recorded is not None:
        with values_of(trace, "trace a step of this plan"):
            comparison = _compared(price, recorded, correct, known_profile, spec)

    def show() -> None:
        _show(price)
        if comparison is not None and trace is not None:
            _show_trace(comparison, trace, correct)
        print_ends(built.notes)

    compared = {} if comparison is None else {"trace": _trace_to_dict(comparison, correct)}
    return Answer(data=price.to_dict() | compared, show=show)


def _model_and_plan(model: str, options: PlanOptions) -> tuple[str, Plan | None]:
    """The model and the plan of a plan file, or the model itself."""
    is_file = model.endswith(".json") and Path(model).is_file()
    if not is_file or '"fingerprint"' not in (read_text(model, max_bytes=MAX_PLAN_BYTES)[0] or ""):
        return model, None
    options.refuse_beside_plan()
    plan = Plan.load(model)
    if not is_factory(plan.model) and plan.model not in model_names():
        raise InputError(
            f"plan file {model} is of {plan.model or 'a model without a name'}, which is no preset and no factory; "
            f"price it by autopar.estimate(model, cluster, {model!r})"
        )
    return plan.model, plan


def _inputs(
    cluster: str,
    engine: str,
    profile: tuple[Path | None, Path | None],
    precision: str | None,
    tokens: float | None,
    grams: float | None,
) -> "tuple[ClusterSpec, Engine, DeviceProfile, str]":
    """All options that need no model, checked before one is built. One error lists all problems."""
    from autopar.cost_model.machine.cluster import DTYPES, cluster_machine, default_precision
    from autopar.cost_model.machine.engine import engine_named
    from autopar.cost_model.machine.fitted_constants import mechanisms
    from autopar.planning.measured import profile_for

    problems = [
        Problem(path=option, value=value, rule="must be a number greater than 0")
        for option, value in (("--tokens", tokens), ("--grams-co2-per-kwh", grams))
        if value is not None and not 0 < value < float("inf")
    ]
    if grams is not None and tokens is None:
        problems.append(
            Problem(path="--grams-co2-per-kwh", rule="needs the tokens of a run", suggestion="add --tokens")
        )
    if precision is not None and precision not in DTYPES:
        problems.append(Problem(path="--precision", value=precision, rule=f"must be one of {', '.join(DTYPES)}"))
    refuse_options(problems)
    framework = engine_named(engine)
    spec = ClusterSpec.parse(cluster)
    wanted = precision or default_precision(spec)
    corrected = profile_for(*profile, spec, wanted, framework)
    machine = cluster_machine(spec, framework, mechanisms(), precision=wanted, profile=corrected)
    return spec, framework, machine.profile, wanted


# ---- printing ----


def _show(price: "Estimate") -> None:
    out, step_s = console(), price.step_s
    title = f"{price.model} ({readable_count(price.num_parameters)} parameters) on {price.cluster}"
    out.print(f"{title}: {plan_in_words(price.degrees)}", style="bold")
    size, rate = step_in_words(price.global_batch, price.sequence)
    out.print(f"{size} a step; engine {price.engine}, {price.precision}, profile {price.profile}\n")
    peak = f"{readable_bytes(price.peak_bytes)} of {readable_bytes(price.device_bytes)}"
    rows = [
        ("step", f"{readable_seconds(step_s)} ({_between(price.step_interval_s, readable_seconds)})"),
        (rate, readable_rate(price.tokens_per_s)),
        (f"{rate} of a device", readable_rate(price.tokens_per_s_per_device)),
        ("TFLOP/s of a device", readable_rate(price.tflops_per_device)),
        ("MFU, HFU", f"{price.mfu:.1%}, {price.hfu:.1%}"),
        ("peak memory", f"{peak} ({_between(price.peak_interval_bytes, readable_bytes)})"),
        ("", chance_in_words(price.chance_of_fitting)),
    ]
    if price.host_bytes:
        rows.append(("host memory of a device", readable_bytes(price.host_bytes)))
    if price.num_devices > price.least_devices:
        devices = f"{price.least_devices} device{'s' if price.least_devices > 1 else ''}"
        rows.append(("scaling efficiency", f"{price.scaling_efficiency:.1%} of {devices}"))
    out.print(table(("", ""), rows))
    if not price.fits:
        text = f"does not fit with {DEFAULT_CHANCE:.0%}; `autopar plan` searches a plan that does"
        out.print(text, style="bold red")
    least = 1e-9 * step_s  # less is the rounding of a part that is 0
    times = [
        *((what, "", s, 0.0) for what, s in price.compute_s.items()),
        *((c.what, c.mesh_dim, c.exposed_s, c.hidden_s) for c in price.collectives),
        *((what, "", s, 0.0) for what, s in price.other_s.items()),
    ]
    spent = [
        (what, dim, readable_seconds(s), _part(s, step_s), readable_seconds(hidden) if hidden > least else "")
        for what, dim, s, hidden in times
        if max(s, hidden) > least
    ]
    out.print()
    out.print(
        table(("time of a step", "mesh", "seconds", "part", "hidden"), spent, right=("seconds", "part", "hidden"))
    )
    out.print()
    memory = [(what, readable_bytes(size), _part(size, price.peak_bytes)) for what, size in price.memory_bytes.items()]
    out.print(table(("memory of the fullest rank", "", "part"), [row for row in memory if row[2]], right=("", "part")))
    if price.run is not None:
        print_run(price.run, out)
    for feature in price.formula_only:
        out.print(f"formula only: {feature}", style="yellow")
    print_ends([f"assumed: {assumption}" for assumption in price.assumptions])


def _between(bounds: tuple[float, float], readable: Callable[[float], str]) -> str:
    """An interval, in which a measurement was in four of five published runs."""
    return f"80% interval {readable(bounds[0])} to {readable(bounds[1])}"


def _part(value: float, whole: float) -> str:
    return f"{value / whole:.1%}" if value else ""


# ---- the trace of a step ----


def _checked_trace(trace: Path | None, correct: Path | None, engine: str) -> dict[str, Any] | None:
    """The trace's content. All options are checked before a model is built."""
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


def _compared(
    price: "Estimate",
    trace: dict[str, Any],
    correct: Path | None,
    profile: "DeviceProfile",
    cluster: ClusterSpec,
) -> "Comparison":
    """The estimate beside the trace. With `correct`, a profile with scaled constants is written there."""
    from autopar.cost_model.fit.predicted_vs_measured import BAND, corrected
    from autopar.cost_model.fit.profile_comparison import compare_trace, tiers_of
    from autopar.cost_model.machine.profile_io import dump_profile

    comparison = compare_trace(price, trace, band=BAND)
    if correct is not None:
        new = corrected(profile, comparison, tiers=tiers_of(cluster, price.degrees))
        name = profile.name.removesuffix(CORRECTED)[: MAX_NAME - len(CORRECTED)] + CORRECTED
        dump_profile(replace(new, name=name), correct)
    return comparison


def _trace_to_dict(comparison: "Comparison", correct: Path | None) -> dict[str, Any]:
    return {
        "band": comparison.band,
        "predicted_s": comparison.total.predicted_s,
        "measured_s": comparison.total.measured_s,
        "terms": [asdict(term) for term in comparison.terms],
        "outside": [term.name for term in comparison.outside],
        "corrected": None if correct is None else str(correct),
    }


def _show_trace(comparison: "Comparison", trace: Path, correct: Path | None) -> None:
    from autopar.cost_model.fit.profile_comparison import sentence

    out = console()
    off = {term.name for term in comparison.outside}
    rows = [
        (
            term.name,
            readable_seconds(term.predicted_s),
            readable_seconds(term.measured_s),
            f"{term.predicted_s / term.measured_s:.2f}" if term.measured_s else "",
            "off" if term.name in off else "",
        )
        for term in (*comparison.terms, comparison.total)
    ]
    columns = (f"beside {trace.name}", "predicted", "measured", "ratio", "")
    out.print()
    out.print(table(columns, rows, right=columns[1:4]))
    out.print(sentence(comparison))
    out.print("the optimizer is no part of a trace, and not compared")
    if correct is not None:
        out.print(f"corrected profile written to {correct}; estimate again with --profile {correct}")
