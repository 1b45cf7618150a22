"""From a model, a cluster and wished degrees to a program and its plan."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.explain import with_summary
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Degrees, Plan
from autopar.ir.program import Program
from autopar.ir.sharding import Dims, I, Type
from autopar.runtime.parameters import Held
from autopar.search.labels import LabelOptions, label
from autopar.trace.analysis import analyse
from autopar.trace.capture import Inputs, input_names
from autopar.trace.trace import batch_and_sequence, trace

PlanLike = Plan | Mapping[str, Any] | str | Path | None


def make_plan(
    model: nn.Module, cluster: ClusterSpec, example_inputs: Inputs, degrees: Degrees, *, name: str = ""
) -> tuple[Program, Plan]:
    """Capture the model at the global micro-batch and choose labels."""
    program = capture_for(model, example_inputs, degrees)
    return program, label_plan(program, cluster, degrees, name or type(model).__name__)


def capture_for(model: nn.Module, example_inputs: Inputs, degrees: Degrees, *, training: bool = True) -> Program:
    """The program at the global micro-batch of `degrees`. Raises `PlanError` where accumulation is not legal."""
    local_batch, _ = batch_and_sequence(input_names(model, example_inputs))
    micro_batch = degrees.micro_batch or local_batch
    program = trace(model, example_inputs, batch=micro_batch * degrees.dp, training=training)
    if degrees.accumulate > 1 and program.mixes_batch is not None:
        raise PlanError(
            f"accumulate = {degrees.accumulate} would change the loss: {program.mixes_batch}; use accumulate = 1"
        )
    return program


def label_plan(
    program: Program, cluster: ClusterSpec, degrees: Degrees, name: str, *, held: Mapping[str, Held] | None = None
) -> Plan:
    """The plan that the labeller finds for a program whose parameters may be `held` already."""
    analysis = analyse(program, degrees.mesh)
    pinned = {n: _as_held(how, analysis.outer[n]) for n, how in (held or {}).items() if n in program.parameters}
    found = label(program, analysis, degrees, cluster, options=LabelOptions(pinned=pinned))
    plan = Plan(
        fingerprint=program.fingerprint,
        model=name,
        degrees=degrees,
        blocks=found.blocks,
        batch=program.batch,
        sequence=program.sequence,
        torch_version=str(torch.__version__),
        notes=(*program.notes, *found.notes),
    )
    return with_summary(plan, program, analysis)


def _as_held(how: Held, dims: Dims) -> tuple[Type, ...]:
    """The types of a held parameter, whose dimensions another analysis may cut into other axes; invariant where those
    do not have the axis that is split."""
    types = []
    for kind in how.types:
        position = kind.position
        if kind.kind == "S":
            before = prod(how.dims.sizes[kind.dim][: kind.position])
            sizes = dims.sizes[kind.dim]
            position = next((p for p in range(len(sizes)) if prod(sizes[:p]) == before), -1)
            if position < 0:
                types.append(I)
                continue
        types.append(Type(kind.kind, kind.dim, position))
    return tuple(types)


def check_plan(plan: Plan, program: Program, world_size: int, local_batch: int | None = None) -> None:
    """Refuse a plan made for another model, shape, batch of one rank or world size. Raises `PlanError` naming what
    differs."""
    if plan.degrees.world_size != world_size:
        raise PlanError(
            f"the plan is for {plan.degrees.world_size} ranks, this job has {world_size}; start it with "
            f"--nproc-per-node {plan.degrees.world_size} in all, or plan again"
        )
    micro_batch, accumulate = plan.degrees.micro_batch, plan.degrees.accumulate
    if local_batch is not None and micro_batch is not None and local_batch != micro_batch * accumulate:
        raise PlanError(
            f"the plan is for {micro_batch * accumulate} sequences of one data-parallel rank in one step "
            f"({accumulate} × micro-batch {micro_batch}), the inputs have {local_batch}; pass such inputs or plan again"
        )
    if (plan.batch, plan.sequence) != (program.batch, program.sequence):
        raise PlanError(
            f"the plan is for a global micro-batch of {plan.batch} sequences of length {plan.sequence}, the inputs "
            f"have {program.batch} of length {program.sequence}; pass such inputs or plan again"
        )
    if plan.fingerprint != program.fingerprint:
        theirs = [b.signature for b in plan.blocks]
        ours = [b.signature for b in program.blocks]
        differing = [b.name for b, s in zip(program.blocks, theirs, strict=False) if b.signature != s]
        raise PlanError(
            f"the plan was made for another model ({plan.model or 'unnamed'}): "
            + (
                f"blocks {differing} differ"
                if differing
                else f"{len(theirs)} distinct blocks there, {len(ours)} here"
                if len(theirs) != len(ours)
                else "parameters differ in name, shape or dtype"
            )
            + "; plan again for this model"
        )
