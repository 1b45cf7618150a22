"""A plan's own pipeline stages: what its cuts give every rank, and the action list that runs, priced.

The step's pipeline is the replayed action list (`autopar.cost_model.simulate`). Lists of more than `MOST_ACTIONS`
passes are priced by the closed form of unequal ranks (`autopar.cost_model.pipelines.unequal_step_s`), which agrees
with the replay where it is exact. Memory is counted on the same list: what every stage holds of a micro-batch from its
forward to its backward pass, and the state of the parameters that its calls take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.engine import Engine
from autopar.cost_model.expressions import Family
from autopar.cost_model.layout import Layouts, Shape
from autopar.cost_model.pipelines import blocking_message_s, live_stage_micro_batches, unequal_step_s
from autopar.cost_model.simulate import StageSeconds, most_held, replay_of, replayed, run_seconds, shared_step_s
from autopar.cost_model.step_assembly import Pipeline, Pipelined
from autopar.cost_model.step_basis import Passes
from autopar.cost_model.step_memory import (
    GRADIENT_BYTES,
    StepMemory,
    activations,
    kept_bytes,
    logit_bytes,
    state_bytes,
)
from autopar.ir.plan import Degrees
from autopar.ir.schedules import SCHEDULES, rank_of_stage

Floats = NDArray[Any]
MOST_ACTIONS = 10_000
ENDS = ("first", "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The roles of every stage's calls, and how micro-batches pass through them: `runs` times the schedule.

    `again` are how many of its first repeated blocks every stage computes again; None where that is the same in all
    stages, as layouts have it.
    """

    roles: tuple[tuple[str, ...], ...]
    schedule: str
    pp: int
    virtual: int
    micro_batches: int
    runs: int
    again: tuple[int, ...] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return _ranks(self.schedule, self.pp, len(self.roles))

    @property
    def num_actions(self) -> int:
        passes = 3 if SCHEDULES[self.schedule].splits_backward else 2
        return passes * len(self.roles) * self.micro_batches

    def of_rank(self, rank: int) -> tuple[str, ...]:
        """The roles of all calls of a rank."""
        return tuple(role for roles, own in zip(self.roles, self.ranks, strict=True) if own == rank for role in roles)

    @property
    def repeated(self) -> tuple[tuple[str, ...], ...]:
        """The roles of the repeated blocks of every stage."""
        return tuple(tuple(role for role in roles if role not in ENDS) for roles in self.roles)


@lru_cache(maxsize=256)  # asked for with every price
def _ranks(schedule: str, pp: int, num_stages: int) -> tuple[int, ...]:
    return tuple(rank_of_stage(schedule, pp, stage) for stage in range(num_stages))


def stages_at(calls: Sequence[str], cuts: Sequence[int], degrees: Degrees) -> Stages:
    """Calls, given by their roles, cut before the given positions."""
    bounds = pairwise((0, *cuts, len(calls)))
    return Stages(
        roles=tuple(tuple(role for role in calls[start:stop] if role) for start, stop in bounds),
        schedule=degrees.schedule,
        pp=degrees.pp,
        virtual=degrees.virtual_stages,
        micro_batches=degrees.micro_batches,
        runs=degrees.accumulate,
        again=degrees.recompute_blocks if isinstance(degrees.recompute_blocks, tuple) else None,
    )


def pipeline_of(
    stages: Stages, engine: Engine, message_exposed: float, ranks_per_core: float = 1.0, *, every_rank: bool = False
) -> Pipeline:
    """How `autopar.cost_model.step.step_seconds` prices one layout's stages; see `pipelines_of`. With `every_rank` the
    parts are arrays of all ranks instead of the slowest one's, or the mean one's."""
    if not every_rank:
        return pipelines_of([stages], engine, message_exposed, ranks_per_core)
    is_overlapped = engine.messages == "overlapped"

    def priced(passes: Mapping[str, Passes], message: Floats) -> Pipelined:
        seconds = seconds_of_roles(passes)
        one = whole_message_s(message, engine, message_exposed)
        busy, blocks, again, total, sending = _of_ranks(stages, seconds, one, is_overlapped, ranks_per_core)
        idle = np.maximum(0.0, total - stages.micro_batches * busy - sending)
        return Pipelined(busy=busy, blocks=blocks, again=again, idle=stages.runs * idle, messages=stages.runs * sending)

    return priced


def whole_message_s(message: Floats, engine: Engine, message_exposed: float) -> float:
    """Seconds of one message, of which figures of overlapped ones count the part `message_exposed`."""
    return float(np.max(message)) / (message_exposed if engine.messages == "overlapped" else 1.0)


