"""`autopar.estimate`: from a model, a cluster and a plan to the predicted time and memory of its training step.

The model is captured without memory and labelled once, as by `autopar plan`. The costs of its blocks are kept as
expressions with the program. Other micro-batches, engines and devices of the same labels are then priced at once.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from autopar.capture.analysis import Analysis, analyse
from autopar.capture.any_size import capture
from autopar.capture.request import Inputs, LossFunction, Request
from autopar.cost_model.estimate import Estimate, estimate_works
from autopar.cost_model.fit.profile_parts import WRITTEN_BY, measured_parts, read_trace
from autopar.cost_model.machine.cluster import cluster_machine, precision_of
from autopar.cost_model.machine.engine import DEFAULT, Engine, engine_named, with_sums_in
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.cost_model.pricing import Question
from autopar.cost_model.work.program_costs import ProgramWorks, dtype_of
from autopar.errors import InputError, PlanError
from autopar.files.strict_text import values_of
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import BlockLabels, Plan
from autopar.ir.program import Program
from autopar.planning.degrees import resolve_degrees
from autopar.planning.exact_memory import fullest_rank, with_exact_memory
from autopar.planning.fixed import (
    PlanLike,
    capture_for,
    check_plan,
    choose_labels,
    program_for,
    wished_in_precision,
    works_under,
)
from autopar.planning.machine import machine_of, machinery_of, own_machinery
from autopar.planning.measured import corrected_by_trace, is_trace, profile_for, traced_plan
from autopar.planning.precision import in_precision_of
from autopar.planning.recomputed import decided, with_recomputed, without_unread
from autopar.search.pricing.cuts import call_seconds, choose_cuts
from autopar.search.pricing.recomputed_values import values_to_recompute

_KEPT = 16  # labelled programs that are kept


@dataclass(frozen=True, eq=False, kw_only=True)
class Priceable:
    """A captured program under labels: its works and their degrees."""

    works: ProgramWorks
    labels: tuple[BlockLabels, ...]
    degrees: Degrees


def estimate(
    model_or_program: nn.Module | Program,
    cluster: ClusterSpec | str,
    plan: PlanLike = None,
    *,
    example_inputs: Inputs | None = None,
    loss_fn: LossFunction | None = None,
    global_batch: int | None = None,
    engine: Engine | str = DEFAULT,
    profile: DeviceProfile | str | Path | None = None,
    measured: str | Path | None = None,
    precision: str | None = None,
    tokens: float | None = None,
    grams_co2_per_kwh: float | None = None,
    exact_memory: bool = False,
    name: str = "",
    on_progress: Callable[[str], None] | None = None,
    specialise: bool = False,
) -> Estimate:
    """Predict the step time and memory of a model under a plan, without any device.

    Args:
        model_or_program: The model, which may be on meta, or a program of `autopar.capture_program`.
        cluster: The cluster, or its text, such as ``"8xh100"``.
        plan: A `Plan`, the path of one, or degrees such as ``{"tp": 8, "dp": 4, "zero": 1}``; FSDP by default.
        example_inputs: The inputs of one data-parallel rank in one step. A program needs none.
        loss_fn: A function of (output, target), if the model returns no loss.
        global_batch: Sequences of one step on all ranks. By default the inputs are one rank's step.
        engine: The framework whose mechanisms are priced (``cost_model/machine/engines``).
        profile: A device profile, its shipped name, or its file.
        measured: Measured steps that correct the profile (``docs/estimate.md``): a CSV file, or a trace of one step.
        precision: Of computing, such as fp32. By default float32 models on GPUs have bf16 (``docs/precision.md``).
        tokens: The tokens of a whole training run, to predict its days, money and energy if the plan fits.
        grams_co2_per_kwh: The carbon intensity of the electricity.
        exact_memory: Whether to count the tensors of a rank one by one, which takes seconds for a large model.
        name: The model's name in the result.
        on_progress: A function that receives a text before each part of the work.
        specialise: Whether branches on inputs are captured as the example inputs take them.

    Returns:
        Seconds, bytes and FLOP/s of one step, and their parts. `fits` is false if the plan does not fit the devices'
        memory. `assumptions` lists everything that nobody measured.

    Raises:
        InputError: Inputs, engine, profile or precision cannot be used.
        PlanError: The plan does not fit the cluster or the model.
        ClusterError: The cluster cannot be used.
        CaptureError: The model cannot be captured.

    Example:
        >>> result = autopar.estimate(model, "4xh100", {"dp": 4}, example_inputs=batch, loss_fn=loss_fn)
        >>> result.num_devices, result.fits
        (4, True)
    """
    spec = ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster
    report = on_progress or (lambda _: None)
    given, precision = _with_precision(plan, precision)
    chosen = _engine_of(engine, exact_memory)
    of = _subject(model_or_program, example_inputs, loss_fn, specialise=specialise)
    (degrees, program), precision, notes = _captured(of, given, spec, global_batch, precision, report)
    report("choosing labels and pricing blocks")
    own_plan = given if isinstance(given, Plan) else None

    def profile_in(dtype: str) -> DeviceProfile | None:
        base = profile_for(profile, measured, spec, dtype, chosen)
        if not is_trace(measured):
            return base
        report("pricing the traced step")
        at = _at_any_size(of, degrees.precision)
        return profile_by_trace(measured, at, spec, engine=chosen, precision=dtype, profile=base)

    priceable, question = _priced(program, spec, degrees, chosen, profile_in, precision, own_plan)
    report("pricing")
    name = name or (own_plan.model if own_plan is not None else type(getattr(of, "model", of)).__name__)
    result = estimate_works(priceable.works, question, name=name, tokens=tokens, grams_co2_per_kwh=grams_co2_per_kwh)
    if exact_memory:
        report("counting the tensors of a rank")
        whole = own_plan or _whole_plan(program, priceable, question)
        result = with_exact_memory(result, fullest_rank(program, whole))
    return replace(result, assumptions=(*result.assumptions, *notes), run=result.run if result.fits else None)


def _engine_of(engine: Engine | str, exact_memory: bool) -> Engine:
    chosen = engine_named(engine) if isinstance(engine, str) else engine
    if exact_memory and chosen.name != DEFAULT:
        raise InputError("exact memory needs engine autopar; leave the other out, or leave out exact memory")
    return chosen


def profile_by_trace(
    path: str | Path,
    program_at: Callable[[Degrees], Program],
    cluster: ClusterSpec,
    *,
    engine: Engine,
    precision: str | None,
    profile: DeviceProfile | None,
) -> DeviceProfile:
    """The profile of a cluster's devices, corrected by a traced step of the same model."""
    if engine.name != DEFAULT:
        raise InputError(f"{path} is a step of engine {DEFAULT}, and {engine.name} is priced; leave out one of them")
    with values_of(path, WRITTEN_BY):
        trace = read_trace(path)
        degrees, part = traced_plan(trace, cluster, path)
        measured_parts(trace)
    program = program_at(degrees)
    traced = degrees.precision or precision_of(dtype_of(program), cluster)
    if precision not in (None, traced):
        raise InputError(f"{path} is a step in {traced}, and {precision} is priced; trace a step in {precision}")
    machine = cluster_machine(part, engine, mechanisms(), precision=traced, profile=profile)
    usual = machine.profile.at_power_of(machine.device)
    priceable, question = _priced(program, part, degrees, engine, lambda _: usual, traced, None)
    result = estimate_works(priceable.works, question, name="")
    return corrected_by_trace(trace, result, part, usual, path)


