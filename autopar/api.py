"""The composition root: `parallelize` joins capture, labels and runtime."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar._torch import private
from autopar.cache.store import cache_folder
from autopar.capture.passes.autocast import ambient_autocast, autocast_as
from autopar.capture.record.file import from_bytes, to_bytes
from autopar.capture.record.write import Unexplained
from autopar.capture.request import Inputs, LossFunction, Request
from autopar.capture.weightless import weightless
from autopar.cost_model.interval import DEFAULT_CHANCE
from autopar.errors import InputError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.stages import stages_by_parameter, stages_of
from autopar.ir.storage import Storage
from autopar.ir.trained import trained_from
from autopar.models.adapters import with_trained
from autopar.models.example_inputs import derived_inputs
from autopar.planning.decide import job_options, plan_of_job
from autopar.planning.fixed import PlanLike, capture_for, label_plan
from autopar.runtime.distributed.broadcast import broadcast_object, on_all_ranks, run_on_first_rank
from autopar.runtime.distributed.start import TIMEOUT_S, check_world, refuse_hooks, start_process_group
from autopar.runtime.model.compiled import CompiledProgram
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.model.original_model import OriginalModel
from autopar.runtime.model.shape_cache import Replan, Wanted
from autopar.runtime.parameters.initial import first_rank_sends, own_buffers, sent_buffers
from autopar.runtime.parameters.materialise import parameter_source
from autopar.runtime.parameters.packed import ParameterSource


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
    chance: float = DEFAULT_CHANCE,
    trains: str = "all",
) -> ParallelModel:
    """Split an unmodified model over the devices of a cluster. All ranks of a torchrun job call it.

    Rank 0 captures and plans, for all. Ranks that differ only in ``tp`` or ``pp`` must pass the same data:
    ``rank_mesh.dims["dp"].coordinate`` numbers the parts. Delete your model to free its weights.

    Args:
        model: The model. On meta, it is materialised shard by shard. If ranks hold different weights, or rank 0 alone
            holds weights, rank 0 sends every rank its parts.
        cluster_spec: The cluster, or its text, such as ``"8xh100"``.
        example_inputs: The inputs of one rank in one step, by name or a tuple. A transformers model has usual ones.
        plan: A `Plan`, the path of one, or degrees such as ``{"tp": 2, "dp": 2, "zero": 3}``; or "tuned", the plan
            that `autopar.tune` found here. Without degrees rank 0 searches the plan, as `autopar.plan` does.
        state: The weights: a state dict, or the path of safetensors files. It may be given on rank 0 alone.
        loss_fn: A function of (output, target), if the model returns no loss. The target is the last element of the
            tuple, or the key ``target`` of the dict.
        seed: Of initialisation on meta, and of dropout.
        specialise: Whether branches are captured as rank 0's inputs take them. Another batch is captured again.
        optimizer: An optimizer of the model without state, to go on with the result's parameters.
        precision: Of computing, such as "fp32". By default float32 models on GPUs have bf16 (``docs/precision.md``).
        global_batch: Sequences of one step on all ranks. By default the inputs are one rank's step.
        fix: The values that a search gives to words of `Plan.degrees`, one or several: ``{"tp": (4, 8)}``.
        forbid: The values that a search does not give to words.
        objective: What a search makes small: "time", "memory", "cost" or "energy".
        chance: The probability with which a searched plan must fit.
        trains: The parameters to train, such as "lora:r=16" (`autopar.ir.trained`). `model` gets adapters in place.

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
    check_world(cluster)
    model = with_trained(private.unwrapped(model), trained_from(trains))
    refuse_hooks(model)
    device = start_process_group(cluster)
    inputs = example_inputs if example_inputs is not None else derived_inputs(model)
    request = replace(Request.of(model, inputs, loss_fn, specialise=specialise), folder=cache_folder())
    sent = first_rank_sends(model, on_all_ranks(lambda: request.named_inputs), has_state=state is not None)
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    without_weights = weightless(model)
    request = replace(request, model=without_weights) if on_meta else request
    options = job_options(request, precision, global_batch, fix or {}, forbid or {}, objective, chance, TIMEOUT_S / 2)
    decide = partial(plan_of_job, request, cluster, plan, options, derived=example_inputs is None)
    program, ours = _from_first_rank(decide, lambda plan: capture_for(request, plan.degrees))
    origin = _same_settings(OriginalModel(model, without_weights, loss_fn, program.reads))
    source = on_all_ranks(lambda: parameter_source(model, state=state, seed=seed, dtype=None))
    held = sent_buffers(program, source) if sent else own_buffers(program, source, on_meta=on_meta)
    buffers = _first_of(held, parameter_source(without_weights, seed=seed))
    parallel = ParallelModel(
        program, ours, source, device,
        seed=seed, replan=_replan(origin, request, cluster, program, ours), buffers=buffers, origin=origin, sent=sent,
    )  # fmt: skip
    return origin.attached(parallel, optimizer)


def _first_of(held: Mapping[str, torch.Tensor], late: ParameterSource) -> ParameterSource:
    """A source of held buffers. Other buffers come later from `late`, which keeps no weights."""
    return lambda name: held[name] if name in held else late(name)


def _from_first_rank(
    decide: Callable[[], tuple[Program, Plan]], capture: Callable[[Plan], Program]
) -> tuple[Program, Plan]:
    """The program and the plan that rank 0 decides, on every rank, or its `AutoparError`. Collective."""
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
        return on_all_ranks(lambda: _same_as(plan, *here or [capture(plan)])), plan
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

    on_all_ranks(check)
    return origin


def _same_as(plan: Plan, program: Program) -> Program:
    if plan.fingerprint != program.fingerprint:
        raise PlanError(
            f"rank {dist.get_rank()} captured another model than rank 0; build the same model on every rank"
        )
    return program


def _replan(origin: OriginalModel, planned: Request, cluster: ClusterSpec, program: Program, plan: Plan) -> Replan:
    """Captures the model, of which it holds no weights, for another batch or in eval mode, cut into the same stages."""
    model, around = origin.weightless, ambient_autocast()
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
            return captured, label_plan(captured, cluster, degrees, type(model).__name__, held=held, stage_of=placed)

        captured, decided = _from_first_rank(decide, lambda _: capture())
        origin.watch(captured.reads)
        return captured, decided

    return replan
