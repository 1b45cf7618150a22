"""From a model, a cluster and wished degrees to a program and its plan."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from autopar.capture.analysis import Analysis, analyse, refining
from autopar.cost_model.estimate import estimate_works
from autopar.cost_model.machine.engine import DEFAULT, engine_named, with_sums_in
from autopar.cost_model.memory.lower_bound import refuse_what_does_not_fit
from autopar.cost_model.pricing import Question
from autopar.cost_model.work.coverage import Coverage
from autopar.cost_model.work.coverage import coverage as coverage_of
from autopar.cost_model.work.program_costs import ProgramWorks, dtype_of, merged_works, program_works
from autopar.errors import InfeasibleError, PlanError, did_you_mean
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.explanation import Prediction
from autopar.ir.plan import BlockLabels, Plan
from autopar.ir.program import Program
from autopar.ir.schedules.registry import schedule_problems
from autopar.ir.sharding import Dims, I, Type
from autopar.ir.stages import check_buffers, stages_of
from autopar.ir.storage import Storage
from autopar.lowering.loss_region import why_whole
from autopar.memo import Memo
from autopar.planning.degrees import resolve_degrees
from autopar.planning.machine import own_machinery
from autopar.planning.recomputed import decided, with_recomputed, without_unread
from autopar.report.explain import other_size, summarise
from autopar.search.labels.check import check
from autopar.search.labels.result import Labelling
from autopar.search.pricing.cuts import call_seconds, choose_cuts, cuts_like
from autopar.search.pricing.recomputed_values import values_to_recompute

if TYPE_CHECKING:
    from autopar.capture.record.captured import Capture
    from autopar.capture.request import Inputs, LossFunction, Request
    from autopar.search.bounds.lower_bounds import Machinery

ONE_MICRO_BATCH = "the pipeline has one micro-batch"  # a note begins with it
PlanLike = Plan | Mapping[str, Any] | str | Path | None
Labelled = tuple[Degrees, Analysis, Labelling]  # degrees with their mesh dimensions, axes and labels on that mesh


class PricedStages(NamedTuple):
    """The cuts of a plan that a search found. Right after the search also what priced it: block costs, machinery."""

    cuts: tuple[int, ...]
    works: ProgramWorks | None = None
    on: "Machinery | None" = None


class _CoupledError(PlanError):
    """Raised if micro-batches would change a loss, because samples are coupled."""


def wished_program(
    request: "Request",
    wish: Mapping[str, Any] | None,
    world_size: int,
    local_batch: int | None,
    global_batch: int | None = None,
) -> tuple[Degrees, Program]:
    """Degrees and their program. A pipeline has one micro-batch if samples are coupled and the wish names no number."""
    degrees = resolve_degrees(wish, world_size, local_batch, global_batch=global_batch)
    try:
        return degrees, capture_for(request, degrees)
    except _CoupledError as error:
        named = any((wish or {}).get(name) is not None for name in ("micro_batch", "micro_batches", "accumulate"))
        if named or degrees.pp == 1 or schedule_problems(degrees.schedule, degrees.pp, degrees.virtual_stages, 1):
            raise
        why = str(error).split("; use")[0]
    degrees = resolve_degrees({**(wish or {}), "micro_batches": 1}, world_size, local_batch, global_batch=global_batch)
    program = capture_for(request, degrees)
    note = f"{ONE_MICRO_BATCH}, so one stage works at a time: {why}"
    return degrees, replace(program, notes=(*program.notes, note))


def wished_in_precision(
    request: "Request",
    wish: Mapping[str, Any],
    cluster: ClusterSpec,
    local_batch: int | None,
    global_batch: int | None,
) -> tuple[tuple[Degrees, Program], str | None, tuple[str, ...]]:
    """`wished_program` in the wished or the usual precision, or as the model is written; this precision; and notes."""
    from autopar.planning.precision import in_precision_of

    def captured(precision: str | None) -> tuple[Degrees, Program]:
        words = {**wish, "precision": precision}
        return wished_program(request, words, cluster.num_devices, local_batch, global_batch)

    return in_precision_of(wish.get("precision"), request.model, cluster, captured, lambda pair: pair[1])


def capture_for(request: "Request", degrees: Degrees) -> Program:
    """The program at the global micro-batch and precision of `degrees`, unless accumulation would change the loss."""
    from autopar.cache.programs import kept_program

    batch = (degrees.micro_batch or request.sizes[0]) * degrees.dp
    staged = replace(request.computing_in(degrees.precision), staged=degrees.pp > 1)
    return _splittable(kept_program(staged, batch), degrees)


def program_for(captured: "Capture", degrees: Degrees) -> Program:
    """The program of a captured model at the global micro-batch of `degrees`, which name the micro-batch."""
    if degrees.micro_batch is None:
        raise PlanError(
            "the degrees have no micro_batch, so the global micro-batch is unknown; add micro_batch to them"
        )
    return _splittable(captured.at(batch=degrees.micro_batch * degrees.dp), degrees)


def _splittable(program: Program, degrees: Degrees) -> Program:
    """The program, if the micro-batches of `degrees` leave its loss as it is."""
    from autopar.capture.record.captured import UNSEEN

    count = degrees.num_micro_batches
    if count > 1 and program.mixes_batch is not None and not degrees.per_micro_batch:
        name = "accumulate" if degrees.pp == 1 else "micro_batches × accumulate"
        is_unseen = program.mixes_batch.startswith(UNSEEN)
        may, larger = ("may", " or a larger micro_batch") if is_unseen else ("would", "")
        raise _CoupledError(
            f"{name} = {count} {may} change the loss: {program.mixes_batch}; use {name} = 1{larger}. "
            "per_micro_batch = true (--per-micro-batch) trains another loss: the mean of the micro-batches' losses"
        )
    return program


def label_plan(
    program: Program,
    cluster: ClusterSpec,
    degrees: Degrees,
    name: str,
    *,
    held: Mapping[str, Storage] | None = None,
    stage_of: Mapping[str, tuple[int, ...]] | None = None,
    searched: PricedStages | None = None,
    labelled: Labelled | None = None,
    regather: bool = True,
) -> Plan:
    """The labeller's plan for a program, without summary and prediction; `stage_of` are stages that hold parameters."""
    if labelled is None:
        degrees, analysis, labelling = choose_labels(program, cluster, degrees, held=held, regather=regather)
        speeds = own_machinery(cluster, dtype_of(program)).machine.speeds
        blocks = with_recomputed(program, analysis, labelling.blocks, degrees, speeds, regather=regather)
        labelled = degrees, analysis, replace(labelling, blocks=blocks)
    degrees, analysis, labelling = labelled
    on, works = searched and searched.on, searched and searched.works
    on = on or own_machinery(cluster, dtype_of(program))
    if works is None and held is None:
        works = works_under(program, analysis, labelling.blocks, degrees, regather=regather)
    cuts: tuple[int, ...] = ()
    kept: tuple[str, ...] = ()  # values that every stage computes for itself
    call_s: tuple[float, ...] = ()  # seconds of every main call
    if degrees.num_stages > 1:
        if stage_of is not None:
            cuts = cuts_like(program, stage_of, degrees.num_stages)
        else:
            assert works is not None, "held parameters are in stages"
            call_s = call_seconds(works, degrees, on)
            cuts = choose_cuts(program, works, degrees, call_s) if searched is None else searched.cuts
        kept = values_to_recompute(program, analysis, cuts, degrees, on.machine)
        check_buffers(program, stages_of(program, cuts, kept))
    if works is not None:
        degrees = decided(works, degrees, on, cuts)
    labelling = replace(labelling, blocks=without_unread(labelling.blocks, degrees))
    refuse_what_does_not_fit(program, analysis, labelling.blocks, degrees, cluster, cuts)
    notes = (*program.notes, *labelling.notes)
    if degrees.loss_chunks > 1 and (why := why_whole(program, analysis, labelling.blocks, degrees.mesh)):
        notes += (f"logits and loss are not computed in chunks (loss_chunks = {degrees.loss_chunks}), because {why}",)
    plan = Plan(
        fingerprint=program.fingerprint,
        model=name,
        degrees=degrees,
        blocks=labelling.blocks,
        regather=regather,
        batch=program.batch,
        sequence=program.sequence,
        torch_version=str(torch.__version__),
        notes=notes,
        cuts=cuts,
        recomputed=kept,
    )
    if works is None:
        return plan
    summary = summarise(program, analysis, plan, cluster, call_s, works)
    is_priced = degrees.world_size == cluster.num_devices
    return replace(plan, summary=summary, predicted=_predicted(works, plan, cluster, on) if is_priced else None)


