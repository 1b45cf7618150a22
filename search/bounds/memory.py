"""The least memory of many candidates at once, and how many blocks must be recomputed for them to fit.

Memory is counted on the first and on the last pipeline rank. `autopar.cost_model.pipeline.stages` has the formulas,
`autopar.search.bounds.uniform_partition` the cuts. A rank holds the
state of its parameters, the weights that ZeRO 3 gathers, the activations of the micro-batches in flight, and the
logits.

Recomputation has a level from 0 to 2. At 0 no block is recomputed, at 1 every block selectively, at 2 every block
fully. Between two levels, the fraction counts the blocks that have the higher one. A fraction of the blocks saves the
same fraction of the activations. It adds the values of one block that are computed again.

A rank with several stages holds more micro-batches of one stage than of another. If the order of passes leaves this
stage open, the bound assumes the smallest one. The chosen plan is counted again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.memory.formula import BlockBytes, MemoryBasis, gathered_bytes, state_bytes
from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.cost_model.step.rank_parameters import rank_parameters
from autopar.cost_model.work.block_work import Family
from autopar.ir.arrays import Floats
from autopar.ir.schedules.interleaved_1f1b import round_size
from autopar.ir.schedules.registry import SCHEDULE_NAMES, SCHEDULES
from autopar.search.bounds.pipeline import IS_V
from autopar.search.bounds.uniform_partition import EvenCuts

MOST_LEVEL = 2.0  # every block is recomputed fully
_End = tuple[Floats, Floats, Floats, Floats]  # state of a rank, and its activations at the levels 0, 1 and 2
MOST_SHARE = 2.0  # largest share of a rank's blocks; above 1 the rank would give blocks to others
MEAN_OF = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0)  # the first rank's weight in a mean with the last
# the parts of a rank's memory, by the names of `autopar.cost_model.memory.formula`; the activations include the block
# that is being recomputed
PARTS = ("parameters", "gradients", "optimizer state", "gathered", "logits", "activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBounds:
    """Memory and recomputation: arrays with one element per candidate.

    Memory is the bytes of the fullest rank, without recomputation and with recomputation of all blocks. `state` is the
    part of the first figure that is parameters, gradients, optimizer state and gathered weights. `level` is the least
    level of recomputation. Above 2 the candidate never fits. `mean_selective` and `mean_full` estimate the fractions of
    the blocks that are recomputed selectively and fully if every rank chooses its own number of blocks. `largest` is a
    position in `PARTS`: the largest part of the fullest rank.
    """

    without: Floats
    recomputed: Floats
    state: Floats
    level: Floats
    mean_selective: Floats
    mean_full: Floats
    largest: Floats


def memory_bounds(
    schedule: NDArray[np.int64],
    parameters: Family[Any],
    blocks_save: BlockBytes,
    layouts: Layouts,
    basis: MemoryBasis,
    cuts: EvenCuts,
    *,
    capacity_bytes: float,
    has_selective: bool,
) -> MemoryBounds:
    """Memory bounds of candidates. With `has_selective` blocks can be recomputed selectively.

    `schedule` holds positions in `SCHEDULE_NAMES`. `parameters` has the numbers of the blocks' parameters. A rank may
    use `capacity_bytes`.
    """
    shape, engine, saved = basis.shape, basis.engine, blocks_save.saved
    if not has_selective:  # the selective level is no recomputation
        saved = replace(saved, selective=saved.none, again=np.zeros(1))
    found: list[_End] = []
    states: list[dict[str, Floats]] = []
    owned = [_own(schedule, layouts, cuts, is_last) for is_last in (False, True)]
    # a rank without a repeated block recomputes nothing, and may be the fullest
    has_blocks = (owned[0][0] > 0) & (owned[1][0] > 0)
    always = np.where(has_blocks, saved.always, 0.0)  # a block's tensors before they are moved to the host
    working = (
        np.where(has_blocks, np.maximum(saved.again - saved.always, 0.0), 0.0),
        np.where(has_blocks, saved.whole - saved.always, 0.0),
    )
    for is_last, (blocks, ends) in zip((False, True), owned, strict=True):
        parts = _state(parameters, shape, layouts, engine, blocks, ends)
        parts["logits"] = np.where(ends[1], blocks_save.logits, 0.0)
        states.append(parts)
        state = basis.reserve_bytes + np.asarray(sum(parts.values())) + always
        held = np.where(layouts.pp > 1, _held_blocks(schedule, layouts, cuts, blocks, is_last), blocks)
        found.append((state, held * saved.none, held * saved.selective, held * saved.full))
    levels = [_level(capacity_bytes, one, working) for one in found]
    totals = [[state + a for state, a, _, _ in found], [state + b + working[1] for state, _, _, b in found]]
    least = [np.minimum(*each) for each in zip(*totals, strict=True)]
    again = np.maximum(*totals[1]) < np.maximum(*totals[0])
    by_part = [
        state | {"activations": np.where(again, b + working[1], a)}
        for state, (_, a, _, b) in zip(states, found, strict=True)
    ]
    selective, full = _mean_shares(capacity_bytes, found, working)
    return MemoryBounds(
        without=np.maximum(*totals[0]),
        recomputed=np.maximum(*totals[1]),
        state=np.where(totals[0][0] >= totals[0][1], found[0][0], found[1][0]),
        level=np.maximum(*levels),
        mean_selective=selective,
        mean_full=full,
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


def level_weights(level: Floats) -> tuple[Floats, Floats, Floats]:
    """The fractions of the blocks that are not recomputed, recomputed selectively, and recomputed fully.

    Above the highest level the last fraction is above 1.
    """
    selective = np.maximum(1.0 - np.abs(level - 1.0), 0.0)
    full = np.maximum(level - 1.0, 0.0)
    return np.maximum(1.0 - level, 0.0), selective, full


def _level(capacity: float, end: _End, working: tuple[Floats, Floats]) -> Floats:
    """The least level of recomputation with which a rank fits."""
    state, none, selective, full = end

    def part(before: Floats, after: Floats, more: Floats) -> Floats:
        return np.asarray(np.maximum((state + before + more - capacity) / np.maximum(before - after, 1e-9), 1e-9))

    first, second = part(none, selective, working[0]), part(selective, full, working[1])
    return np.where(state + none <= capacity, 0.0, np.where(first <= 1, first, 1 + second))


def _mean_shares(capacity: float, ends: Sequence[_End], working: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """The fractions of the blocks to recompute selectively and fully, as the mean of all ranks.

    A rank's memory is interpolated between the first and the last rank.
    """
    first, last = ends
    found = []
    for part in MEAN_OF:
        state, none, selective, full = (part * a + (1 - part) * b for a, b in zip(first, last, strict=True))
        level = np.minimum(_level(capacity, (state, none, selective, full), working), 1 + MOST_SHARE)
        found.append(np.stack(np.broadcast_arrays(*level_weights(level)[1:])))
    mean = np.mean(np.broadcast_arrays(*found), axis=0)
    return mean[0], mean[1]
