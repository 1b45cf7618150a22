"""What pipeline ranks hold under a plan's own stages, counted on the action list that runs.

Recomputation changes the activations alone. So `held_by_ranks` is called once for the stages, and its `memory` for
every number of recomputed blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.memory.formula import (
    MemoryBasis,
    StepMemory,
    beside_freed,
    gathered_bytes,
    gone_logits,
    logit_bytes,
    makes_gradients,
    state_bytes,
)
from autopar.cost_model.pipeline.simulator import most_held
from autopar.cost_model.pipeline.stages import (
    ENDS,
    MOST_ACTIONS,
    Stages,
    calls_by_role,
    per_rank,
    recomputed,
    recomputed_selectively,
)
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.rank_parameters import RankParameters, block_parameters
from autopar.cost_model.step.saved_bytes import SavedBytes, activations, on_device
from autopar.cost_model.work.block_work import Family
from autopar.ir.arrays import Floats
from autopar.ir.schedules.registry import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleBytes:
    """Bytes and elements of every layout by role."""

    saved: Mapping[str, SavedBytes]  # of a repeated block and a micro-batch
    dense: Mapping[str, Floats]  # elements of parameters without experts
    expert: Mapping[str, Floats]  # elements of experts
    logits: Floats


def role_bytes(family: Family[Any], layouts: Layouts, basis: MemoryBasis) -> RoleBytes:
    """What every role keeps and holds, for `held_by_ranks`."""
    shape, engine = basis.shape, basis.engine
    alone = {role: replace(shape, counts=((role, np.ones(1)),)) for role, _ in shape.counts}
    saved_of = {
        role: on_device(activations(family, layout, layouts, engine, fused=basis.fused), engine)
        for role, layout in alone.items()
    }
    parameters = {role: block_parameters(family, layouts, role) for role in family.roles}
    return RoleBytes(
        saved=saved_of,
        dense={role: kind.dense for role, kind in parameters.items()},
        expert={role: kind.expert for role, kind in parameters.items()},
        logits=logit_bytes(family, shape, layouts, engine),
    )


def staged_memory(stages: Stages, family: Family[Any], layouts: Layouts, basis: MemoryBasis) -> StepMemory:
    """Peak of the fullest rank of one layout, and its parts."""
    return fullest(memory_of_ranks(stages, family, layouts, basis))


def memory_of_ranks(stages: Stages, family: Family[Any], layouts: Layouts, basis: MemoryBasis) -> StepMemory:
    """What every pipeline rank of one layout holds, in arrays of all ranks."""
    held = held_by_ranks(stages, role_bytes(family, layouts, basis), 0, layouts, basis)
    if stages.full is not None and stages.selective is not None:
        return held.memory(*held.first_blocks(stages.full, stages.selective))
    return held.memory(*held.every_block(int(np.max(layouts.recompute))))


def fullest(memory: StepMemory) -> StepMemory:
    """The rank that holds most."""
    rank = int(np.argmax(memory.peak_bytes))
    parts = {name: part[rank : rank + 1] for name, part in memory.parts.items()}
    return StepMemory(peak_bytes=memory.peak_bytes[rank : rank + 1], parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldByRanks:
    """The memory of ranks before any recomputation.

    `calls` is the number of calls of every role in each stage. `saved` is the bytes that a call saves of a micro-batch.
    Full recomputation frees `freed` of them, and selective recomputation `freed_selectively`. `again` is what selective
    recomputation of a call makes again at once, and `whole` what full recomputation makes. `always` is on the device
    while a call runs. `kept_bytes` is the bytes that a stage saves without recomputation. `gone_logits` is the bytes of
    the logits that are gone when a block is recomputed. `is_made` says whether the backward pass makes the gradients.
    """

    stages: Stages
    calls: NDArray[np.float64]
    is_block: NDArray[np.bool_]
    saved: NDArray[np.float64]
    freed: NDArray[np.float64]
    freed_selectively: NDArray[np.float64]
    again: NDArray[np.float64]
    whole: NDArray[np.float64]
    always: NDArray[np.float64]
    kept_bytes: NDArray[np.float64]
    state: Mapping[str, Floats]
    logits: Floats
    gone_logits: Floats
    cache: float
    reserve_bytes: float
    is_made: bool

    def every_block(self, level: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The calls that are recomputed fully and selectively if all calls have one `level` (`RECOMPUTE`)."""
        return self.calls * (level == 2), self.calls * (level == 1)

    def first_blocks(
        self, full: Sequence[int], selective: Sequence[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The fully and the selectively recomputed calls of every role, from the numbers of blocks of every stage."""
        stages = replace(self.stages, full=tuple(full), selective=tuple(selective))
        if np.count_nonzero(self.is_block) == 1:
            mine = self.calls * self.is_block
            first = np.minimum(mine, np.array(full)[:, None])
            return first, np.minimum(mine - first, np.array(selective)[:, None])
        roles, _ = calls_by_role(self.stages.roles)
        fully, partly = (
            np.array([[calls.count(role) for role in roles] for calls in each], dtype=np.float64)
            for each in (recomputed(stages), recomputed_selectively(stages))
        )
        return fully, partly

    def memory(self, full: NDArray[np.float64], selective: NDArray[np.float64]) -> StepMemory:
        """Memory of every rank where stages recompute so many calls of every role."""
        pp = self.stages.pp
        working = np.zeros(pp)
        largest = np.maximum(np.where(full > 0, self.whole, 0.0), np.where(selective > 0, self.again, 0.0))
        largest = np.maximum(largest, np.where(self.calls > 0, self.always, 0.0))
        np.maximum.at(working, self.stages.rank_index, largest.max(axis=1))
        freed = full @ self.freed + selective @ self.freed_selectively
        live = _live_bytes(self.stages, self.kept_bytes - freed)
        parts = {**self.state, "activations": live, "logits": self.logits}
        parts["workspace"] = np.maximum(working - self.gone_logits, 0.0)
        num_blocks = max(1.0, float((self.calls * self.is_block).sum()))
        parts["gradients"] = beside_freed(parts["gradients"], live * (1 - 1 / num_blocks) + self.logits, self.is_made)
        held = sum(parts.values())
        parts |= {"cache": np.asarray(self.cache * held), "reserve": np.full(pp, self.reserve_bytes)}
        return StepMemory(peak_bytes=np.asarray(held + parts["cache"] + parts["reserve"]), parts=parts)


def held_by_ranks(stages: Stages, blocks: RoleBytes, index: int, layout: Layouts, basis: MemoryBasis) -> HeldByRanks:
    """The memory of the ranks of one layout: the layout at this `index` in `blocks`."""
    roles, calls = calls_by_role(stages.roles)
    of_ranks = np.zeros((stages.pp, len(roles)))
    np.add.at(of_ranks, stages.rank_index, calls)
    nothing = np.zeros(stages.pp)

    def of_roles(values: Mapping[str, Floats]) -> NDArray[np.float64]:
        return np.array([float(_at(values[role], index)) if role in values else 0.0 for role in roles])

    is_end = np.array([role in ENDS for role in roles])
    saved, selective, inputs, again, whole, always = (
        of_roles({role: getattr(saved, name) for role, saved in blocks.saved.items()})
        for name in ("none", "selective", "full", "again", "whole", "always")
    )
    dense = of_roles(blocks.dense)
    ends = of_ranks * (is_end * dense)
    elements = of_ranks @ (~is_end * dense) + (ends.max(axis=1) if np.all(basis.shape.is_tied) else ends.sum(axis=1))
    parameters = RankParameters(dense=elements, expert=of_ranks @ of_roles(blocks.expert))
    state = _stage_state(parameters, layout, basis)
    has_last = of_ranks @ np.array([float(role == "last") for role in roles]) > 0
    logits = np.where(has_last, float(_at(blocks.logits, index)), 0.0)
    return HeldByRanks(
        stages=stages,
        calls=calls,
        is_block=~is_end,
        saved=saved,
        freed=saved - inputs,
        freed_selectively=saved - selective,
        again=again,
        whole=whole,
        always=always,
        kept_bytes=calls @ saved,
        state={name: part + nothing for name, part in state.items()},
        logits=logits,
        gone_logits=logits * gone_logits(basis.shape, basis.engine),
        cache=basis.cache,
        reserve_bytes=float(basis.reserve_bytes),
        is_made=bool(np.all(makes_gradients(layout, basis.engine))),
    )


def _stage_state(parameters: RankParameters, layout: Layouts, basis: MemoryBasis) -> dict[str, Floats]:
    """`state_bytes`, and the gathered part of them. With stages, gathered weights stay until the step ends."""
    gathered = gathered_bytes(parameters, basis.shape, layout, basis.engine, np.ones(1), has_stages=True)
    return state_bytes(parameters, basis.shape, layout, basis.engine) | {"gathered": gathered}


def bytes_of_roles(
    blocks: RoleBytes, index: int, layout: Layouts, basis: MemoryBasis
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """The memory of one call of every role under the layout at an `index` of `blocks`.

    It has the state of its parameters (with the logits), and the bytes saved of a micro-batch without recomputation,
    with selective and with full recomputation.
    """
    dense, expert = (
        {role: float(_at(values, index)) for role, values in counts.items()} for counts in (blocks.dense, blocks.expert)
    )
    saved = [
        {role: float(_at(getattr(saved, name), index)) for role, saved in blocks.saved.items()}
        for name in ("none", "selective", "full")
    ]
    parameters = RankParameters(dense=np.array([*dense.values()]), expert=np.array([*expert.values()]))
    parts = _stage_state(parameters, layout, basis)
    state = dict(zip(dense, np.sum([np.broadcast_to(p, len(dense)) for p in parts.values()], axis=0), strict=True))
    state["last"] = state.get("last", 0.0) + float(_at(blocks.logits, index))
    return state, saved


def _at(values: Floats, index: int) -> Any:
    values = np.asarray(values).reshape(-1)
    return values[index if len(values) > 1 else 0]


def _live_bytes(stages: Stages, held_bytes: Floats) -> NDArray[np.float64]:
    """The most that every rank holds for backward passes at once, of what stages hold of a micro-batch."""
    run = stages.schedule, stages.pp, stages.virtual, stages.micro_batches
    if stages.num_actions <= MOST_ACTIONS:
        rows, first = _rows_of_ranks(*run)
        most: NDArray[np.float64] = np.maximum.reduceat(rows @ held_bytes, first)
        return most
    live = SCHEDULES[stages.schedule].most_in_flight(
        pp=stages.pp,
        virtual_stages=stages.virtual,
        micro_batches=stages.micro_batches,
        rank=np.arange(stages.pp),
    )
    live_bytes: NDArray[np.float64] = np.asarray(live) / stages.virtual * per_rank(stages, held_bytes)
    return live_bytes


@lru_cache(maxsize=64)
def _rows_of_ranks(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """The rows of `most_held` of all ranks, and the position of each rank's first row."""
    rows = most_held(schedule, pp, virtual_stages, micro_batches)
    return np.concatenate(rows), np.cumsum([0, *map(len, rows[:-1])])
