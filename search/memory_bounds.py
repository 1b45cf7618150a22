"""Memory of many candidates at once, and how many blocks must be recomputed for them to fit.

Counted on the first and the last pipeline rank, by the same formulas as `autopar.cost_model.staged`, with the cuts of
`autopar.search.even_cuts`: state of the rank's parameters, what ZeRO 3 gathers, activations of the micro-batches in
flight, logits. Recomputing in a part of the blocks keeps as much less, plus one block's values while it is computed
again. The candidate that is chosen is counted once more on its own stages.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.engine import Engine
from autopar.cost_model.expressions import Family
from autopar.cost_model.layout import Layouts, Shape
from autopar.cost_model.pipelines import live_stage_micro_batches
from autopar.cost_model.step_memory import (
    GATHERED_BLOCKS,
    GRADIENT_BYTES,
    activations,
    kept_bytes,
    logit_bytes,
    state_bytes,
)
from autopar.search.even_cuts import EvenCuts
from autopar.search.pipeline_bounds import IS_V, NAMES

Floats = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBounds:
    """Bytes of the fullest rank without recomputation and with all of it, what of the former is state and gathered
    weights, and the least part of the blocks that must be recomputed to fit: above 1 where that does not help."""

    without: Floats
    recomputed: Floats
    state: Floats
    share: Floats


def memory_bounds(
    schedule: NDArray[np.int64],
    family: Family[Any],
    shape: Shape,
    layouts: Layouts,
    engine: Engine,
    cuts: EvenCuts,
    *,
    capacity_bytes: float,
    reserve_bytes: float,
    fused: bool,
) -> MemoryBounds:
    """`schedule` are positions in `autopar.search.pipeline_bounds.NAMES`; `capacity_bytes` is what a rank may hold."""
    saved, inputs = activations(family, shape, layouts, engine, fused=fused)
    kept = [kept_bytes(saved, inputs, np.asarray(level), engine) for level in (0, 2)]
    found: list[tuple[Floats, Floats, Floats]] = []
    for is_last in (False, True):
        blocks, ends = _own(schedule, layouts, cuts, is_last)
        state = reserve_bytes + _state(family, shape, layouts, engine, blocks, ends)
        state = state + np.where(ends[1], logit_bytes(family, shape), 0.0)
        rank = np.where(is_last, layouts.pp - 1, 0)
        live = _live(schedule, layouts, rank)
        each = np.where(layouts.pp > 1, live / layouts.virtual, 1.0) * blocks
        found.append((state, each * kept[0], each * kept[1]))
    shares = [_share(capacity_bytes, *one, working=saved) for one in found]
    totals = [[state + a for state, a, _ in found], [state + b + saved for state, _, b in found]]
    return MemoryBounds(
        without=np.maximum(*totals[0]),
        recomputed=np.maximum(*totals[1]),
        state=np.where(totals[0][0] >= totals[0][1], found[0][0], found[1][0]),
        share=np.maximum(*shares),
    )


def _live(schedule: NDArray[np.int64], layouts: Layouts, rank: Floats) -> Floats:
    """Pairs of stage and micro-batch that a rank holds at once."""
    found = np.zeros(schedule.shape)
    for position in np.unique(schedule):
        mine = schedule == position
        one = layouts.at(mine)
        found[mine] = live_stage_micro_batches(
            NAMES[position], pp=one.pp, virtual_stages=one.virtual, micro_batches=one.micro_batches, rank=rank[mine]
        )
    return found


def _own(
    schedule: NDArray[np.int64], layouts: Layouts, cuts: EvenCuts, is_last: bool
) -> tuple[Floats, tuple[Any, Any]]:
    """Repeated blocks of the first or the last rank, and whether it has the first and the last block."""
    alone = layouts.pp == 1
    v = np.maximum(layouts.virtual, 1)
    is_v = IS_V[schedule]
    others = (v - 1) * cuts.least
    blocks = (
        np.where(is_v, 2 * cuts.least, cuts.last + others)
        if is_last
        else cuts.first + np.where(is_v, cuts.last, others)
    )
    has_first = np.full(is_v.shape, not is_last)
    return np.where(alone, cuts.first, blocks), (alone | has_first, alone | (is_v == has_first))


def _state(
    family: Family[Any], shape: Shape, layouts: Layouts, engine: Engine, blocks: Floats, ends: tuple[Any, Any]
) -> Floats:
    """Parameters, gradients, optimizer state and gathered weights."""
    dense, expert = np.zeros(1), np.zeros(1)
    for role, count in shape.counts:
        work = family.block(role, "tp")
        share = count / shape.blocks
        dense = dense + share * (work.parameters_split + work.parameters_whole)
        expert = expert + share * work.parameters_expert / layouts.ep
    of_ends = []
    for role, has in zip(("first", "last"), ends, strict=True):
        end = family.block(role, "tp") if role in family.roles else None
        of_ends.append(np.where(has, 0.0 if end is None else end.parameters_split + end.parameters_whole, 0.0))
    both = np.where(shape.is_tied, np.maximum(*of_ends), of_ends[0] + of_ends[1])
    elements, experts = blocks * dense + both, blocks * expert
    parts = state_bytes(elements, experts, shape, layouts, engine)
    whole = elements + experts
    some = shape.element_bytes * GATHERED_BLOCKS * whole / np.maximum(blocks, 1)
    gathered = np.where(layouts.pp > 1, (shape.element_bytes + GRADIENT_BYTES) * whole, some)
    return np.asarray(sum(parts.values()) + np.where(layouts.zero >= 3, gathered, 0.0))


def _share(capacity: float, state: Floats, without: Floats, recomputed: Floats, *, working: Floats) -> Floats:
    """The least part of the blocks to recompute."""
    fits = state + without <= capacity
    saves = np.maximum(without - recomputed, 1e-9)
    share = (state + without + working - capacity) / saves
    return np.where(fits, 0.0, np.maximum(share, 1e-9))