def pipelines_of(
    stages: Sequence[Stages | None], engine: Engine, message_exposed: float, ranks_per_core: float = 1.0
) -> Pipeline:
    """How `autopar.cost_model.step.step_of` prices the stages of every layout; None leaves one out, with zeros.

    `message_exposed` is the part of a message that its figures count where messages are overlapped; here the list shows
    what is hidden. Where ranks share cores, those that compute are faster while others wait (`shared_step_s`), and the
    parts are those of the mean rank.
    """
    is_overlapped = engine.messages == "overlapped"

    def priced(passes: Mapping[str, Passes], message: Floats) -> Pipelined:
        whole = {
            role: [np.broadcast_to(one, len(stages)) for one in (each.forward, each.backward, np.asarray(each.weight))]
            for role, each in passes.items()
        }
        one_message = np.broadcast_to(message / (message_exposed if is_overlapped else 1.0), len(stages))
        found = np.zeros((5, len(stages)))
        for i, each in enumerate(stages):
            if each is not None:
                seconds = {role: [float(column[i]) for column in columns] for role, columns in whole.items()}
                found[:, i] = _pipelined(each, seconds, float(one_message[i]), is_overlapped, ranks_per_core)
        return Pipelined(busy=found[0], blocks=found[1], again=found[2], idle=found[3], messages=found[4])

    return priced


def _pipelined(
    stages: Stages, passes: Mapping[str, Sequence[float]], message: float, is_overlapped: bool, ranks_per_core: float
) -> tuple[float, float, float, float, float]:
    """What `Pipelined` holds, of forward, backward and weight seconds of every role."""
    busy, blocks, again, total, sending = _of_ranks(stages, passes, message, is_overlapped, ranks_per_core)
    slowest = int(np.argmax(busy))
    own, waited, held, repeated = (
        float(np.mean(values) if ranks_per_core > 1 else values[slowest]) for values in (busy, sending, blocks, again)
    )
    idle = max(0.0, total - stages.micro_batches * own - waited)
    return own, held, repeated, stages.runs * idle, stages.runs * waited


def _of_ranks(
    stages: Stages, passes: Mapping[str, Sequence[float]], message: float, is_overlapped: bool, ranks_per_core: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], float, NDArray[np.float64]]:
    """Of every rank: seconds of its passes of a micro-batch, its repeated blocks, and the seconds that it computes
    again; seconds of one run; and those that every rank waits for its messages."""
    forward, backward, weight, again = seconds_of_stages(stages, passes)
    total, sending = _seconds(stages, forward, backward, weight, message, is_overlapped, ranks_per_core)
    blocks, repeated = (_per_rank(stages, one) for one in (np.array([len(own) for own in stages.repeated]), again))
    return _per_rank(stages, forward + backward), blocks, repeated, total, np.broadcast_to(sending, (stages.pp,))


def seconds_of_roles(passes: Mapping[str, Passes]) -> dict[str, list[float]]:
    """Forward, backward and weight seconds of every role of one layout."""
    return {
        role: [float(np.max(one)) for one in (each.forward, each.backward, np.asarray(each.weight))]
        for role, each in passes.items()
    }


def seconds_of_stages(stages: Stages, passes: Mapping[str, Sequence[float]]) -> tuple[Floats, Floats, Floats, Floats]:
    """Forward, backward and weight seconds of one micro-batch in every stage, of those of every role; and what of the
    backward pass is computed again, where stages differ in that."""
    roles, counts = counted(stages.roles)
    forward, backward, weight = (counts @ np.array([passes[role][k] for role in roles]) for k in range(3))
    if stages.again is None:
        return forward, backward, weight, np.zeros(len(stages.roles))
    again = np.array([sum(passes[role][0] for role in own) for own in recomputed(stages)])
    return forward, backward + again, weight, again


def recomputed(stages: Stages) -> list[tuple[str, ...]]:
    """The roles of the blocks that every stage computes again, where stages differ in that."""
    return [own[:most] for own, most in zip(stages.repeated, stages.again or [0] * len(stages.roles), strict=True)]


