"""The composition root: `parallelize` joins capture, labels and runtime."""

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from autopar._torch import private
from autopar._version import public_version
from autopar.cache.store import cache_folder
from autopar.cache.tuned import TUNED, tuned_plans
from autopar.capture.passes.autocast import ambient_autocast, autocast_as
from autopar.capture.record.file import from_bytes, to_bytes
from autopar.capture.record.write import Unexplained
from autopar.capture.request import Inputs, LossFunction, Request, checked_precision
from autopar.capture.weightless import weightless
from autopar.errors import ClusterError, InputError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.stages import stages_by_parameter, stages_of
from autopar.ir.storage import Storage
from autopar.models.example_inputs import example_inputs_for
from autopar.planning.fixed import (
    ONE_MICRO_BATCH,
    PlanLike,
    capture_for,
    check_plan,
    label_plan,
    program_for,
    wished_program,
)
from autopar.planning.options import PlanOptions
from autopar.planning.precision import in_precision_of
from autopar.planning.search import captured_as_asked, labels_for, search_captured
from autopar.runtime.distributed.broadcast import agreed, broadcast_object, run_on_first_rank
from autopar.runtime.model.compiled import CompiledProgram
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.model.original_model import OriginalModel
from autopar.runtime.model.shape_cache import Replan, Wanted
from autopar.runtime.parameters.initial import first_rank_sends, own_buffers, sent_buffers
from autopar.runtime.parameters.materialise import parameter_source
from autopar.runtime.parameters.packed import Source
from autopar.search.result.format import nothing_fits

logger = logging.getLogger("autopar")

_TIMEOUT_S = 300
DEFAULT_BATCH, DEFAULT_SEQUENCE = 2, 128


def parallelize(
    model: nn.Module,
    cluster_spec: ClusterSpec | str,
    *,
    example_inputs: Inputs | None = None,
    plan: PlanLike = None,
    state: Mapping[str, torch.Tensor] | str | Path | None = None,
    loss_fn: LossFunction | None = None,
    seed: int = 0,
    specialise: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str | None = None,
    global_batch: int | None = None,
    fix: Mapping[str, Any] | None = None,
    forbid: Mapping[str, Any] | None = None,
    objective: str = "time",
) -> ParallelModel:
    """Split an unmodified model over the devices of a cluster. All ranks of a torchrun job call it.

    Rank 0 captures and plans, for all. Ranks that differ only in ``tp`` or ``pp`` must pass the same data:
    ``rank_mesh.dims["dp"].coordinate`` numbers the parts. The model is kept without its weights, for other shapes and
    eval mode. Delete your model to free its weights.

    Args:
        model: The model. On meta, it is materialised shard by shard. If ranks hold different weights, or rank 0 alone
            holds weights, rank 0 sends every rank its parts.
        cluster_spec: The cluster, or its text, such as ``"8xh100"``.
        example_inputs: The inputs of one rank in one step: a dict of tensors by name, or a tuple. Without it a
            transformers config gives the shapes.
        plan: A `Plan`, the path of one, or degrees such as ``{"tp": 2, "dp": 2, "zero": 3}``; or "tuned", the plan
            that `autopar.tune` found here for this model, batch and cluster. Without degrees rank 0 searches the plan
            of most sequences a second, as `autopar.plan` does.
        state: The weights: a state dict, or the path of safetensors files. It may be given on rank 0 alone.
        loss_fn: A function of (output, target), if the model returns no loss. The target is the last element of the
            tuple, or the key ``target`` of the dict.
        seed: The seed of initialisation on meta, and of dropout.
        specialise: Whether branches on inputs are captured as the example inputs of rank 0 take them. A batch
            that decides otherwise is captured again.
        optimizer: An optimizer of the model without state, to go on with the result's parameters.
        precision: Of computing, such as "fp32". By default float32 models on GPUs have bf16 (``docs/precision.md``).
        global_batch: Sequences of one step on all ranks. By default the inputs are one rank's step.
        fix: The values that a search gives to words of `Plan.degrees`, one or several: ``{"tp": (4, 8)}``.
        forbid: The values that a search does not give to words.
        objective: What a search makes small: "time", "memory", "cost" or "energy".

    Returns:
        The model to train, in the mode of `model`. `ParallelModel.plan` is its plan.

    Raises:
        InputError: Inputs, cluster or weights cannot be used, or the model has backward hooks. All ranks raise it.
        PlanError: The plan does not fit the job, the model or the batch.
        CaptureError: The model cannot be captured.

    Example:
        >>> parallel = autopar.parallelize(model, "1xcpu", example_inputs=batch, plan={"dp": 1}, loss_fn=loss_fn)
        >>> loss = parallel.forward_backward(batch)
    """
    cluster = ClusterSpec.parse(cluster_spec) if isinstance(cluster_spec, str) else cluster_spec
    _check_world(cluster)
    model = private.unwrapped(model)
    _refuse_hooks(model)
    device = start_process_group(cluster)
    inputs = example_inputs if example_inputs is not None else derived_inputs(model)
    request = replace(Request.of(model, inputs, loss_fn, specialise=specialise), folder=cache_folder())
    sent = first_rank_sends(model, agreed(lambda: request.named_inputs), has_state=state is not None)
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    without_weights = weightless(model)
    job = _Job(request=replace(request, model=without_weights) if on_meta else request, cluster=cluster)
    options = _asked(job, precision, global_batch, fix or {}, forbid or {}, objective)
    decide = partial(_decide, job, plan, options, derived=example_inputs is None)
    program, ours = _from_first_rank(decide, job.capture_for)
    origin = _same_settings(OriginalModel(model, without_weights, loss_fn, program.reads))
    source = agreed(lambda: parameter_source(model, state=state, seed=seed, dtype=None))
    held = sent_buffers(program, source) if sent else own_buffers(program, source, on_meta=on_meta)
    buffers = _first_of(held, parameter_source(without_weights, seed=seed))
    parallel = ParallelModel(
        program, ours, source, device,
        seed=seed, replan=_replan(origin, job, program, ours), buffers=buffers, origin=origin, sent=sent,
    )  # fmt: skip
    return origin.attached(parallel, optimizer)


