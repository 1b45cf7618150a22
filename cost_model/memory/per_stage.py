"""What pipeline ranks hold under a plan's own stages, counted on the action list that runs.

Recomputation changes the activations alone. So `held_by_ranks` is called once for the stages, and its `memory` for
every number of recomputed blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.memory.formula import (
    StepMemory,
    logit_bytes,
    rank_memory,
    saved_of_roles,
    state_bytes,
)
from autopar.cost_model.pipeline.simulator import most_held
from autopar.cost_model.pipeline.stages import (
    ENDS,
    MOST_ACTIONS,
    Stages,
    calls_by_role,
    per_rank,
    recomputed_roles,
)
from autopar.cost_model.step.context import Basis
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.rank_parameters import RankParameters, block_parameters
from autopar.cost_model.step.saved_bytes import SavedBytes
from autopar.cost_model.step.unique_rows import spread
from autopar.cost_model.work.block_work import Family
from autopar.ir.arrays import Floats
from autopar.ir.schedules.registry import SCHEDULES

_V = TypeVar("_V")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleBytes:
    """What a call of every role saves of a micro-batch, its parameters, and bytes of the logits."""

    saved: Mapping[str, SavedBytes]
    parameters: Mapping[str, RankParameters]
    logits: Floats


def role_bytes(family: Family[Any], layouts: Layouts, basis: Basis) -> RoleBytes:
    """What every role keeps and holds, for `held_by_ranks`."""
    return RoleBytes(
        saved=saved_of_roles(family, layouts, basis),
        parameters={role: block_parameters(family, layouts, role) for role in family.roles},
        logits=logit_bytes(family, basis.shape, layouts, basis.engine),
    )


def memory_of_ranks(stages: Stages, family: Family[Any], layouts: Layouts, basis: Basis) -> StepMemory:
    """What every pipeline rank of one layout holds, in arrays of all ranks."""
    held = held_by_ranks(stages, role_bytes(family, layouts, basis), layouts, basis)
    if stages.full is not None and stages.selective is not None:
        return held.memory(*held.first_blocks(stages.full, stages.selective))
    return held.memory(*held.every_block(int(np.max(layouts.recompute))))


def fullest(memory: StepMemory) -> StepMemory:
    """The rank that holds most."""
    rank = [int(np.argmax(memory.peak_bytes))]
    return spread(memory, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldByRanks:
    """The memory of the ranks of a layout before any recomputation."""

    stages: Stages
    calls: NDArray[np.float64]  # of every role in each stage
    is_block: NDArray[np.bool_]
    saved: SavedBytes  # of a call of every role and a micro-batch
    state: Mapping[str, Floats]  # of every rank
    logits: Floats  # of every rank
    layout: Layouts
    basis: Basis

    def every_block(self, level: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The calls that are recomputed fully and selectively if all calls have one `level` (`RECOMPUTE`)."""
        return self.calls * (level == 2), self.calls * (level == 1)

    def first_blocks(
        self, full: Sequence[int], selective: Sequence[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The fully and the selectively recomputed calls of every role, from the numbers of blocks of every stage."""
        stages = replace(self.stages, full=tuple(full), selective=tuple(selective))
        roles, _ = calls_by_role(self.stages.roles)
        fully, partly = (
            np.array([[calls.count(role) for role in roles] for calls in each], dtype=np.float64)
            for each in recomputed_roles(stages)
        )
        return fully, partly

    def memory(self, full: NDArray[np.float64], selective: NDArray[np.float64]) -> StepMemory:
        """Memory of every rank where stages recompute so many calls of every role."""
        saved, stages, working = self.saved, self.stages, np.zeros(self.stages.pp)
        largest = np.maximum(np.where(full > 0, saved.whole, 0.0), np.where(selective > 0, saved.again, 0.0))
        largest = np.maximum(largest, np.where(self.calls > 0, saved.always, 0.0))
        np.maximum.at(working, stages.rank_index, largest.max(axis=1))
        freed = full @ (saved.none - saved.full) + selective @ (saved.none - saved.selective)
        live = _live_bytes(stages, self.calls @ saved.none - freed)
        blocks = float((self.calls * self.is_block).sum())
        return rank_memory(self.state, live, working, self.logits, blocks, self.layout, self.basis)


def held_by_ranks(stages: Stages, blocks: RoleBytes, layout: Layouts, basis: Basis) -> HeldByRanks:
    """The memory of the ranks of one layout."""
    roles, calls = calls_by_role(stages.roles)
    of_ranks = np.zeros((stages.pp, len(roles)))
    np.add.at(of_ranks, stages.rank_index, calls)
    is_end, nothing = np.array([role in ENDS for role in roles]), np.zeros(1)
    no_bytes = SavedBytes(**dict.fromkeys(SavedBytes.__slots__, nothing))
    saved = [blocks.saved.get(role, no_bytes) for role in roles]
    no_parameters = RankParameters(**dict.fromkeys(RankParameters.__slots__, nothing))
    parameters = [blocks.parameters.get(role, no_parameters) for role in roles]
    each = _stacked(parameters)

    def dense(elements: Floats) -> Floats:
        ends, repeated = of_ranks * (is_end * elements), of_ranks @ (~is_end * elements)
        return np.asarray(repeated + (ends.max(axis=1) if np.all(basis.shape.is_tied) else ends.sum(axis=1)))

    held = RankParameters(
        dense=dense(each.dense),
        expert=of_ranks @ each.expert,
        frozen_dense=dense(each.frozen_dense),
        frozen_expert=of_ranks @ each.frozen_expert,
    )
    has_last = of_ranks @ np.array([float(role == "last") for role in roles]) > 0
    return HeldByRanks(
        stages=stages,
        calls=calls,
        is_block=~is_end,
        saved=_stacked(saved),
        state={name: part + np.zeros(stages.pp) for name, part in _state(held, layout, basis).items()},
        logits=np.where(has_last, blocks.logits, 0.0),
        layout=layout,
        basis=basis,
    )


def _stacked(values: Sequence[_V]) -> _V:
    """The numbers of one layout in several values, as arrays."""
    names = [each.name for each in fields(type(values[0]))]  # type: ignore[arg-type]
    return type(values[0])(**{name: np.array([float(np.max(getattr(v, name))) for v in values]) for name in names})


def _state(parameters: RankParameters, layout: Layouts, basis: Basis) -> dict[str, Floats]:
    return state_bytes(parameters, layout, basis, 1.0, has_stages=True)


def bytes_of_roles(blocks: RoleBytes, layout: Layouts, basis: Basis) -> tuple[dict[str, float], list[dict[str, float]]]:
    """The memory of one call of every role: state with the logits, and saved bytes by the level of recomputation."""
    saved = [
        {role: float(np.max(getattr(saved, name))) for role, saved in blocks.saved.items()}
        for name in ("none", "selective", "full")
    ]
    roles, parameters = zip(*blocks.parameters.items(), strict=True)
    parts = _state(_stacked(parameters), layout, basis).values()
    state = dict(zip(roles, np.sum([np.broadcast_to(p, len(roles)) for p in parts], axis=0), strict=True))
    state["last"] = state.get("last", 0.0) + float(np.max(blocks.logits))
    return state, saved


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
