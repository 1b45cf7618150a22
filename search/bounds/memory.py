"""The least memory of many candidates at once, and how many blocks must be recomputed for them to fit.

Memory is counted on three pipeline ranks: the first, the last, and the *full* rank. The full rank has at least as many
blocks as the mean rank, rounded up. `autopar.cost_model.pipeline.stages` has the formulas,
`autopar.search.bounds.uniform_partition` the cuts. A rank holds the state of its parameters, the weights that ZeRO 3
gathers, the activations of the micro-batches in flight, the logits, the allocator's cache, and the reserve.

Recomputation has a level from 0 to 2. At 0 no block is recomputed, at 1 every block selectively, at 2 every block
fully. Between two levels, the fraction counts the blocks that have the higher one. A fraction of the blocks saves the
same fraction of the activations. It adds the values of one block that are computed again.

`autopar.search.bounds.in_flight` counts the micro-batches that a rank holds. The chosen plan is counted again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.memory.formula import gone_logits, makes_gradients, state_bytes
from autopar.cost_model.shared_prices import SharedPrices
from autopar.cost_model.step.context import repeated_roles
from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.cost_model.step.rank_parameters import block_parameters, rank_parameters
from autopar.cost_model.step.saved_bytes import SavedBytes, least_of
from autopar.cost_model.step.unique_rows import Distinct, spread
from autopar.cost_model.work.block_work import Family
from autopar.ir.arrays import Floats
from autopar.search.bounds.in_flight import Pipelines, held_by_end, held_by_full
from autopar.search.bounds.pipeline import IS_V
from autopar.search.bounds.uniform_partition import EvenCuts

MOST_LEVEL = 2.0  # every block is recomputed fully
NEVER = MOST_LEVEL + 1  # a level that no recomputation reaches
MOST_SHARE = 2.0  # largest share of a rank's blocks; above 1 the rank would give blocks to others
_ROUNDING = 1e-9  # of a number of parameters
MEAN_OF = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0)  # the first rank's weight in a mean with the last
# the parts of a rank's memory, by the names of `autopar.cost_model.memory.formula`; the activations include the block
# that is being recomputed
PARTS = ("parameters", "gradients", "optimizer state", "gathered", "logits", "activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """Bytes of a pipeline rank."""

    parts: Mapping[str, Floats]  # of `state`
    state: Floats  # everything but activations, and but gradients that the backward pass makes
    at_end: Floats  # the least that the rank holds when this pass ends, if it makes the gradients; else 0
    saved: tuple[Floats, Floats, Floats]  # activations at the levels 0, 1 and 2
    working: tuple[Floats, Floats]  # the block that is being recomputed, at the levels 1 and 2

    def bytes(self, level: int) -> Floats:
        """All bytes at a level."""
        at_start = self.state + self.saved[level] + (self.working[level - 1] if level else 0.0)
        return np.maximum(at_start, self.at_end)

    def between(self, other: "_Rank", part: float) -> "_Rank":
        """The mean with another rank. This one has the weight `part`. Both have the same blocks."""
        none, selective, full = (part * a + (1 - part) * b for a, b in zip(self.saved, other.saved, strict=True))
        state, at_end = (part * a + (1 - part) * b for a, b in ((self.state, other.state), (self.at_end, other.at_end)))
        return replace(self, parts={}, state=state, at_end=at_end, saved=(none, selective, full))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBounds:
    """Memory and recomputation: arrays with one element per candidate."""

    without: Floats  # bytes of the fullest rank without recomputation
    recomputed: Floats  # bytes of the fullest rank if all blocks are recomputed
    state: Floats  # of `without`: parameters, gradients, optimizer state and gathered weights
    level: Floats  # the least level of recomputation; above 2 the candidate never fits
    mean_selective: Floats  # fractions of the blocks if every rank chooses its own number of blocks: estimated
    mean_full: Floats
    largest: Floats  # a position in `PARTS`: the largest part of the fullest rank


def memory_bounds(
    schedule: NDArray[np.int64],
    shared: SharedPrices,
    cuts: EvenCuts,
    peers: Distinct,
    *,
    capacity_bytes: float,
    has_selective: bool,
) -> MemoryBounds:
    """Memory bounds of candidates. A candidate fits if its peak is at most `capacity_bytes`."""
    layouts, basis, parameters = shared.layouts, shared.basis, shared.parameters(shared.row)
    shape, engine, blocks_save = basis.shape, basis.engine, spread(shared.bytes_of_blocks, shared.row)
    saved, least_saved = blocks_save.saved, spread(least_of([*shared.bytes_of_roles.saved.values()]), shared.row)
    if not has_selective:  # the selective level is no recomputation
        saved = replace(saved, selective=saved.none, again=np.zeros(1))
        least_saved = replace(least_saved, selective=least_saved.none, again=np.zeros(1))
    runs = Pipelines.of(schedule, layouts, cuts, peers.rows)
    owned = [_own(schedule, layouts, cuts, is_last) for is_last in (False, True)]
    # a rank without a repeated block recomputes nothing, and may be the fullest
    has_blocks = (owned[0][0] > 0) & (owned[1][0] > 0)

    def rank(blocks: Floats, ends: tuple[Any, Any], held: Floats, saved: SavedBytes) -> _Rank:
        held_parameters = rank_parameters(parameters, shape, layouts, blocks, has_first=ends[0], has_last=ends[1])
        parts = state_bytes(held_parameters, layouts, basis, blocks, has_stages=layouts.pp > 1)
        parts["logits"] = np.where(ends[1], blocks_save.logits, 0.0)
        held = held if peers.index is None else held[peers.index]
        cached, reserve = 1 + basis.machine.mechanisms.allocator_cache, basis.machine.reserve_bytes
        held = cached * np.where(layouts.pp > 1, held, blocks)
        before = saved.always  # a block's tensors before they are moved to the host
        room = parts["logits"] * gone_logits(shape, engine)
        always, recomputed, whole = (
            np.where(has_blocks, np.maximum(room_of - room, 0.0), 0.0)
            for room_of in (before, np.maximum(saved.again, before), np.maximum(saved.whole, before))
        )
        every, has_gradients = np.asarray(sum(parts.values())), makes_gradients(layouts, engine)
        at_start = every - np.where(has_gradients, parts["gradients"], 0.0) + always
        return _Rank(
            parts=parts,
            state=reserve + cached * at_start,
            at_end=np.where(has_gradients, reserve + cached * (every - parts["logits"]), 0.0),
            saved=(held * saved.none, held * saved.selective, held * saved.full),
            working=(cached * (recomputed - always), cached * (whole - always)),
        )

    total = _counted(parameters, shape, layouts)
    first, last = (
        rank(blocks, ends, held_by_end(runs, spread(blocks, peers.rows), is_last=is_last), saved)
        for is_last, (blocks, ends) in zip((False, True), owned, strict=True)
    )
    full = rank(np.ceil(total / layouts.pp), (False, False), held_by_full(runs, spread(total, peers.rows)), least_saved)
    ranks = (first, last, full)
    without, recomputed = ([rank.bytes(level) for rank in ranks] for level in (0, 2))
    is_full = _most(recomputed) < _most(without)
    mean_selective, mean_full = _mean_shares(capacity_bytes, first, last)
    return MemoryBounds(
        without=_most(without),
        recomputed=_most(recomputed),
        state=_of_most(without, [np.maximum(rank.state, rank.at_end) for rank in ranks]),
        level=_most([_level(capacity_bytes, rank) for rank in ranks]),
        mean_selective=mean_selective,
        mean_full=mean_full,
        largest=_of_most(
            [np.minimum(*each) for each in zip(without, recomputed, strict=True)],
            [_largest(rank, is_full) for rank in ranks],
        ),
    )


def _most(values: Sequence[Floats]) -> Floats:
    return np.maximum(np.maximum(values[0], values[1]), values[2])


def _of_most(keys: Sequence[Floats], values: Sequence[Floats]) -> Floats:
    """The value of the rank with the largest key. Of equal keys, the first counts."""
    a, b, c = keys
    return np.where(c > np.maximum(a, b), values[2], np.where(b > a, values[1], values[0]))


def _counted(parameters: Family[Any], shape: Shape, layouts: Layouts) -> Floats:
    """The blocks that have at least as many parameters as the mean block, trained ones and all."""
    of_role, roles = dict(shape.counts), repeated_roles(shape)
    each = {role: block_parameters(parameters, layouts, role) for role in roles}
    is_counted = dict.fromkeys(roles, np.full(1, True))
    for elements in ({r: p.whole for r, p in each.items()}, {r: p.trained.whole for r, p in each.items()}):
        mean = sum((share * elements[role] for role, share in roles.items()), np.zeros(1))
        is_counted = {role: is_counted[role] & (n >= mean * (1 - _ROUNDING)) for role, n in elements.items()}
    return np.asarray(sum((np.where(is_counted[role], of_role[role], 0.0) for role in roles), np.zeros(1)))


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


def _largest(rank: "_Rank", is_full: NDArray[np.bool_]) -> Floats:
    """The position of a rank's largest part in `PARTS`. The blocks are recomputed fully where `is_full` says so."""
    none, _, full = rank.saved
    parts = {**rank.parts, "activations": np.where(is_full, full + rank.working[1], none)}
    every = np.stack(np.broadcast_arrays(*(parts[name] for name in PARTS)))
    return np.asarray(np.argmax(every, axis=0), float)


