"""A plan's own pipeline stages: what its cuts give every rank, and the action list that runs, priced.

The step's pipeline is the replayed action list (`autopar.cost_model.pipeline.simulator`). Lists of more than
`MOST_ACTIONS` passes are priced by the closed form of unequal ranks
(`autopar.cost_model.pipeline.closed_forms.unequal_step_s`), which agrees with the replay where it is exact. Memory is
counted on the same list (`autopar.cost_model.memory.per_stage`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.pipeline.closed_forms import unequal_step_s
from autopar.cost_model.pipeline.simulator import StageSeconds, replay_of, replayed, run_seconds, shared_step_s
from autopar.cost_model.step.assembly import Pipeline, PipelineTimes
from autopar.cost_model.step.context import Passes
from autopar.ir.arrays import Floats
from autopar.ir.degrees import Degrees
from autopar.ir.schedules.registry import SCHEDULES, rank_of_stage
from autopar.memo import Memo

MOST_ACTIONS = 10_000
ENDS = ("first", "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The roles of every stage's calls, and how micro-batches pass through them: `runs` times the schedule.

    `full` are how many of its first repeated blocks every stage recomputes fully, `selective` how many of the next ones
    it recomputes selectively. They are None where that is the same in all stages, as layouts have it: then `recomputes`
    says whether it is any.
    """

    roles: tuple[tuple[str, ...], ...]
    schedule: str
    pp: int
    virtual: int
    micro_batches: int
    runs: int
    full: tuple[int, ...] | None = None
    selective: tuple[int, ...] | None = None
    recomputes: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return _ranks(self.schedule, self.pp, len(self.roles))[0]

    @property
    def rank_index(self) -> NDArray[np.intp]:
        """As `ranks`."""
        return _ranks(self.schedule, self.pp, len(self.roles))[1]

    @property
    def num_actions(self) -> int:
        return SCHEDULES[self.schedule].passes_per_micro_batch * len(self.roles) * self.micro_batches

    def of_rank(self, rank: int) -> tuple[str, ...]:
        """The roles of all calls of a rank."""
        return tuple(role for roles, s in zip(self.roles, self.ranks, strict=True) if s == rank for role in roles)

    @property
    def repeated(self) -> tuple[tuple[str, ...], ...]:
        """The roles of the repeated blocks of every stage."""
        return _repeated(self.roles)


@lru_cache(maxsize=256)  # asked for with every price
def _ranks(schedule: str, pp: int, num_stages: int) -> tuple[tuple[int, ...], NDArray[np.intp]]:
    ranks = tuple(rank_of_stage(schedule, pp, stage) for stage in range(num_stages))
    return ranks, np.array(ranks)


@lru_cache(maxsize=256)
def _repeated(of_stages: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(role for role in roles if role not in ENDS) for roles in of_stages)


def stages_at(calls: Sequence[str], cuts: Sequence[int], degrees: Degrees) -> Stages:
    """Calls, given by their roles, cut before the given positions."""
    bounds = pairwise((0, *cuts, len(calls)))
    split = Stages(
        roles=tuple(tuple(role for role in calls[start:stop] if role) for start, stop in bounds),
        schedule=degrees.schedule,
        pp=degrees.pp,
        virtual=degrees.virtual_stages,
        micro_batches=degrees.micro_batches,
        runs=degrees.accumulate,
        recomputes=degrees.recompute != "none" and not degrees.is_recompute_open,
    )
    if not is_by_stage(degrees):
        return split
    full, selective = [], []
    for stage, repeated in enumerate(split.repeated):
        fully, partly = degrees.full_blocks_of(stage), degrees.selective_blocks_of(stage)
        full.append(len(repeated) if fully is None else min(fully, len(repeated)))
        rest = len(repeated) - full[-1]
        selective.append(rest if partly is None else min(partly, rest))
    return replace(split, full=tuple(full), selective=tuple(selective))


def is_by_stage(degrees: Degrees) -> bool:
    """Whether stages have their own numbers of recomputed blocks."""
    return isinstance(degrees.recompute_blocks, tuple) or isinstance(degrees.selective_blocks, tuple)


