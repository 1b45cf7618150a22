"""The blocks whose activations a pipeline rank holds at once, for many pipelines. A block counts once per micro-batch.

A rank with several stages holds more micro-batches of one stage than of another. Micro-batches go through the stages of
a rank in rounds, until the first one comes back. If the order of passes leaves the number of a stage open, the smallest
one is assumed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.unique_rows import spread
from autopar.ir.arrays import Floats
from autopar.ir.schedules.interleaved_1f1b import round_size
from autopar.ir.schedules.registry import SCHEDULE_NAMES, SCHEDULES
from autopar.ir.schedules.schedule import Schedule
from autopar.search.bounds.uniform_partition import EvenCuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelines:
    """Pipelines as arrays: `schedule` holds positions in `SCHEDULE_NAMES`."""

    schedule: NDArray[np.int64]
    pp: Floats
    virtual: Floats
    micro_batches: Floats
    first: Floats  # blocks of the first stage
    last: Floats  # blocks of the last stage
    most: Floats  # blocks of the fullest stage between
    least: Floats  # blocks of the emptiest stage between

    @classmethod
    def of(cls, schedule: NDArray[np.int64], layouts: Layouts, cuts: EvenCuts, rows: NDArray[np.intp]) -> "Pipelines":
        """The pipelines of some candidates."""
        columns = {name: getattr(layouts, name) for name in ("pp", "virtual", "micro_batches")}
        columns |= {name: getattr(cuts, name) for name in ("first", "last", "most", "least")}
        return cls(schedule=schedule[rows], **{name: spread(np.asarray(one), rows) for name, one in columns.items()})

    @property
    def stages(self) -> Floats:
        """Stages of a rank."""
        return np.maximum(self.virtual, 1)


def held_by_end(runs: Pipelines, blocks: Floats, *, is_last: bool) -> Floats:
    """What the first or the last rank holds. It has so many `blocks`."""

    def held(kind: Schedule, p: Any, v: Any, n: Any, first: Any, last: Any, least: Any, blocks: Any) -> Floats:
        run: dict[str, Any] = {"pp": p, "virtual_stages": v, "micro_batches": n, "rank": p - 1 if is_last else 0 * p}
        live = kind.most_in_flight(**run)
        if kind.placement == "v":
            held_blocks = live * (least if is_last else np.minimum(first, last))
        else:
            warm, in_round = kind.warm_up_passes(**run), round_size(p, n)
            rounds, rest = np.divmod(warm, in_round * v)
            of_end = rounds * in_round + np.clip(rest - (v - 1 if is_last else 0) * in_round, 0, in_round)
            end = last if is_last else first
            held_blocks = np.maximum(of_end * end + (warm - of_end) * least, live * np.minimum(end, least))
        return np.asarray(np.where(v == 1, live * blocks, np.minimum(held_blocks, live / v * blocks)))

    return _by_schedule(runs, held, runs.first, runs.last, runs.least, blocks)


def held_by_full(runs: Pipelines, total: Floats) -> Floats:
    """What some rank holds at least, of `total` blocks on all ranks.

    Some rank has the blocks of the mean rank, rounded up. No stage has more blocks than the fullest one. So several
    ranks have that many, and the first of them is not the last rank. Its place, and the blocks of each of its stages,
    are such that it holds least.
    """
    least = np.minimum(runs.least, np.minimum(runs.first, runs.last))
    most = np.maximum(runs.most, np.maximum(runs.first, runs.last))
    blocks = np.ceil(total / runs.pp)
    ranks = np.ceil((total - runs.pp * (blocks - 1)) / np.maximum(runs.stages * most - blocks + 1, 1))
    latest = runs.pp - np.clip(ranks, 1, runs.pp)

    def held(kind: Schedule, p: Any, v: Any, n: Any, low: Any, high: Any, blocks: Any, at: Any) -> Floats:
        run: dict[str, Any] = {"pp": p, "virtual_stages": v, "micro_batches": n}
        live = np.minimum(kind.most_in_flight(**run, rank=0 * p), kind.most_in_flight(**run, rank=at))
        # all blocks beyond the fewest are in the last stages of the rank, which hold fewer micro-batches
        full, rest = np.divmod(np.maximum(blocks - v * low, 0.0), np.maximum(high - low, 1.0))
        held_blocks = live * np.where(full >= v, high, low)
        if kind.placement != "v":
            warm, in_round = kind.warm_up_passes(**run, rank=at), round_size(p, n)
            rounds, begun = np.divmod(warm, in_round * v)
            of_full = rounds * in_round * full + np.clip(begun - (v - full) * in_round, 0, full * in_round)
            of_next = rounds * in_round + np.clip(begun - (v - full - 1) * in_round, 0, in_round)
            held_blocks = np.maximum(held_blocks, warm * low + of_full * (high - low) + of_next * rest)
        return np.asarray(np.where(v == 1, live * blocks, np.minimum(held_blocks, live / v * blocks)))

    return _by_schedule(runs, held, least, most, blocks, latest)


def _by_schedule(runs: Pipelines, held: Callable[..., Floats], *columns: Floats) -> Floats:
    """Call `held` once for every schedule, with the ranks, stages, micro-batches and other columns of its pipelines."""
    blocks = np.zeros(runs.schedule.shape)
    every = (runs.pp, runs.stages, runs.micro_batches, *columns)
    for position in np.unique(runs.schedule):
        mine = runs.schedule == position
        kind = SCHEDULES[SCHEDULE_NAMES[position]]
        blocks[mine] = held(kind, *(np.broadcast_to(column, mine.shape)[mine] for column in every))
    return blocks