def _predicted(works: ProgramWorks, plan: Plan, cluster: ClusterSpec, on: "Machinery") -> Prediction:
    """The figures of `autopar.estimate` for the plan."""
    degrees, machine = plan.degrees, on.machine
    engine = with_sums_in(engine_named(DEFAULT), degrees.reduce_dtype, works.stored_bytes)
    question = Question(
        cluster=cluster, degrees=degrees, engine=engine, precision=machine.precision, profile=machine.profile,
        cuts=plan.cuts,
    )  # fmt: skip
    result = estimate_works(works, question)
    return Prediction(
        step_s=result.step_s, step_interval_s=result.step_interval_s, samples_per_s=result.global_batch / result.step_s,
        tokens_per_s=result.tokens_per_s if plan.sequence else None, mfu=result.mfu, peak_bytes=result.peak_bytes,
        peak_interval_bytes=result.peak_interval_bytes, device_bytes=result.device_bytes,
    )  # fmt: skip


def works_under(
    program: Program, analysis: Analysis, labels: Sequence[BlockLabels], degrees: Degrees, *, regather: bool
) -> ProgramWorks:
    """The block costs under labels, with the state and the chunks of the loss that the degrees say."""
    mesh, chunks = degrees.mesh, degrees.loss_chunks
    works = program_works(program, analysis, labels, mesh, regather=regather, loss_chunks=chunks)
    return works.with_state_of(degrees)