def _check_world(cluster: ClusterSpec) -> None:
    _refuse_missing_gpus(cluster)
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if not dist.is_initialized() else dist.get_world_size()
    if world_size != cluster.num_devices:
        raise PlanError(
            f"the cluster has {cluster.num_devices} devices, this job {world_size} ranks; start it with "
            f"torchrun --nproc-per-node {cluster.num_devices}, or describe a cluster of {world_size}"
        )


def _first_of(held: Mapping[str, torch.Tensor], late: Source) -> Source:
    """A source of held buffers. Other buffers come later from `late`, which keeps no weights."""
    return lambda name: held[name] if name in held else late(name)


def _refuse_hooks(model: nn.Module) -> None:
    """Raise `InputError` for hooks on gradients, which the generated code would never call."""
    hooks = private.backward_hooked(model)
    if hooks["module"]:
        raise InputError(
            f"backward hooks of module {_listed(hooks['module'])} would never be called: the generated code has no "
            "modules; remove them, and register hooks on the parameters of the ParallelModel"
        )
    if hooks["parameter"]:
        raise InputError(
            f"gradient hooks of parameter {_listed(hooks['parameter'])} would never be called; register them on "
            "parallel.named_parameters() after parallelize"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name or "the model itself") for name in names[:3]) + more


def _refuse_missing_gpus(cluster: ClusterSpec) -> None:
    """Raise `ClusterError` for a cluster of GPUs on a machine that has none for this rank."""
    here, wanted = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0")) + 1
    if cluster.device_type == "cuda" and here < wanted:
        why = f"torch {torch.__version__} was built without CUDA" if torch.version.cuda is None else "see nvidia-smi"
        raise ClusterError(
            f"cluster {cluster.name} is of GPUs, and torch sees {here or 'none'} on this machine ({why}); train on the "
            "devices that are here, such as '2xcpu', or only plan for the cluster by autopar.plan"
        )


