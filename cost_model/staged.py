"""A plan's own pipeline stages: what its cuts give every rank, and the action list that runs, priced.

The step's pipeline is the replayed action list (`autopar.cost_model.simulate`). Lists of more than `MOST_ACTIONS`
passes are priced by the closed form of unequal ranks (`autopar.cost_model.pipelines.unequal_step_s`), which agrees
with the replay where it is exact. Memory is counted on the same list: what every stage holds of a micro-batch from its
forward to its backward pass, and the state of the parameters that its calls take.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.engine import Engine
from autopar.cost_model.expressions import Family
from autopar.cost_model.layout import Layouts, Shape
from autopar.cost_model.pipelines import blocking_message_s, live_stage_micro_batches, unequal_step_s
from autopar.cost_model.simulate import StageSeconds, peak_held_bytes, shared_step_s, simulate
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
from autopar.ir.schedules import SCHEDULES, actions, rank_of_stage

Floats = NDArray[Any]
MOST_ACTIONS = 10_000
ENDS = ("first", "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The roles of every stage's calls, and how micro-batches pass through them: `runs` times the schedule."""

    roles: tuple[tuple[str, ...], ...]
    schedule: str
    pp: int
    virtual: int
    micro_batches: int
    runs: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return tuple(rank_of_stage(self.schedule, self.pp, stage) for stage in range(len(self.roles)))

    @property
    def num_actions(self) -> int:
        passes = 3 if SCHEDULES[self.schedule].splits_backward else 2
        return passes * len(self.roles) * self.micro_batches

    def of_rank(self, rank: int) -> tuple[str, ...]:
        """The roles of all calls of a rank."""
        return tuple(role for roles, own in zip(self.roles, self.ranks, strict=True) if own == rank for role in roles)


def stages_at(
    calls: Sequence[str], cuts: Sequence[int], *, schedule: str, pp: int, virtual: int, micro_batches: int, runs: int
) -> Stages:
    """Calls, given by their roles, cut before the given positions."""
    bounds = pairwise((0, *cuts, len(calls)))
    roles = tuple(tuple(role for role in calls[start:stop] if role) for start, stop in bounds)
    return Stages(roles=roles, schedule=schedule, pp=pp, virtual=virtual, micro_batches=micro_batches, runs=runs)


def pipeline_of(stages: Stages, engine: Engine, message_exposed: float, ranks_per_core: float = 1.0) -> Pipeline:
    """How `autopar.cost_model.step.step_seconds` prices these stages. `message_exposed` is the part of a message that
    its figures count where messages are overlapped; here the list shows what is hidden.

    Where ranks share cores, those that compute are faster while others wait (`shared_step_s`), and the parts are those
    of the mean rank.
    """

    def priced(passes: Mapping[str, Passes], message: Floats) -> Pipelined:
        def of_stages(value: Callable[[Passes], Any]) -> list[float]:
            return [sum(float(np.max(value(passes[role]))) for role in roles) for roles in stages.roles]

        forward, backward = of_stages(lambda one: one.forward), of_stages(lambda one: one.backward)
        weight = of_stages(lambda one: np.asarray(one.weight))
        busy = _per_rank(stages, [f + b for f, b in zip(forward, backward, strict=True)])
        slowest = int(np.argmax(busy))
        is_overlapped = engine.messages == "overlapped"
        one = float(np.max(message)) / (message_exposed if is_overlapped else 1.0)
        total, sending = _seconds(stages, forward, backward, weight, one, is_overlapped, ranks_per_core)
        blocks = [float(sum(role not in ENDS for role in stages.of_rank(rank))) for rank in range(stages.pp)]
        of_rank = np.mean if ranks_per_core > 1 else lambda values: values[slowest]
        own, waited, held = of_rank(busy), of_rank(sending), of_rank(blocks)
        return Pipelined(
            busy=np.asarray([own]),
            blocks=np.asarray([held]),
            idle=np.asarray([stages.runs * max(0.0, total - stages.micro_batches * own - waited)]),
            messages=np.asarray([stages.runs * waited]),
        )

    return priced