def choose_labels(
    program: Program,
    cluster: ClusterSpec,
    degrees: Degrees,
    *,
    held: Mapping[str, Storage] | None = None,
    regather: bool = True,
    memo: Memo | None = None,
) -> Labelled:
    """Labels with their degrees and axes. `tp` and `cp` become two mesh dimensions if a factor divides the heads."""
    from autopar.search.labels.context_dims import context_dims

    memo = Memo() if memo is None else memo
    is_open = degrees.cp > 1 and degrees.cp_dims is None and degrees.context is None
    dims = context_dims(program, memo(analyse, program), degrees.cp, degrees.tp) if is_open else None
    ways = [degrees] if dims is None else [degrees, replace(degrees, cp_dims=dims)]
    options, problem = list[Labelled](), None
    for way in ways:
        try:
            options.append(_labels_on_tensor_dims(program, cluster, way, held=held, regather=regather, memo=memo))
        except (PlanError, InfeasibleError) as error:
            problem = problem or error
    if not options:
        assert problem is not None
        raise problem
    if len(options) == 1:
        return options[0]
    return min(options, key=lambda choice: _block_seconds(program, choice, cluster, regather, memo))


def _block_seconds(program: Program, labelled: Labelled, cluster: ClusterSpec, regather: bool, memo: Memo) -> float:
    """Seconds of all blocks of one rank for one sequence of a micro-batch."""
    from autopar.cost_model.work.export import block_runs, block_works

    degrees, analysis, labelling = labelled
    runs = memo(block_runs, program, memo(analyse, program))  # equal for any labels
    works = block_works(program, analysis, labelling.blocks, labelling.mesh, runs=runs, regather=regather)
    merged = merged_works(program, works, labelling.blocks, labelling.mesh, regather=regather)
    single = replace(degrees, micro_batch=1, loss_chunks=1)
    return sum(call_seconds(merged, single, own_machinery(cluster, dtype_of(program))))


def _labels_on_tensor_dims(
    program: Program,
    cluster: ClusterSpec,
    degrees: Degrees,
    *,
    held: Mapping[str, Storage] | None,
    regather: bool,
    memo: Memo,
) -> Labelled:
    """`choose_labels` with the context dimensions of `degrees`."""
    from autopar.search.labels.solve import label  # not needed if labels are kept
    from autopar.search.labels.tensor_dims import tensor_dims

    analysis = memo(analyse, program, refining(degrees.mesh))
    free = degrees.tp_dims is None and held is None
    split = tensor_dims(program, analysis, degrees.tp) if free else None
    on_two: Labelled | None = None
    if split is not None:
        with contextlib.suppress(PlanError, InfeasibleError):
            wanted = replace(degrees, tp_dims=split)
            on_two = _labels_on_tensor_dims(program, cluster, wanted, held=None, regather=regather, memo=memo)
    if on_two is not None and not on_two[2].added_work:
        return on_two
    pinned = {n: _as_held(st, analysis.outer[n]) for n, st in (held or {}).items() if n in program.parameters}
    try:
        chosen = label(program, analysis, degrees, cluster, pinned=pinned, regather=regather, memo=memo)
    except (PlanError, InfeasibleError):
        if on_two is None:
            raise
        return on_two
    return on_two if on_two is not None and on_two[2].added_work <= chosen.added_work else (degrees, analysis, chosen)