def counted(of_stages: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """All roles, and how many calls of each every stage has."""
    roles = tuple(dict.fromkeys(role for own in of_stages for role in own))
    return roles, np.array([[own.count(role) for role in roles] for own in of_stages], dtype=np.float64)


def _seconds(
    stages: Stages,
    forward: Floats,
    backward: Floats,
    weight: Floats,
    message: float,
    is_overlapped: bool,
    ranks_per_core: float,
) -> tuple[float, NDArray[np.float64]]:
    """Seconds of one run, and those that each rank waits for its own messages. A long list of ranks that share cores
    takes as long as they compute in the mean, or as its closed form on whole cores."""
    if stages.num_actions > MOST_ACTIONS:
        ranks = [_per_rank(stages, seconds) for seconds in (forward, backward, weight)]
        whole = unequal_step_s(
            stages.schedule,
            micro_batches=stages.micro_batches,
            forward_s=ranks[0],
            backward_s=ranks[1],
            weight_s=ranks[2],
            virtual_stages=stages.virtual,
        )
        waited = 0.0
        if not is_overlapped:
            waited = float(
                blocking_message_s(
                    pp=stages.pp,
                    virtual_stages=stages.virtual,
                    micro_batches=stages.micro_batches,
                    message_s=message,
                )
            )
        mean = stages.micro_batches * float(np.mean(ranks[0] + ranks[1]))
        shared = float(whole) if ranks_per_core == 1 else max(float(whole) / ranks_per_core, mean)
        return shared + waited, np.full(stages.pp, waited)
    seconds = stage_seconds(forward, backward, weight, message)
    replay = replay_of(stages.schedule, stages.pp, stages.virtual, stages.micro_batches)
    messages: Literal["overlapped", "blocking"] = "overlapped" if is_overlapped else "blocking"
    if ranks_per_core == 1:
        return run_seconds(replay, seconds, messages=messages)
    found = replayed(replay, seconds, messages=messages)
    return shared_step_s(found, ranks_per_core), found.sending_s


def stage_seconds(forward: Floats, backward: Floats, weight: Floats, message: float) -> StageSeconds:
    """What a run of a schedule is simulated with: seconds of one micro-batch in every stage, and of a message."""
    between = [message] * (len(forward) - 1)
    return StageSeconds(
        forward_s=forward.tolist(),
        backward_s=backward.tolist(),
        input_s=(backward - weight).tolist(),
        weight_s=weight.tolist(),
        forward_message_s=between,
        backward_message_s=between,
    )


def _per_rank(stages: Stages, values: Floats) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.bincount(stages.ranks, weights=values, minlength=stages.pp).astype(float)
    return found


# ---- memory ----


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleBytes:
    """Of every layout by role: bytes that a repeated block keeps of a micro-batch without recomputation, and those of
    its input; elements of parameters, those of experts apart; and bytes of logits."""

    saved: Mapping[str, Floats]
    inputs: Mapping[str, Floats]
    dense: Mapping[str, Floats]
    expert: Mapping[str, Floats]
    logits: Floats


def role_bytes(family: Family[Any], shape: Shape, layouts: Layouts, engine: Engine, *, fused: bool) -> RoleBytes:
    """What every role keeps and holds, for `memory_of_each_rank`."""
    alone = {role: replace(shape, counts=((role, np.ones(1)),)) for role, _ in shape.counts}
    found = {role: activations(family, one, layouts, engine, fused=fused) for role, one in alone.items()}
    works = {role: family.block(role, "tp") for role in family.roles}
    return RoleBytes(
        saved={role: saved for role, (saved, _) in found.items()},
        inputs={role: inputs for role, (_, inputs) in found.items()},
        dense={role: np.asarray(work.parameters_split + work.parameters_whole) for role, work in works.items()},
        expert={role: np.asarray(work.parameters_expert / layouts.ep) for role, work in works.items()},
        logits=logit_bytes(family, shape),
    )


def staged_memory(
    stages: Stages,
    family: Family[Any],
    shape: Shape,
    layouts: Layouts,
    engine: Engine,
    *,
    reserve_bytes: float,
    cache: float,
    fused: bool,
) -> StepMemory:
    """Peak of the fullest rank of one layout, and what makes it up."""
    given: dict[str, Any] = {"reserve_bytes": reserve_bytes, "cache": cache, "fused": fused}
    return fullest(memory_of_ranks(stages, family, shape, layouts, engine, **given))


def memory_of_ranks(
    stages: Stages,
    family: Family[Any],
    shape: Shape,
    layouts: Layouts,
    engine: Engine,
    *,
    reserve_bytes: float,
    cache: float,
    fused: bool,
) -> StepMemory:
    """What every pipeline rank of one layout holds, in arrays of all ranks."""
    found = role_bytes(family, shape, layouts, engine, fused=fused)
    return memory_of_each_rank(stages, found, 0, shape, layouts, engine, reserve_bytes=reserve_bytes, cache=cache)


def fullest(found: StepMemory) -> StepMemory:
    """The rank that holds most."""
    rank = int(np.argmax(found.peak_bytes))
    parts = {name: part[rank : rank + 1] for name, part in found.parts.items()}
    return StepMemory(peak_bytes=found.peak_bytes[rank : rank + 1], parts=parts)


def memory_of_each_rank(
    stages: Stages,
    blocks: RoleBytes,
    index: int,
    shape: Shape,
    layout: Layouts,
    engine: Engine,
    *,
    reserve_bytes: float,
    cache: float,
) -> StepMemory:
    """As `memory_of_ranks`, of the one of several layouts that has this `index` in `blocks`."""
    roles, counts = counted(stages.roles)
    of_ranks = np.zeros((stages.pp, len(roles)))
    np.add.at(of_ranks, list(stages.ranks), counts)
    again = np.where(np.all(layout.recompute == 2), counts, 0.0)
    if stages.again is not None:
        again = np.array([[own.count(role) for role in roles] for own in recomputed(stages)], dtype=np.float64)

    def of_roles(values: Mapping[str, Floats]) -> NDArray[np.float64]:
        return np.array([float(_at(values[role], index)) if role in values else 0.0 for role in roles])

    is_end = np.array([role in ENDS for role in roles])
    saved, dense = of_roles(blocks.saved), of_roles(blocks.dense)
    ends = of_ranks * (is_end * dense)
    elements = of_ranks @ (~is_end * dense) + (ends.max(axis=1) if np.all(shape.is_tied) else ends.sum(axis=1))
    experts = of_ranks @ of_roles(blocks.expert)
    parts = stage_state(elements, experts, shape, layout, engine)
    inputs, kinds = of_roles(blocks.inputs), np.where(layout.recompute == 1, 1, 0)
    held = counts @ kept_bytes(saved, inputs, kinds, engine) - again @ (saved - inputs)
    working = np.zeros(stages.pp)
    np.maximum.at(working, list(stages.ranks), np.where(again > 0, saved, 0.0).max(axis=1))
    has_last = of_ranks @ np.array([float(role == "last") for role in roles]) > 0
    parts |= {
        "activations": _held(stages, held),
        "workspace": working,
        "logits": np.where(has_last, float(_at(blocks.logits, index)), 0.0),
    }
    parts |= {"cache": np.asarray(cache * sum(parts.values())), "reserve": np.full(stages.pp, float(reserve_bytes))}
    parts = {name: part + np.zeros(stages.pp) for name, part in parts.items()}
    return StepMemory(peak_bytes=np.asarray(sum(parts.values())), parts=parts)


def stage_state(elements: Floats, expert: Floats, shape: Shape, layout: Layouts, engine: Engine) -> dict[str, Floats]:
    """As `state_bytes`, and what of it a step gathers, which with stages stays until the step ends."""
    parts = state_bytes(elements, expert, shape, layout, engine)
    whole = (shape.element_bytes + GRADIENT_BYTES) * (elements + expert)
    return parts | {"gathered": np.where(np.all(layout.zero >= 3), whole, 0.0)}


def bytes_of_roles(
    blocks: RoleBytes, index: int, shape: Shape, layout: Layouts, engine: Engine
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """What one call of every role holds under the layout at an `index` of `blocks`: state of its parameters (with the
    logits), what it keeps of a micro-batch without recomputation, and its input."""
    dense, expert, saved, inputs = (
        {role: float(_at(values, index)) for role, values in one.items()}
        for one in (blocks.dense, blocks.expert, blocks.saved, blocks.inputs)
    )
    parts = stage_state(np.array([*dense.values()]), np.array([*expert.values()]), shape, layout, engine)
    state = dict(zip(dense, np.sum([np.broadcast_to(one, len(dense)) for one in parts.values()], axis=0), strict=True))
    state["last"] = state.get("last", 0.0) + float(_at(blocks.logits, index))
    return state, saved, inputs


def _at(values: Floats, index: int) -> Any:
    values = np.asarray(values).reshape(-1)
    return values[index if len(values) > 1 else 0]


def _held(stages: Stages, held_bytes: Floats) -> NDArray[np.float64]:
    """The most that every rank holds for backward passes at once."""
    if stages.num_actions <= MOST_ACTIONS:
        counts = most_held(stages.schedule, stages.pp, stages.virtual, stages.micro_batches)
        return np.array([float(np.max(rows @ held_bytes)) for rows in counts])
    live = live_stage_micro_batches(
        stages.schedule,
        pp=stages.pp,
        virtual_stages=stages.virtual,
        micro_batches=stages.micro_batches,
        rank=np.arange(stages.pp),
    )
    found: NDArray[np.float64] = np.asarray(live) / stages.virtual * _per_rank(stages, held_bytes)
    return found