def _at_any_size(of: Request | Program, precision: str | None) -> Callable[[Degrees], Program]:
    """The program of a module at any degrees. A program is of one global micro-batch."""
    if isinstance(of, Program):
        raise InputError("a trace as measured step needs the model; give the module instead of its program")
    captured = capture(of.computing_in(precision))
    return lambda degrees: program_for(captured, degrees)


def _priced(
    program: Program,
    cluster: ClusterSpec,
    degrees: Degrees,
    engine: Engine,
    profile_in: Callable[[str], DeviceProfile | None],
    precision: str | None,
    plan: Plan | None,
) -> tuple[Priceable, Question]:
    """The works of degrees on a cluster, as they run, and what is asked about them.

    `profile_in` gives the profile of a precision. The question has the bytes of gradient sums and the cuts of stages,
    and the degrees have the least recomputation that fits.
    """
    priceable = priceable_of(program, cluster, degrees, engine, plan)
    works, degrees = priceable.works, priceable.degrees
    dtype = precision or precision_of(works.dtype, cluster)
    question = Question(
        cluster=cluster, degrees=degrees, engine=with_sums_in(engine, degrees.reduce_dtype, works.stored_bytes),
        precision=dtype, profile=profile_in(dtype), cuts=() if plan is None else plan.cuts,
    )  # fmt: skip
    if engine.name != DEFAULT:  # its stages are equal
        if degrees.is_recompute_open:
            raise PlanError(
                f"recompute = auto is found for engine {DEFAULT} only; with engine {engine.name} give none, selective "
                "or full"
            )
        return priceable, question
    on = machinery_of(cluster, question.profile, dtype)
    if plan is None and degrees.num_stages > 1:
        question = replace(question, cuts=choose_cuts(program, works, degrees, call_seconds(works, degrees, on)))
    degrees = decided(works, degrees, on, question.cuts)
    return replace(priceable, degrees=degrees), replace(question, degrees=degrees)


