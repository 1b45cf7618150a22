"""`autopar trace`: start ranks, run a few steps of a model under a plan, and keep one of them as a trace."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.capture.record.file import to_bytes
from autopar.commands.unmodified import structured, tensors_of
from autopar.commands.verify import Job, built_on_rank, decide
from autopar.ir.plan import Plan
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.parameters.materialise import parameter_source
from autopar.runtime.profile.chrome_trace import TrackTime, check_writable, track_times
from autopar.runtime.verify.random_batches import random_batches, values_that_decide
from autopar.runtime.verify.reference import constants_of
from autopar.runtime.verify.verify import check_dtype, this_ranks_part


def trace_model(
    job: Job,
    path: str | os.PathLike[str],
    *,
    world_size: int,
    degrees: Mapping[str, Any] | None = None,
    plan: Path | str | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[Plan, list[TrackTime]]:
    """Write a trace of one step on `world_size` gloo ranks of this machine; returns the plan and the trace's tracks.

    Raises `InputError` or `PlanError` on bad input before any rank starts, and `RankError` where a rank fails.
    """
    check_writable(path)
    check_dtype(job.dtype)
    model, program, decided = decide(job, world_size, degrees, plan, on_progress)
    on_progress(f"three steps on {world_size} ranks")
    with Ranks(world_size, checked=False) as world:
        target, given = "autopar.commands.profile:traced_on_rank", values_that_decide(program, tensors_of(model))
        world.run(target, job, decided, to_bytes(program), given, str(Path(path).absolute()))
    return decided, track_times(json.loads(Path(path).read_text()))


def traced_on_rank(
    rank: int, job: Job, plan: Plan, program_bytes: bytes, given: Mapping[str, torch.Tensor], path: str
) -> None:
    """The work of one rank."""
    model, program = built_on_rank(job, plan, program_bytes)
    source = parameter_source(model.model, seed=job.seed)
    parallel = ParallelModel(program, plan, source, torch.device("cpu"), seed=job.seed)
    (batch,) = random_batches(program, plan.degrees, 1, job.seed, given, constants_of(program, source))
    own = this_ranks_part(program, batch, plan.degrees, parallel.rank_mesh.sample_ranks.coordinate)
    parallel.trace(path, structured(model, own))
