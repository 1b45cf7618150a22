"""The least memory of many candidates at once, and how many blocks must be recomputed for them to fit.

Memory is counted on the first and on the last pipeline rank. `autopar.cost_model.pipeline.stages` has the formulas,
`autopar.search.bounds.uniform_partition` the cuts. A rank holds the
state of its parameters, the weights that ZeRO 3 gathers, the activations of the micro-batches in flight, and the
logits.

Recomputation of a fraction of the blocks saves the same fraction of the activations. It adds the values of one block
while this block is computed again. A rank with several stages holds more micro-batches of one stage than of another. If
the order of passes leaves this stage open, the bound assumes the smallest one. The chosen plan is counted again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.memory.formula import (
    gathered_bytes,
    kept_bytes,
    logit_bytes,
    state_bytes,
)
from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.cost_model.step.offload import is_on_host
from autopar.cost_model.step.rank_parameters import rank_parameters
from autopar.cost_model.step.saved_bytes import activations
from autopar.cost_model.work.block_work import Family
from autopar.ir.arrays import Floats
from autopar.ir.offload import ACTIVATIONS
from autopar.ir.schedules.interleaved_1f1b import round_size
from autopar.ir.schedules.registry import SCHEDULE_NAMES, SCHEDULES
from autopar.search.bounds.pipeline import IS_V
from autopar.search.bounds.uniform_partition import EvenCuts

MOST_SHARE = 2.0  # largest share of a rank's blocks; above 1 the rank would give blocks to others
MEAN_OF = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0)  # the first rank's weight in a mean with the last
# the parts of a rank's memory, by the names of `autopar.cost_model.memory.formula`; the activations include the block
# that is being recomputed
PARTS = ("parameters", "gradients", "optimizer state", "gathered", "logits", "activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBounds:
    """Memory and recomputation: arrays with one element per candidate.

    Memory is the bytes of the fullest rank, without recomputation and with recomputation of all blocks. `state` is the
    part of the first figure that is parameters, gradients, optimizer state and gathered weights. `share` is the least
    fraction of the blocks to recompute. Above 1 the candidate never fits. `mean_share` estimates this fraction if every
    rank chooses its own number of blocks. `largest` is a position in `PARTS`: the largest part of the fullest rank.
    """

    without: Floats
    recomputed: Floats
    state: Floats
    share: Floats
    mean_share: Floats
    largest: Floats


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
    """Memory bounds of candidates.

    `schedule` holds positions in `SCHEDULE_NAMES`. `capacity_bytes` is the memory that a rank may use.
    """
    saved, inputs = activations(family, shape, layouts, engine, fused=fused)
    kept = [kept_bytes(saved, inputs, np.asarray(level), engine) for level in (0, 2)]
    found: list[tuple[Floats, Floats, Floats]] = []
    states: list[dict[str, Floats]] = []
    owned = [_own(schedule, layouts, cuts, is_last) for is_last in (False, True)]
    # a rank without a repeated block recomputes nothing, and may be the fullest
    working = np.where((owned[0][0] > 0) & (owned[1][0] > 0), saved, 0.0)
    always = working if is_on_host(engine, ACTIVATIONS) else np.zeros(1)  # a block's tensors before they are moved
    working = working - always
    for is_last, (blocks, ends) in zip((False, True), owned, strict=True):
        parts = _state(family, shape, layouts, engine, blocks, ends)
        parts["logits"] = np.where(ends[1], logit_bytes(family, shape), 0.0)
        states.append(parts)
        state = reserve_bytes + np.asarray(sum(parts.values())) + always
        held = np.where(layouts.pp > 1, _held_blocks(schedule, layouts, cuts, blocks, is_last), blocks)
        found.append((state, held * kept[0], held * kept[1]))
    shares = [_share(capacity_bytes, *one, working=working) for one in found]
    totals = [[state + a for state, a, _ in found], [state + b + working for state, _, b in found]]
    least = [np.minimum(*each) for each in zip(*totals, strict=True)]
    again = np.maximum(*totals[1]) < np.maximum(*totals[0])
    by_part = [
        state | {"activations": np.where(again, b + working, a)} for state, (_, a, b) in zip(states, found, strict=True)
    ]
    return MemoryBounds(
        without=np.maximum(*totals[0]),
        recomputed=np.maximum(*totals[1]),
        state=np.where(totals[0][0] >= totals[0][1], found[0][0], found[1][0]),
        share=np.maximum(*shares),
        mean_share=_mean_share(capacity_bytes, found, working=working),
        largest=np.where(least[0] >= least[1], *(_largest(parts) for parts in by_part)),
    )


def _held_blocks(
    schedule: NDArray[np.int64], layouts: Layouts, cuts: EvenCuts, blocks: Floats, is_last: bool
) -> Floats:
    """Blocks whose activations the first or the last rank holds at once; a block counts once per micro-batch."""
    found = np.zeros(schedule.shape)
    for position in np.unique(schedule):
        mine = schedule == position
        one, kind = layouts.at(mine), SCHEDULES[SCHEDULE_NAMES[position]]
        p, v, n = one.pp, np.maximum(one.virtual, 1), one.micro_batches
        first, last, least = (np.broadcast_to(x, mine.shape)[mine] for x in (cuts.first, cuts.last, cuts.least))
        run: dict[str, Any] = {"pp": p, "virtual_stages": v, "micro_batches": n, "rank": p - 1 if is_last else 0 * p}
        live = kind.most_in_flight(**run)
        if IS_V[position]:
            held = live * (least if is_last else np.minimum(first, last))
        else:  # micro-batches go through a rank's stages in rounds until the first comes back
            warm, in_round = kind.warm_up_passes(**run), round_size(p, n)
            rounds, rest = np.divmod(warm, in_round * v)
            of_end = rounds * in_round + np.clip(rest - (v - 1 if is_last else 0) * in_round, 0, in_round)
            end = last if is_last else first
            held = np.maximum(of_end * end + (warm - of_end) * least, live * np.minimum(end, least))
        own = np.broadcast_to(blocks, mine.shape)[mine]
        found[mine] = np.where(v == 1, live * own, np.minimum(held, live / v * own))
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


def _largest(parts: Mapping[str, Floats]) -> Floats:
    """The position of the largest part."""
    every = np.stack(np.broadcast_arrays(*(parts[name] for name in PARTS)))
    return np.asarray(np.argmax(every, axis=0), float)


def _state(
    family: Family[Any], shape: Shape, layouts: Layouts, engine: Engine, blocks: Floats, ends: tuple[Any, Any]
) -> dict[str, Floats]:
    """Parameters, gradients, optimizer state and gathered weights."""
    parameters = rank_parameters(family, shape, layouts, blocks, has_first=ends[0], has_last=ends[1])
    gathered = gathered_bytes(parameters, shape, layouts, engine, blocks, has_stages=layouts.pp > 1)
    return state_bytes(parameters, shape, layouts, engine) | {"gathered": gathered}


def _share(capacity: float, state: Floats, without: Floats, recomputed: Floats, *, working: Floats) -> Floats:
    """The least part of the blocks to recompute."""
    fits = state + without <= capacity
    saves = np.maximum(without - recomputed, 1e-9)
    share = (state + without + working - capacity) / saves
    return np.where(fits, 0.0, np.maximum(share, 1e-9))


def _mean_share(capacity: float, ends: Sequence[tuple[Floats, Floats, Floats]], *, working: Floats) -> Floats:
    """The fraction of the blocks to recompute, as the mean of all ranks.

    A rank's memory is interpolated between the first and the last rank.
    """
    first, last = ends
    shares = []
    for part in MEAN_OF:
        state, without, recomputed = (part * a + (1 - part) * b for a, b in zip(first, last, strict=True))
        shares.append(np.minimum(_share(capacity, state, without, recomputed, working=working), MOST_SHARE))
    return np.asarray(np.mean(np.broadcast_arrays(*shares), axis=0))