def start_process_group(cluster: ClusterSpec, *, timeout_s: float = _TIMEOUT_S) -> torch.device:
    """Join the process group of this job if it has not been joined, and pick this rank's device."""
    _refuse_missing_gpus(cluster)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(cluster.device_type if cluster.device_type == "cpu" else f"cuda:{local_rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        if "RANK" in os.environ:
            dist.init_process_group(cluster.backend, timeout=timeout)
        else:
            dist.init_process_group(cluster.backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    return device


def derived_inputs(model: nn.Module) -> Inputs:
    """Example inputs that the model's transformers config decides. Raises `InputError` without one."""
    try:
        return example_inputs_for(model, DEFAULT_BATCH, DEFAULT_SEQUENCE)
    except InputError as error:
        raise InputError(
            f"{type(model).__name__} does not say what its inputs look like; pass example_inputs=..., a dict or tuple "
            f"with the tensors of one rank's batch ({error})"
        ) from error


@dataclass(frozen=True, eq=False, kw_only=True)
class _Job:
    """What a plan is for: inputs are of one rank in one step, or give the shapes."""

    request: Request
    cluster: ClusterSpec

    @property
    def name(self) -> str:
        return type(self.request.model).__name__

    @property
    def local_batch(self) -> int:
        return self.request.sizes[0]

    def capture_for(self, plan: Plan) -> Program:
        return capture_for(self.request, plan.degrees)


def _asked(
    job: _Job,
    precision: str | None,
    global_batch: int | None,
    fix: Mapping[str, Any],
    forbid: Mapping[str, Any],
    objective: str,
) -> PlanOptions:
    return PlanOptions(
        precision=checked_precision(precision), fix=fix, forbid=forbid, objective=objective, global_batch=global_batch,
        local_batch=job.local_batch if global_batch is None else None,
        timeout_s=_TIMEOUT_S / 2,  # of a search, because the other ranks wait in a collective
    )  # fmt: skip


def _decide(job: _Job, plan: PlanLike, options: PlanOptions, *, derived: bool) -> tuple[Program, Plan]:
    """The program and the plan that are asked for."""
    loaded = Plan.load(plan) if isinstance(plan, (str, Path)) and plan != TUNED else plan
    if isinstance(loaded, (Plan, str)):
        _refuse_beside(options, "the plan decides this", ("precision", "global_batch", "fix", "forbid", "objective"))
    if isinstance(loaded, str):
        return _tuned(job, options)
    if isinstance(loaded, Plan):
        program = job.capture_for(loaded)
        check_plan(loaded, program, job.cluster.num_devices, None if derived else job.local_batch)
        _warn_torch_version(loaded)
        return program, loaded
    options, wish = options.joined_with(loaded or {})
    if not wish:
        return _searched(job, options)
    _refuse_beside(options, "they are about a search, and the plan has degrees", ("fix", "forbid", "objective"))

    def captured(precision: str | None) -> tuple[Degrees, Program]:
        words = {**options.wish(), **wish, "precision": precision}
        return wished_program(job.request, words, job.cluster.num_devices, options.local_batch, options.global_batch)

    (degrees, program), _, notes = in_precision_of(
        options.precision, job.request.model, job.cluster, captured, lambda pair: pair[1]
    )
    _say((*notes, *(note for note in program.notes if note.startswith(ONE_MICRO_BATCH))))
    decided = label_plan(program, job.cluster, degrees, job.name)
    return program, replace(decided, notes=(*decided.notes, *notes))


def _refuse_beside(options: PlanOptions, why: str, names: Sequence[str]) -> None:
    """Refuse arguments of a search. Raises `InputError` naming them."""
    usual = PlanOptions()
    if given := [name for name in names if (getattr(options, name) or None) != (getattr(usual, name) or None)]:
        raise InputError(f"{', '.join(given)} beside plan: {why}; leave out these arguments, or leave out plan")


def _say(notes: Sequence[str]) -> None:
    for note in notes:
        logger.warning(note)


def _searched(job: _Job, options: PlanOptions) -> tuple[Program, Plan]:
    """The best plan and its program."""
    captured, used, notes = captured_as_asked(job.request, job.cluster, options)
    _say(notes)
    report, folder = (lambda _: None), job.request.folder and job.request.folder / "labels"
    labels = labels_for(captured, job.cluster, used, report, folder)
    result = search_captured(captured, job.cluster, used, name=job.name, on_progress=report, labels=labels)
    if result.plan is None:
        raise PlanError(nothing_fits(result))
    if result.plan.degrees.world_size != job.cluster.num_devices:
        raise PlanError(
            f"the plan of least {options.objective} uses {result.plan.degrees.world_size} of the "
            f"{job.cluster.num_devices} devices; start that many ranks, or leave out objective"
        )
    return program_for(captured, result.plan.degrees), replace(result.plan, notes=(*result.plan.notes, *notes))


def _tuned(job: _Job, options: PlanOptions) -> tuple[Program, Plan]:
    """The plan that `autopar.tune` measured to be the best for this model, batch and cluster, and its program.

    The batch is of one data-parallel rank, or of all of them.
    """
    cluster, kind, batch = job.cluster, job.name, options.local_batch
    kept = tuned_plans(cache_folder(), cluster, kind)
    for plan in (*(p for p in kept if p.degrees.local_batch == batch),
                 *(p for p in kept if p.degrees.global_batch == batch)):  # fmt: skip
        program = job.capture_for(plan)
        if program.fingerprint == plan.fingerprint:
            return program, plan
    batches = [f"{n} sequences" for n in sorted({p.degrees.global_batch for p in kept})]
    there = f" (there are plans of {', '.join(batches)}, perhaps of another {kind})" if batches else ""
    raise PlanError(
        f"nobody tuned {kind} on {cluster.name} for {batch} sequences of a data-parallel rank or of all ranks "
        f"here{there}; run `autopar tune` or autopar.tune on these devices first, or give another plan"
    )


def _from_first_rank(
    decide: Callable[[], tuple[Program, Plan]], capture: Callable[[Plan], Program]
) -> tuple[Program, Plan]:
    """The program and the plan that rank 0 decides, on every rank, or its `AutoparError`. Collective.

    Other ranks `capture` themselves only if no record can hold the program.
    """
    here: list[Program] = []

    def decided() -> tuple[bytes | None, Plan]:
        program, plan = decide()
        here.append(program)
        try:
            return to_bytes(program), plan
        except Unexplained:
            return None, plan

    written, plan = run_on_first_rank(decided)
    if written is None:
        return agreed(lambda: _same_as(plan, *here or [capture(plan)])), plan
    return here[0] if here else from_bytes(written), plan


def _same_settings(origin: OriginalModel) -> OriginalModel:
    """The model, whose attributes are constants of rank 0's program. Collective. Raises `InputError` if they differ."""
    here, first, rank = origin.settings, broadcast_object(origin.settings), dist.get_rank()
    places = {str(rank), os.environ.get("LOCAL_RANK")}  # a number that names this rank's device is no constant
    differing = [name for name, text in first.items() if here.get(name, text) != text]
    differing = [name for name in differing if first[name] != "0" or here[name] not in places]

    def check() -> None:
        for name in differing:
            raise InputError(
                f"rank {rank} built another model than rank 0: attribute {name!r} is {here[name]} there, and "
                f"{first[name]} on rank 0; build the same on all ranks"
            )

    agreed(check)
    return origin


def _same_as(plan: Plan, program: Program) -> Program:
    if plan.fingerprint != program.fingerprint:
        raise PlanError(
            f"rank {dist.get_rank()} captured another model than rank 0; build the same model on every rank"
        )
    return program


def _replan(origin: OriginalModel, job: _Job, program: Program, plan: Plan) -> Replan:
    """Captures the model, of which it holds no weights, for another batch or in eval mode, cut into the same stages."""
    model, planned, around = origin.weightless, job.request, ambient_autocast()
    placed = stages_by_parameter(program, stages_of(program, plan.cuts, plan.recomputed))
    names = [info.name for info in program.inputs]
    decides = planned.reading.specialise or any(decision.inputs for decision in program.decisions)

    def replan(wanted: Wanted, base: CompiledProgram, held: Mapping[str, Storage]) -> tuple[Program, Plan]:
        reading, rows = replace(planned.reading, buffers=base.buffers, decided=wanted.decided), 1
        request = replace(planned, model=model, training=wanted.training, reading=reading)
        if {info.name for info in wanted.batch.form.inputs} != {*names}:
            order = [*dict.fromkeys(name.partition(".")[0] for name in names)]
            at = {name: index for index, name in enumerate(order)}
            items = sorted(dict(wanted.batch.given).items(), key=lambda item: (at.get(item[0], len(at)), item[0]))
            request = replace(request, inputs=dict(items))
        if decides:  # the values of all ranks
            request = request.with_values(wanted.whole(base.mesh.sample_ranks.group))
            rows = base.mesh.sample_ranks.degree
        else:
            request = request.with_shapes(wanted.sizes)
        degrees = replace(plan.degrees, micro_batch=request.sizes[0] // rows, accumulate=1, micro_batches=1)

        def capture() -> Program:
            with autocast_as(around):
                return capture_for(request, degrees)

        def decide() -> tuple[Program, Plan]:
            captured = capture()
            return captured, label_plan(
                captured, job.cluster, degrees, type(model).__name__, held=held, stage_of=placed
            )

        captured, decided = _from_first_rank(decide, lambda _: capture())
        origin.watch(captured.reads)
        return captured, decided

    return replan


def _warn_torch_version(plan: Plan) -> None:
    built, here = public_version(plan.torch_version), public_version(torch.__version__)
    if built and built != here:
        warnings.warn(f"the plan was made with torch {built}, this is {here}", stacklevel=3)
