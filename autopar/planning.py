"""From a model, a cluster and wished degrees to a program and its plan."""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Degrees, Plan, degrees_from
from autopar.ir.program import Program
from autopar.search.labels import label
from autopar.trace.analysis import analyse
from autopar.trace.capture import Inputs, input_names
from autopar.trace.trace import batch_and_sequence, trace

PlanLike = Plan | Mapping[str, Any] | str | Path | None


def resolve_degrees(wish: Mapping[str, Any] | None, world_size: int, local_batch: int) -> Degrees:
    """Degrees for `world_size` ranks from a partial wish; without one, pure FSDP over all of them.

    `local_batch` is the sequences of one data-parallel rank in one step. Raises `PlanError` listing every violation
    with the nearest legal values.
    """
    given = dict(wish or {})
    asked = degrees_from(given)
    if not {"dp", "dp_shard"} & set(given):
        asked = replace(asked, dp_shard=max(1, world_size // (asked.tp * asked.dp_replicate)))
    problems = []
    if asked.world_size != world_size:
        legal = [d for d in range(1, world_size + 1) if world_size % d == 0]
        problems.append(
            f"tp {asked.tp} × dp_shard {asked.dp_shard} × dp_replicate {asked.dp_replicate} = {asked.world_size} is not "
            f"the world size {world_size}; each degree must divide it: {legal}"
        )
    if local_batch % asked.accumulate:
        near = gcd(local_batch, asked.accumulate)
        problems.append(
            f"a batch of {local_batch} sequences per rank does not divide into accumulate = {asked.accumulate} "
            f"micro-batches; the nearest legal value is {near}"
        )
    elif asked.micro_batch is not None and asked.micro_batch * asked.accumulate != local_batch:
        problems.append(
            f"micro_batch {asked.micro_batch} × accumulate {asked.accumulate} is not the {local_batch} sequences of "
            f"this rank's batch; leave micro_batch out or pass {local_batch // asked.accumulate}"
        )
    if problems:
        raise PlanError("; ".join(problems))
    return replace(asked, micro_batch=local_batch // asked.accumulate)


def make_plan(
    model: nn.Module, cluster: ClusterSpec, example_inputs: Inputs, degrees: Degrees, *, name: str = ""
) -> tuple[Program, Plan]:
    """Capture the model at the global micro-batch and choose labels."""
    program = capture_for(model, example_inputs, degrees)
    return program, label_plan(program, cluster, degrees, name or type(model).__name__)


def capture_for(model: nn.Module, example_inputs: Inputs, degrees: Degrees) -> Program:
    """The program at the global micro-batch of `degrees`. Raises `PlanError` where accumulation is not legal."""
    local_batch, _ = batch_and_sequence(input_names(model, example_inputs))
    micro_batch = degrees.micro_batch or local_batch
    program = trace(model, example_inputs, batch=micro_batch * degrees.dp)
    if degrees.accumulate > 1 and program.splits_in_time is not None:
        raise PlanError(
            f"accumulate = {degrees.accumulate} would change the loss: {program.splits_in_time}; use accumulate = 1"
        )
    return program


def label_plan(program: Program, cluster: ClusterSpec, degrees: Degrees, name: str) -> Plan:
    """The plan that the labeller finds for a program."""
    analysis = analyse(program, degrees.mesh)
    found = label(program, analysis, degrees, cluster)
    return Plan(
        fingerprint=program.fingerprint,
        model=name,
        degrees=degrees,
        blocks=found.blocks,
        batch=program.batch,
        sequence=program.sequence,
        torch_version=torch.__version__,
        notes=tuple(found.notes),
    )


def check_plan(plan: Plan, program: Program, world_size: int) -> None:
    """Refuse a plan made for another model, shape or world size. Raises `PlanError` naming what differs."""
    if plan.degrees.world_size != world_size:
        raise PlanError(
            f"the plan is for {plan.degrees.world_size} ranks, this job has {world_size}; start it with "
            f"--nproc-per-node {plan.degrees.world_size} in all, or plan again"
        )
    if (plan.batch, plan.sequence) != (program.batch, program.sequence):
        raise PlanError(
            f"the plan is for a global micro-batch of {plan.batch} sequences of length {plan.sequence}, the inputs have "
            f"{program.batch} of length {program.sequence}; pass such inputs or plan again"
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