def coverage(
    model: nn.Module,
    cluster: ClusterSpec | str,
    *,
    example_inputs: "Inputs",
    plan: Mapping[str, Any] | None = None,
    global_batch: int | None = None,
    loss_fn: "LossFunction | None" = None,
    specialise: bool = False,
) -> Coverage:
    """Report how much of the work of a training step is split over ranks.

    No plan is refused for its size, and no process group is needed.

    Args:
        model: The model, which may be on meta.
        cluster: The cluster, or its text, such as ``"8xh100"``.
        example_inputs: The inputs of one data-parallel rank: a dict of tensors by name, or a tuple.
        plan: The wanted degrees, such as ``{"tp": 4}``, labelled as in `autopar.parallelize`, and the ``precision``. By
            default float32 models on GPUs have bf16.
        global_batch: Sequences of one step on all ranks. By default the inputs are one rank's step.
        loss_fn: A function of (output, target), if the model returns no loss.
        specialise: Whether branches on inputs are captured as the example inputs take them.

    Returns:
        The split share of all FLOP, and the price of every operator that stays whole.

    Raises:
        InputError: The cluster or the inputs cannot be used.
        PlanError: The degrees do not fit the cluster or the model.
        CaptureError: The model cannot be captured.

    Example:
        >>> class WithLoss(torch.nn.Sequential):
        ...     def forward(self, x, target):
        ...         return torch.nn.functional.cross_entropy(super().forward(x), target)
        >>> inputs = {"x": torch.randn(4, 8), "target": torch.arange(4)}
        >>> report = autopar.coverage(WithLoss(*model), "4xcpu", example_inputs=inputs, plan={"tp": 2, "dp": 2})
        >>> 0.0 < report.split_flops("tp") <= 1.0
        True
    """
    from autopar.capture.request import Request

    spec = ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster
    request = Request.of(model, example_inputs, loss_fn, specialise=specialise)
    (degrees, program), _, _ = wished_in_precision(request, plan or {}, spec, request.sizes[0], global_batch)
    degrees, analysis, labelling = choose_labels(program, spec, degrees)
    return coverage_of(program, analysis, labelling.blocks, degrees, spec)


def _as_held(storage: Storage, dims: Dims) -> tuple[Type, ...]:
    """The types of a held parameter under other axes. A type is invariant if these do not have the split axis."""
    types = []
    for kind in storage.types:
        position = kind.position
        if kind.kind == "S":
            before = prod(storage.dims.sizes[kind.dim][: kind.position])
            sizes = dims.sizes[kind.dim]
            position = next((p for p in range(len(sizes)) if prod(sizes[:p]) == before), -1)
            if position < 0:
                types.append(I)
                continue
        types.append(Type(kind.kind, kind.dim, position))
    return tuple(types)


def check_plan(plan: Plan, program: Program, world_size: int, local_batch: int | None = None) -> None:
    """Refuse a plan made for another model, shape, batch of one rank or world size."""
    if plan.degrees.world_size != world_size:
        raise PlanError(
            f"the plan is for {plan.degrees.world_size} ranks, this job has {world_size}; start "
            f"{plan.degrees.world_size} ranks (torchrun --nproc-per-node), or plan again for {world_size}"
        )
    micro_batch, count = plan.degrees.micro_batch, plan.degrees.num_micro_batches
    if local_batch is not None and micro_batch is not None and local_batch != micro_batch * count:
        raise PlanError(
            f"the plan is for {micro_batch * count} sequences of one data-parallel rank in one step "
            f"({count} × micro-batch {micro_batch}), the inputs have {local_batch}; pass inputs of this size, or plan "
            "again"
        )
    if (plan.batch, plan.sequence) != (program.batch, program.sequence):
        raise PlanError(
            f"the plan is for a global micro-batch of {plan.batch} sequences of length {plan.sequence}, the inputs "
            f"have {program.batch} of length {program.sequence}; pass inputs of this size, or plan again"
        )
    if plan.fingerprint != program.fingerprint:
        theirs = [b.signature for b in plan.blocks]
        ours = [b.signature for b in program.blocks]
        differing = [b.name for b, s in zip(program.blocks, theirs, strict=False) if b.signature != s]
        if other := other_size(program, plan.summary):
            raise PlanError(
                f"the plan was made for another size of the model ({plan.model or 'unnamed'}): {other}; give the "
                "options that size it here as well (--layers, --hidden), or plan again for this model"
            )
        why = f"blocks {differing} differ" if differing else "parameters differ in name, shape or dtype"
        if not differing and len(theirs) != len(ours):
            why = f"{len(theirs)} distinct blocks there, {len(ours)} here"
        raise PlanError(
            f"the plan was made for another model ({plan.model or 'unnamed'}): {why}; plan again for this model"
        )
    for block, labels in zip(program.blocks, plan.blocks, strict=True):
        known = {node.meta["key"] for node in block.graph.nodes if node.op == "call_function"}
        if unknown := [key for key in labels.recomputed if key not in known]:
            raise PlanError(
                f"block {labels.name}: `recomputed` names the operator {unknown[0]!r}; "
                f"{did_you_mean(unknown[0], sorted(known))}"
            )
    check(program, analyse(program, plan.mesh), plan.blocks, plan.mesh)
    check_buffers(program, stages_of(program, plan.cuts, plan.recomputed))
