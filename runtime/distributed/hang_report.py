"""The position of a rank in its step, read from its Python frames, for errors and for ranks that do not answer.

The position names the stage, the micro-batch, the block, and the message or collective that the rank waits for. A
collective has its mesh dimension, ranks and value. Steps log nothing: the frames of a waiting rank hold all of it.
"""

import linecache
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from autopar.ir.degrees import Degrees
from autopar.ir.program import CallSite
from autopar.runtime.distributed.collective_log import kind_of
from autopar.runtime.distributed.mesh import MeshDim, named_ranks

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PASSES = {"F": "forward pass", "B": "backward pass", "I": "backward pass", "W": "backward pass of weights"}
_SENDING_MODULES = ("torch.distributed.distributed_c10d", "torch.distributed.fsdp._fully_shard._fsdp_collectives")
_FIRST_ARGUMENT = re.compile(r"= [\w.]+\((\w+)")


@dataclass(frozen=True, eq=False, kw_only=True)
class Place:
    """The plan's degrees and the ranks of the pipeline, which frames do not hold."""

    degrees: Degrees
    pipeline: MeshDim | None

    def stage_on_rank(self, stage: int) -> str:
        """``stage 1 on rank 3``: a stage of this rank's pipeline."""
        assert self.pipeline is not None
        offset = self.degrees.rank_of_stage(stage) - self.pipeline.coordinate
        return f"stage {stage} on rank {dist.get_rank() + offset * self.pipeline.stride}"

    def neighbours(self) -> list[str]:
        """The stages that this rank's stages send to or receive from, on other ranks."""
        assert self.pipeline is not None
        mine = {s for s in range(self.degrees.num_stages) if self.degrees.rank_of_stage(s) == self.pipeline.coordinate}
        beside = {s + step for s in mine for step in (-1, 1)} - mine
        return [self.stage_on_rank(s) for s in sorted(beside) if 0 <= s < self.degrees.num_stages]


def frames_of(error: BaseException) -> list[FrameType]:
    """The frames of an error and of its direct cause, which torch wraps, outermost first."""
    errors = (e for e in (error, error.__cause__) if e is not None)
    return [frame for e in errors for frame, _ in traceback.walk_tb(e.__traceback__)]


def frames_of_thread(thread: int) -> list[FrameType]:
    """The frames of a running thread, outermost first."""
    return [frame for frame, _ in traceback.walk_stack(sys._current_frames()[thread])][::-1]


def rank_position(frames: Sequence[FrameType]) -> str:
    """The position of frames: ``rank 2: in pipeline stage 1, forward pass of micro-batch 0, block ...``."""
    selves = (getattr(frame.f_locals.get("self"), "place", None) for frame in frames)
    place = next((p for p in selves if isinstance(p, Place)), None)
    if place is None:
        return ""
    parts = [*_position(frames, place), _collective(frames)]
    return f"rank {dist.get_rank()}: {', '.join(part for part in parts if part)}"


def reports_position(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Add the rank's position to the `RuntimeError`s of a collective method, such as a collective's timeout."""

    @wraps(method)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if not getattr(error, "__notes__", None):  # a stage's error says more
                error.add_note(rank_position(frames_of(error)))
            raise

    return told


def _position(frames: Sequence[FrameType], place: Place) -> list[str]:
    """Stage, pass and micro-batch, the block, and the stage whose message is waited for."""
    names = [frame.f_code.co_name for frame in frames]
    is_waiting = "_wait_batch_p2p" in names
    actions = [f.f_locals.get("action") for f, name in zip(frames, names, strict=True) if name == "_perform_action"]
    calls = (frame.f_locals.get("call") for frame in reversed(frames))
    block = next((value for value in calls if isinstance(value, CallSite)), None)
    inside = "" if block is None else f"block {block.path!r}"
    if not actions:
        if is_waiting and place.pipeline is not None:
            return [f"at the end of the schedule, waiting for messages of {' and '.join(place.neighbours())}"]
        return ["in the step" if place.degrees.pp == 1 else "outside the stages of the pipeline", inside]
    action: Any = actions[-1]
    kind, stage = action.computation_type.value, action.stage_index
    at = "" if action.microbatch_index is None else f" of micro-batch {action.microbatch_index}"
    other = stage - 1 if kind == "F" else stage + 1
    waiting = f"waiting for {place.stage_on_rank(other)}" if is_waiting else ""
    return [f"in pipeline stage {stage}", f"{_PASSES.get(kind, kind)}{at}", inside, waiting]


def _collective(frames: Sequence[FrameType]) -> str:
    """The collective that the innermost frames are in: its kind, value, mesh dimension and ranks."""
    for frame in reversed(frames):
        name, local = frame.f_code.co_name.removeprefix("foreach_"), frame.f_locals
        kind = kind_of(name)
        mesh = local.get("mesh")
        kind = kind or ("all-gather and reduce-scatter" if "gathering" in local else None)  # of a fused gather
        if isinstance(mesh, MeshDim) and kind:
            return f"in {kind}{_value(frames)} over {mesh.name} ({_ranks_of(mesh.group)})"
        if kind and frame.f_globals.get("__name__") in _SENDING_MODULES:
            group = local.get("group") or local.get("reduce_scatter_group") or dist.group.WORLD
            assert isinstance(group, dist.ProcessGroup)
            of_mesh, _, dimension = str(group.group_desc).partition("mesh_")
            over = f"over {dimension} ({_ranks_of(group)})" if dimension and not of_mesh else f"of {_ranks_of(group)}"
            return f"in {kind} {over}"
    return ""


def _value(frames: Sequence[FrameType]) -> str:
    """The value that generated code is sending, by its name there."""
    code = next((f for f in reversed(frames) if f.f_code.co_filename.startswith("<eval_with_key>")), None)
    if code is None:
        return ""  # a backward pass
    line = linecache.getline(code.f_code.co_filename, code.f_lineno or 0, code.f_globals)
    match = _FIRST_ARGUMENT.search(line)
    return "" if match is None else f" of {match[1]!r}"


def _ranks_of(group: dist.ProcessGroup) -> str:
    return named_ranks(dist.get_process_group_ranks(group))