def _seconds(
    stages: Stages,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
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
    between = [message] * (len(stages.roles) - 1)
    seconds = StageSeconds(
        forward_s=forward,
        backward_s=backward,
        input_s=[b - w for b, w in zip(backward, weight, strict=True)],
        weight_s=weight,
        forward_message_s=between,
        backward_message_s=between,
    )
    orders = actions(stages.schedule, stages.pp, stages.virtual, stages.micro_batches)
    found = simulate(orders, seconds, messages="overlapped" if is_overlapped else "blocking")
    return shared_step_s(found, ranks_per_core) if ranks_per_core > 1 else found.step_s, found.sending_s


def _per_rank(stages: Stages, seconds: Sequence[float]) -> NDArray[np.float64]:
    found = np.zeros(stages.pp)
    np.add.at(found, list(stages.ranks), seconds)
    return found


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
    kept, working = _kept(stages, family, shape, layouts, engine, fused=fused)
    held = _held(stages, [sum(kept.get(role, 0.0) for role in roles) for roles in stages.roles])
    found = []
    for rank in range(stages.pp):
        roles = stages.of_rank(rank)
        dense, expert = _elements(family, roles, layouts, is_tied=bool(np.all(shape.is_tied)))
        parts = state_bytes(np.asarray([dense]), np.asarray([expert]), shape, layouts, engine)
        whole = (shape.element_bytes + GRADIENT_BYTES) * (dense + expert)  # with stages a step's weights stay gathered
        gathered = whole if np.all(layouts.zero >= 3) else 0.0
        logits = float(np.max(logit_bytes(family, shape))) if "last" in roles else 0.0
        parts |= {
            "gathered": np.asarray([gathered]),
            "activations": np.asarray([held[rank]]),
            "workspace": np.asarray([max((working.get(role, 0.0) for role in roles), default=0.0)]),
            "logits": np.asarray([logits]),
        }
        held_bytes = float(sum(np.max(part) for part in parts.values()))
        parts |= {"cache": np.asarray([cache * held_bytes]), "reserve": np.asarray([float(reserve_bytes)])}
        found.append(parts)
    totals = [float(np.sum([np.max(part) for part in parts.values()])) for parts in found]
    fullest = int(np.argmax(totals))
    return StepMemory(peak_bytes=np.asarray([totals[fullest]]), parts=found[fullest])


def _kept(
    stages: Stages, family: Family[Any], shape: Shape, layouts: Layouts, engine: Engine, *, fused: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Per repeated role, bytes kept of a micro-batch, and bytes while it is computed again."""
    kept, working = {}, {}
    for role in {role for roles in stages.roles for role in roles if role not in ENDS}:
        alone = replace(shape, counts=((role, np.ones(1)),))
        saved, inputs = activations(family, alone, layouts, engine, fused=fused)
        kept[role] = float(np.max(kept_bytes(saved, inputs, layouts.recompute, engine)))
        working[role] = float(np.max(saved)) if np.all(layouts.recompute == 2) else 0.0
    return kept, working


def _held(stages: Stages, held_bytes: Sequence[float]) -> NDArray[np.float64]:
    """The most that every rank holds for backward passes at once."""
    if stages.num_actions <= MOST_ACTIONS:
        orders = actions(stages.schedule, stages.pp, stages.virtual, stages.micro_batches)
        return peak_held_bytes(orders, held_bytes)
    live = live_stage_micro_batches(
        stages.schedule,
        pp=stages.pp,
        virtual_stages=stages.virtual,
        micro_batches=stages.micro_batches,
        rank=np.arange(stages.pp),
    )
    found: NDArray[np.float64] = np.asarray(live) / stages.virtual * _per_rank(stages, held_bytes)
    return found


def _elements(family: Family[Any], roles: Sequence[str], layouts: Layouts, *, is_tied: bool) -> tuple[float, float]:
    """Parameters of a rank, those of experts apart."""
    dense = expert = 0.0
    ends = []
    for role in roles:
        work = family.block(role, "tp")
        own = float(np.max(work.parameters_split + work.parameters_whole))
        experts = float(np.max(work.parameters_expert / layouts.ep))
        if role in ENDS:
            ends.append((role, own))
        else:
            dense += own
        expert += experts
    of_ends = [sum(own for role, own in ends if role == end) for end in ENDS]
    return dense + (max(of_ends) if is_tied else sum(of_ends)), expert