def level_weights(level: Floats) -> tuple[Floats, Floats, Floats]:
    """The fractions of the blocks recomputed not, selectively and fully. The last is above 1 above the top level."""
    selective = np.maximum(1.0 - np.abs(level - 1.0), 0.0)
    full = np.maximum(level - 1.0, 0.0)
    return np.maximum(1.0 - level, 0.0), selective, full


def _level(capacity: float, rank: "_Rank") -> Floats:
    """The least level of recomputation with which a rank fits."""
    none, selective, full = rank.saved

    def part(before: Floats, after: Floats, more: Floats) -> Floats:
        return np.asarray(np.maximum((rank.state + before + more - capacity) / np.maximum(before - after, 1e-9), 1e-9))

    first, second = part(none, selective, rank.working[0]), part(selective, full, rank.working[1])
    level = np.where(rank.state + none <= capacity, 0.0, np.where(first <= 1, first, 1 + second))
    return np.where(rank.at_end > capacity, NEVER, level)


def _mean_shares(capacity: float, first: "_Rank", last: "_Rank") -> tuple[Floats, Floats]:
    """The mean fractions to recompute selectively and fully over all ranks, between the first one and the last."""
    level_parts = []
    for part in MEAN_OF:
        level = np.minimum(_level(capacity, first.between(last, part)), 1 + MOST_SHARE)
        level_parts.append(np.stack(np.broadcast_arrays(*level_weights(level)[1:])))
    mean = np.mean(np.broadcast_arrays(*level_parts), axis=0)
    return mean[0], mean[1]