def pipelines_of(
    stages: Sequence[Stages],
    engine: Engine,
    message_exposed: float,
    ranks_per_core: float = 1.0,
    memo: Memo | None = None,
    *,
    every_rank: bool = False,
) -> Pipeline:
    """How `autopar.cost_model.step.step.step_of` prices the stages of every layout.

    `message_exposed` is the fraction of an overlapped message that its figures count; here the action list shows the
    hidden part. If ranks share cores, a computing rank is faster while others wait (`shared_step_s`), and the parts are
    those of the mean rank. With `every_rank` the parts of one layout are those of all ranks. Layouts that differ in
    data parallelism alone run the same: `memo` holds their pipelines.
    """
    is_overlapped, memo = engine.messages == "overlapped", Memo() if memo is None else memo

    def priced(passes: Mapping[str, Passes], message: Floats) -> PipelineTimes:
        size, roles = len(stages), tuple(passes)
        columns = [np.broadcast_to(values, size).tolist() for each in passes.values() for values in _fields(each)]
        messages = np.broadcast_to(message / (message_exposed if is_overlapped else 1.0), size).tolist()
        rows = [
            memo(_pipelined, each, roles, seconds, sent_s, is_overlapped, ranks_per_core, every_rank)
            for each, sent_s, seconds in zip(stages, messages, zip(*columns, strict=True), strict=True)
        ]
        busy, blocks, extra, full, selective, sending, idle = np.concatenate(rows, axis=1)
        return PipelineTimes(
            busy=busy, blocks=blocks, again=extra, full=full, selective=selective, idle=idle, messages=sending
        )

    return priced


def _fields(passes: Passes) -> tuple[Floats, ...]:
    return passes.forward, passes.backward, np.asarray(passes.weight), np.asarray(passes.selective)


def _pipelined(
    stages: Stages,
    roles: tuple[str, ...],
    seconds: tuple[float, ...],
    message: float,
    is_overlapped: bool,
    ranks_per_core: float,
    every_rank: bool,
) -> NDArray[np.float64]:
    """Figures of the slowest rank of one layout, of the mean rank if ranks share cores, or of every rank.

    These are seconds of a micro-batch, blocks, seconds of recomputation, fully and selectively recomputed blocks, and
    seconds of a step in messages and idle. Each role has the seconds of the fields of `Passes`.
    """
    passes = {role: seconds[4 * k : 4 * k + 4] for k, role in enumerate(roles)}
    forward, backward, weight, extra = seconds_of_stages(stages, passes)
    total, sending = _seconds(stages, forward, backward, weight, message, is_overlapped, ranks_per_core)
    counts = (np.array([float(len(roles)) for roles in each]) for each in (stages.repeated, *recomputed_roles(stages)))
    blocks, full, selective = (per_rank(stages, each) for each in counts)
    busy, extra_s, waits = (
        per_rank(stages, forward + backward),
        per_rank(stages, extra),
        np.broadcast_to(sending, stages.pp),
    )
    figures = np.array([busy, blocks, extra_s, full, selective, waits])
    if not every_rank:
        slowest = [int(np.argmax(busy))]
        figures = figures.mean(axis=1, keepdims=True) if ranks_per_core > 1 else figures[:, slowest]
    idle = np.maximum(0.0, total - stages.micro_batches * figures[0] - figures[-1])
    return np.vstack([figures[:-1], stages.runs * figures[-1], stages.runs * idle])


def seconds_of_roles(passes: Mapping[str, Passes]) -> dict[str, list[float]]:
    """The seconds of the fields of `Passes` for every role of one layout."""
    return {role: [float(np.max(values)) for values in _fields(each)] for role, each in passes.items()}