def _with_precision(plan: PlanLike, precision: str | None) -> tuple[Plan | Mapping[str, Any] | None, str | None]:
    """The wished degrees, and the precision of products. A plan and a program have their own."""
    given = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    if isinstance(given, Plan):
        return given, precision or given.degrees.precision
    in_plan = dict(given or {}).get("precision")
    if precision is not None and in_plan not in (None, precision):
        raise InputError(f"precision {precision!r} beside {in_plan!r} in the plan; give one of them")
    return given, precision or in_plan


def _subject(
    given: nn.Module | Program, example_inputs: Inputs | None, loss_fn: LossFunction | None, *, specialise: bool
) -> Request | Program:
    """A module as a request for its program, or a program as it is."""
    if isinstance(given, Program):
        return given
    if example_inputs is None:
        raise InputError("a module needs example_inputs=..., a dict or tuple with the tensors of one rank's batch")
    return Request.of(given, example_inputs, loss_fn, specialise=specialise)


def _captured(
    of: Request | Program,
    plan: Plan | Mapping[str, Any] | None,
    cluster: ClusterSpec,
    global_batch: int | None,
    precision: str | None,
    on_progress: Callable[[str], None],
) -> tuple[tuple[Degrees, Program], str | None, tuple[str, ...]]:
    """The degrees and the program of a plan or of wishes in their precision, this precision, and notes."""
    if isinstance(of, Request):
        on_progress("capturing")
    if isinstance(plan, Plan):
        program = of if isinstance(of, Program) else capture_for(of, plan.degrees)
        check_plan(plan, program, cluster.num_devices)
        return (plan.degrees, program), precision, ()
    if isinstance(of, Program):
        pair = _degrees_of(of, plan, cluster.num_devices, global_batch), of
        return in_precision_of(precision, of, cluster, lambda _: pair, lambda pair: pair[1])
    return wished_in_precision(of, {**(plan or {}), "precision": precision}, cluster, of.sizes[0], global_batch)


def _whole_plan(program: Program, priceable: Priceable, question: Question) -> Plan:
    """The priced plan as `autopar.parallelize` would run it, whether it fits or not."""
    degrees, cuts = priceable.degrees, question.cuts
    kept: tuple[str, ...] = ()
    if cuts:
        assert question.precision is not None
        machine = machine_of(question.cluster, question.profile, question.precision)
        kept = values_to_recompute(program, analyse(program, degrees.mesh), cuts, degrees, machine)
    return Plan(
        fingerprint=program.fingerprint,
        model="",
        degrees=degrees,
        cuts=cuts,
        recomputed=kept,
        blocks=without_unread(priceable.labels, degrees),
    )


def priceable_of(
    program: Program, cluster: ClusterSpec, degrees: Degrees, engine: Engine, plan: Plan | None = None
) -> Priceable:
    """A program with its works, under a plan's labels or the labeller's choice, which is kept."""
    is_own = engine.name == DEFAULT
    if plan is not None:
        analysis = analyse(program, degrees.mesh)
        return _under(program, analysis, plan.blocks, degrees, is_own=is_own, regather=plan.regather)
    return _labelled(program, cluster, degrees, is_own)


@functools.lru_cache(maxsize=_KEPT)
def _labelled(program: Program, cluster: ClusterSpec, degrees: Degrees, is_own: bool) -> Priceable:
    wanted = degrees if is_own else replace(degrees, dp_shard=1, dp_replicate=1, cp=1, ep=1)
    used, analysis, labelling = choose_labels(program, cluster, wanted)
    labels = labelling.blocks
    if is_own:
        speeds = own_machinery(cluster, dtype_of(program)).machine.speeds
        labels = with_recomputed(program, analysis, labels, used, speeds, regather=True)
    result = _under(program, analysis, labels, used, is_own=is_own, regather=True)
    return replace(result, degrees=replace(degrees, tp_dims=used.tp_dims, cp_dims=used.cp_dims))


def _under(
    program: Program, analysis: Analysis, labels: Sequence[BlockLabels], degrees: Degrees, *, is_own: bool,
    regather: bool,
) -> Priceable:  # fmt: skip
    """A program under labels. Other frameworks compute the loss whole and keep master weights."""
    priced = degrees if is_own else replace(degrees, loss_chunks=1)
    works = works_under(program, analysis, labels, priced, regather=regather)
    works = works if is_own else replace(works, has_master_weights=True)
    return Priceable(works=works, labels=tuple(labels), degrees=degrees)


def _degrees_of(program: Program, wish: Mapping[str, Any] | None, world: int, global_batch: int | None) -> Degrees:
    """Degrees for a captured program. The micro-batch is the program's, unless the wish names one."""
    given = dict(wish or {})
    if given.get("micro_batch") is None and global_batch is None:
        dp = resolve_degrees({**given, "micro_batch": 2}, world).dp
        given["micro_batch"] = max(1, (program.batch or 1) // dp)
    return resolve_degrees(given, world, global_batch=global_batch)
