"""`autopar estimate`: step time, throughput, utilisation and peak memory of a plan, each with its parts."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.options.checks import naming, refuse_options
from autopar.cli.options.model_argument import ClusterOption, Hidden, Json, Layers, ModelArgument, Specialise
from autopar.cli.options.search_options import Measured, Profile
from autopar.cli.output import console, print_json, progress, table
from autopar.cli.results.estimate_trace import Correct, Trace, check_trace_options, compared, show_trace, trace_to_dict
from autopar.cost_model.machine.fitted_constants import usable_in_words
from autopar.cost_model.parts import MEMORY
from autopar.errors import InputError, Problem
from autopar.files.strict_text import read_text, values_of
from autopar.ir.cluster import ClusterSpec
from autopar.ir.explanation import readable_bytes, readable_count, readable_rate, readable_seconds
from autopar.ir.plan import MAX_PLAN_BYTES, Plan
from autopar.models.load import is_factory, resolve_model
from autopar.planning.options import PlanOptions
from autopar.presets.models import model_names
from autopar.search.result.format import plan_in_words

if TYPE_CHECKING:
    from autopar.cost_model.estimate import Estimate, RunCost
    from autopar.cost_model.machine.engine import Engine
    from autopar.cost_model.machine.profile import DeviceProfile

ExactMemory = Annotated[
    bool,
    typer.Option(
        "--exact-memory",
        help="Count the tensors of a rank under autopar's engine instead of using formulas. Takes seconds more.",
    ),
]


def estimate(
    model: ModelArgument,
    cluster: ClusterOption,
    options: PlanOptions,
    engine: Annotated[
        str, typer.Option(help="Framework that runs the plan: autopar, or another one such as megatron or fsdp.")
    ] = "autopar",
    profile: Profile = None,
    measured: Measured = None,
    tokens: Annotated[
        float | None,
        typer.Option(help="Tokens of the whole run, such as 15e12. Adds days, money, energy.", show_default=False),
    ] = None,
    grams_co2_per_kwh: Annotated[
        float | None,
        typer.Option(help="Grams of CO2 per kWh of electricity, with --tokens. Adds CO2.", show_default=False),
    ] = None,
    exact_memory: ExactMemory = False,
    trace: Trace = None,
    correct: Correct = None,
    layers: Layers = None,
    hidden: Hidden = None,
    specialise: Specialise = False,
    as_json: Json = False,
) -> None:
    """Predict step time and memory of MODEL under a plan on a cluster. Needs no GPU and no memory for the weights.

    You give the degrees, and autopar chooses how operators are split. Without degrees the plan is fully sharded data
    parallelism (ZeRO 3). MODEL may also be a plan file of `autopar plan --out`, which has model and degrees.

    Example: autopar estimate llama3-8b -c 64xh100 --seq-len 8192 --global-batch 128 --tp 2 --zero 1 --tokens 15e12
    """
    recorded = check_trace_options(trace, correct, engine)
    precision = options.precision
    spec, found_engine, found_profile, wanted = _inputs(
        cluster, engine, (profile, measured), precision, tokens, grams_co2_per_kwh
    )
    given = model
    model, plan = _model_and_plan(model, options)
    degrees = options.degrees(spec.num_devices) if plan is None else plan.degrees
    seq_len = options.seq_len if plan is None else plan.sequence
    with naming(None if plan is None else given), progress(f"building {model}") as on_progress:
        own = is_factory(model)
        batch, seq_len, dtype = (None, options.seq_len, None) if own else (degrees.local_batch, seq_len, "float32")
        found = resolve_model(model, layers=layers, hidden=hidden, seq_len=seq_len, batch=batch, dtype=dtype)
        from autopar.planning.estimate import estimate as run
        from autopar.planning.measured import is_trace

        made = run(
            found.model,
            spec,
            plan or {name: value for name, value in options.wish().items() if name != "precision"},
            example_inputs=found.example_inputs,
            loss_fn=found.loss_fn,
            specialise=specialise,
            global_batch=options.global_batch,
            engine=found_engine,
            profile=found_profile,
            measured=measured if is_trace(measured) else None,
            precision=wanted if precision is not None or not (own or plan) else None,
            tokens=tokens,
            grams_co2_per_kwh=grams_co2_per_kwh,
            exact_memory=exact_memory,
            name=found.name,
            on_progress=lambda text: on_progress(f"{found.name}: {text}"),
        )
    with nullcontext() if trace is None else values_of(trace, "trace a step of this plan"):
        beside = compared(made, recorded, correct, found_profile, spec)
    if as_json:
        print_json(made.to_dict() | ({"trace": trace_to_dict(beside, correct)} if beside is not None else {}))
        return
    _show(made)
    if beside is not None and trace is not None:
        show_trace(beside, trace, correct)
    for note in found.notes:
        console().print(note)


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
    """Check all options that need no model, before a model is built. One error lists all problems.

    The profile is the given one, or the cluster's, or the shipped one, corrected by the file of measured steps.
    """
    from autopar.cost_model.machine.cluster import PRECISIONS, cluster_machine, default_precision
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
    if precision is not None and precision not in PRECISIONS:
        problems.append(Problem(path="--precision", value=precision, rule=f"must be one of {', '.join(PRECISIONS)}"))
    refuse_options(problems)
    found = engine_named(engine)
    spec = ClusterSpec.parse(cluster)
    wanted = precision or default_precision(spec)
    own = profile_for(*profile, spec, wanted, found)
    machine = cluster_machine(spec, found, mechanisms(), precision=wanted, profile=own)
    return spec, found, machine.profile, wanted


# ---- printing ----


def _show(made: "Estimate") -> None:
    out = console()
    title = f"{made.model} ({readable_count(made.num_parameters)} parameters) on {made.cluster}"
    out.print(f"{title}: {plan_in_words(made.degrees)}", style="bold")
    has_tokens = made.sequence > 1  # a model without a sequence dimension has samples
    rate = "tokens/s" if has_tokens else "samples/s"
    of_tokens = f"sequences of {made.sequence:,} tokens" if has_tokens else "samples"
    size = f"{made.global_batch:,} {of_tokens} a step"
    out.print(f"{size}; engine {made.engine}, {made.precision}, profile {made.profile}\n")
    rows = [
        ("step", f"{readable_seconds(made.step_s)} ({_between(made.step_interval_s, readable_seconds)})"),
        (rate, readable_rate(made.tokens_per_s)),
        (f"{rate} of a device", readable_rate(made.tokens_per_s_per_device)),
        ("TFLOP/s of a device", readable_rate(made.tflops_per_device)),
        ("MFU, HFU", f"{made.mfu:.1%}, {made.hfu:.1%}"),
        (
            "peak memory",
            f"{readable_bytes(made.peak_bytes)} of {readable_bytes(made.device_bytes)} "
            f"({_between(made.peak_interval_bytes, readable_bytes)})",
        ),
        ("without the cache", readable_bytes(made.peak_bytes - made.memory_bytes[MEMORY["cache"]])),
    ]
    if made.host_bytes:
        rows.append(("host memory of a device", readable_bytes(made.host_bytes)))
    if made.num_devices > made.least_devices:
        devices = f"{made.least_devices} device{'s' if made.least_devices > 1 else ''}"
        rows.append(("scaling efficiency", f"{made.scaling_efficiency:.1%} of {devices}"))
    out.print(table(("", ""), rows))
    if not made.fits:
        text = f"does not fit: {usable_in_words(made.device_bytes)}; `autopar plan` searches a plan that fits"
        out.print(text, style="bold red")
    out.print()
    out.print(_time_table(made))
    out.print()
    memory = [(what, readable_bytes(size), _part(size, made.peak_bytes)) for what, size in made.memory_bytes.items()]
    out.print(table(("memory of the fullest rank", "", "part"), [row for row in memory if row[2]], right=("", "part")))
    if made.run is not None:
        out.print()
        out.print(table(("whole run", ""), _run_rows(made.run), right=("",)))
    for only in made.formula_only:
        out.print(f"formula only: {only}", style="yellow")
    for assumption in made.assumptions:
        out.print(f"assumed: {assumption}")


def _between(bounds: tuple[float, float], readable: Callable[[float], str]) -> str:
    """An interval, in which a measurement was in four of five published runs."""
    return f"80% interval {readable(bounds[0])} to {readable(bounds[1])}"


def _time_table(made: "Estimate") -> object:
    least = 1e-9 * made.step_s  # less is the rounding of a part that is 0
    rows = [
        (what, "", readable_seconds(s), _part(s, made.step_s), "") for what, s in made.compute_s.items() if s > least
    ]
    rows += [
        (
            one.what,
            one.mesh_dim,
            readable_seconds(one.exposed_s),
            _part(one.exposed_s, made.step_s),
            readable_seconds(one.hidden_s) if one.hidden_s > least else "",
        )
        for one in made.collectives
        if one.exposed_s > least or one.hidden_s > least
    ]
    rows += [
        (what, "", readable_seconds(s), _part(s, made.step_s), "") for what, s in made.other_s.items() if s > least
    ]
    columns = ("time of a step", "mesh", "seconds", "part", "hidden")
    return table(columns, rows, right=("seconds", "part", "hidden"))


def _run_rows(run: "RunCost") -> list[tuple[str, str]]:
    rows = [
        ("tokens", f"{run.tokens:,.0f}"),
        ("steps", f"{run.steps:,.0f}"),
        ("days", f"{run.days:,.2f}"),
        ("device hours", f"{run.device_hours:,.0f}"),
    ]
    if run.price_usd is not None:
        rows.append(("US dollars", f"{run.price_usd:,.0f}"))
    if run.energy_kwh is not None:
        rows.append(("kWh of the devices", f"{run.energy_kwh:,.0f}"))
    if run.co2_kg is not None:
        rows.append(("kg of CO2", f"{run.co2_kg:,.0f}"))
    return rows


def _part(value: float, whole: float) -> str:
    return f"{value / whole:.1%}" if value else ""