def seconds_of_stages(stages: Stages, passes: Mapping[str, Sequence[float]]) -> tuple[Floats, Floats, Floats, Floats]:
    """Forward, backward and weight seconds of one micro-batch in every stage, from the seconds of every role."""
    roles, counts = calls_by_role(stages.roles)
    forward, backward, weight = (counts @ np.array([passes[role][k] for role in roles]) for k in range(3))
    if SCHEDULES[stages.schedule].splits_backward:
        weight = np.where(_is_whole(stages), 0.0, weight)
    if stages.full is None:
        return forward, backward, weight, np.zeros(len(stages.roles))
    extra = np.zeros(len(stages.roles))
    for which, of_stage in zip((0, 3), recomputed_roles(stages), strict=True):
        extra += [sum(passes[role][which] for role in roles) for roles in of_stage]
    return forward, backward + extra, weight, extra


def _is_whole(stages: Stages) -> list[bool]:
    """The stages that recompute, whose backward passes therefore do not run in parts (`autopar.ir.stages.separates`).
    The first one's is one part anyway."""
    if stages.full is None or stages.selective is None:
        return [False, *(stages.recomputes and len(roles) > 0 for roles in stages.repeated[1:])]
    return [False, *(a + b > 0 for a, b in zip(stages.full[1:], stages.selective[1:], strict=True))]


def recomputed_roles(stages: Stages) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """The roles of the blocks that every stage recomputes fully and selectively, where stages differ in that."""
    nothing = (0,) * len(stages.roles)
    counts = list(zip(stages.repeated, stages.full or nothing, stages.selective or nothing, strict=True))
    return [roles[:full] for roles, full, _ in counts], [roles[full : full + more] for roles, full, more in counts]


@lru_cache(maxsize=256)
def calls_by_role(of_stages: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """All roles, and how many calls of each every stage has."""
    roles = tuple(dict.fromkeys(role for calls in of_stages for role in calls))
    return roles, np.array([[calls.count(role) for role in roles] for calls in of_stages], dtype=np.float64)


def _seconds(
    stages: Stages,
    forward: Floats,
    backward: Floats,
    weight: Floats,
    message: float,
    is_overlapped: bool,
    ranks_per_core: float,
) -> tuple[float, NDArray[np.float64]]:
    """Seconds of one run, and the seconds in which each rank waits for its own messages."""
    if stages.num_actions > MOST_ACTIONS:
        ranks = [per_rank(stages, seconds) for seconds in (forward, backward, weight)]
        run: dict[str, Any] = {"virtual_stages": stages.virtual, "micro_batches": stages.micro_batches}
        passes = dict(zip(("forward_s", "backward_s", "weight_s"), ranks, strict=True))
        whole = unequal_step_s(stages.schedule, **run, **passes)
        # an inner rank waits for v messages each way in every micro-batch
        is_waiting = not is_overlapped and stages.pp > 1
        waited = 2 * stages.virtual * stages.micro_batches * message if is_waiting else 0.0
        mean = stages.micro_batches * float(np.mean(ranks[0] + ranks[1]))
        shared = float(whole) if ranks_per_core == 1 else max(float(whole) / ranks_per_core, mean)
        return shared + waited, np.full(stages.pp, waited)
    seconds = stage_seconds(forward, backward, weight, message)
    replay = replay_of(stages.schedule, stages.pp, stages.virtual, stages.micro_batches)
    messages: Literal["overlapped", "blocking"] = "overlapped" if is_overlapped else "blocking"
    if ranks_per_core == 1:
        return run_seconds(replay, seconds, messages=messages)
    shared_run = replayed(replay, seconds, messages=messages)
    return shared_step_s(shared_run, ranks_per_core), shared_run.sending_s


def stage_seconds(forward: Floats, backward: Floats, weight: Floats, message: float) -> StageSeconds:
    """The times with which a run of a schedule is simulated, of one micro-batch."""
    between = [message] * (len(forward) - 1)
    return StageSeconds(
        forward_s=forward.tolist(),
        backward_s=backward.tolist(),
        input_s=(backward - weight).tolist(),
        weight_s=weight.tolist(),
        forward_message_s=between,
        backward_message_s=between,
    )


def per_rank(stages: Stages, values: Floats) -> NDArray[np.float64]:
    """What every rank has of values of all stages."""
    sums: NDArray[np.float64] = np.bincount(stages.rank_index, weights=values, minlength=stages.pp).astype(float)
    return sums
