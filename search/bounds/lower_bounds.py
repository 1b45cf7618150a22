"""Screening: a lower bound of the step time, and the least recomputation that fits, for every candidate at once.

Bounds and plans share their prices (`autopar.cost_model.step.step`). Two things differ. The pipeline is bounded instead
of replayed. Recomputation has the least level that fits (`autopar.search.bounds.memory`), not whole blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.interval import DEFAULT_CHANCE, Situation, usable_bytes
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.pricing import bytes_on_host
from autopar.cost_model.shared_prices import SharedPrices
from autopar.cost_model.step.assembly import StepTimes, assembled
from autopar.cost_model.step.layouts import Layouts, layouts_from
from autopar.cost_model.step.offload import can_offload, host_of
from autopar.cost_model.step.unique_rows import distinct, numbered
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.arrays import Floats
from autopar.ir.offload import NO_OFFLOAD
from autopar.search.bounds.memory import MOST_LEVEL, level_weights, memory_bounds
from autopar.search.bounds.pipeline import PipelineRun, lower_bound
from autopar.search.bounds.uniform_partition import EvenCuts
from autopar.search.space.candidates import Candidates

_ROUNDING = 1e-9  # of a part of the blocks
_PART = 1 << 16  # candidates that are screened at once


NO_LEVEL = 4.0  # recomputing every block is not enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """The machine that prices candidates, and the decisions that all candidates share."""

    machine: Machine
    recompute_blocks: int | tuple[int, ...] | None = None  # of every stage, or of each; None: the fewest that fit
    most_level: int = 2  # the highest level of recomputation, a position in `RECOMPUTE`
    cuts: tuple[int, ...] | None = None  # calls before which stages begin; None: chosen by pricing
    chance: float = DEFAULT_CHANCE  # with which a plan must fit
    situation: Situation = field(default_factory=Situation)  # decides how far the memory of a plan may be off

    @property
    def capacity_bytes(self) -> float:
        """The largest peak that fits."""
        return usable_bytes(self.machine.memory_bytes, self.chance, self.situation)

    @property
    def room_bytes(self) -> float:
        """Bytes for the tensors of a rank."""
        return (self.capacity_bytes - self.machine.reserve_bytes) / (1 + self.machine.mechanisms.allocator_cache)

    def allows(self, works: ProgramWorks, layouts: Layouts) -> NDArray[np.bool_]:
        """Whether the host has room for what is kept there."""
        mask, engine = np.ones(layouts.tp.shape, dtype=bool), self.machine.engine
        if engine.offload != NO_OFFLOAD:
            is_selective = self.most_level == 1 and works.has_selected
            part = self._pinned_part(works, layouts)  # open recomputation is none: it frees no device memory
            held = bytes_on_host(
                works, layouts, self.machine, part if is_selective else 0.0, 0.0 if is_selective else part
            )
            mask = mask & can_offload(engine, layouts) & (held <= host_of(self.machine).memory_bytes)
        return np.asarray(mask)

    def _pinned_part(self, works: ProgramWorks, layouts: Layouts) -> Floats | float:
        """The part of the blocks that are recomputed because `recompute_blocks` says so."""
        pinned, every = self.recompute_blocks, sum(count for _, count in works.counts)
        if pinned is None:
            return 0.0
        if isinstance(pinned, tuple):
            return min(1.0, sum(pinned) / every)
        return np.minimum(pinned * layouts.pp * np.maximum(layouts.virtual, 1) / every, 1.0)

    def keeping(self, offload: str) -> "Machinery":
        """The same machinery with other values on the host."""
        machine = self.machine
        return replace(self, machine=replace(machine, engine=machine.engine.keeping(offload)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """The result of screening: arrays with one element per candidate."""

    seconds: Floats  # a bound; infinite if the candidate cannot fit
    recomputed_seconds: Floats  # the bound of level 2
    least_seconds: Floats  # the bound of the fastest level, whether it fits or not
    pipeline: Floats
    selective_pipeline: Floats
    recomputed_pipeline: Floats
    level: Floats  # the least level of recomputation that fits
    by_stage_seconds: Floats
    without_bytes: Floats  # of the fullest rank
    recomputed_bytes: Floats
    state_bytes: Floats
    largest: Floats  # a position in `autopar.search.bounds.memory.PARTS`

    @property
    def fits(self) -> NDArray[np.bool_]:
        return np.isfinite(self.seconds)

    @property
    def pipelines(self) -> tuple[Floats, Floats, Floats]:
        """Bounds of the pipeline's seconds at the levels 0, 1 and 2."""
        return self.pipeline, self.selective_pipeline, self.recomputed_pipeline


def layouts_of(candidates: Candidates, *, sequence_parallel: bool) -> Layouts:
    """The candidates as layouts of the cost model."""
    names = ("tp", "pp", "virtual", "cp", "ep", "dp", "zero", "micro_batch", "micro_batches", "order")
    columns = {name: getattr(candidates, name) for name in names}
    shard = candidates.dp_shard * candidates.cp
    return layouts_from(**columns, shard=shard, sequence_parallel=sequence_parallel, recompute=0)


def screen(works: ProgramWorks, rows: Candidates, on: Machinery) -> Screening:
    """Price candidates under the labels of `works`."""
    if len(rows) <= _PART:
        return _screen(works, rows, on)
    parts = [_screen(works, rows.at(slice(at, at + _PART)), on) for at in range(0, len(rows), _PART)]
    return Screening(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in Screening.__slots__})


def _screen(works: ProgramWorks, candidates: Candidates, on: Machinery) -> Screening:
    layouts = layouts_of(candidates, sequence_parallel=works.sequence_parallel)
    shared = SharedPrices(works, layouts, on.machine)
    run = PipelineRun(
        schedule=candidates.schedule,
        pp=layouts.pp,
        virtual=layouts.virtual,
        micro_batches=layouts.micro_batches,
        counts=works.counts,
        ranks_per_core=on.machine.ranks_per_core,
    )
    cuts: list[EvenCuts] = []
    prices = shared.prices(slice(None), with_parts=False)
    groups = distinct([numbered(column) for column in (shared.row, layouts.pp, layouts.virtual)])
    waits = 0.0 if on.machine.engine.messages == "overlapped" else 1.0
    bound = lower_bound(run, waits=waits, used=cuts, groups=groups)
    levels = (0, 1, 2) if works.has_selected else (0, 2)
    priced = [
        assembled(shared.basis, replace(layouts, recompute=np.full(len(candidates), float(level))), prices, bound)
        for level in levels
    ]
    steps = [priced[0], priced[-2], priced[-1]]  # without chosen operators, level 1 is level 0
    memory = memory_bounds(
        candidates.schedule,
        shared,
        cuts[0],
        distinct([groups, numbered(candidates.schedule), numbered(layouts.micro_batches)]),
        capacity_bytes=on.capacity_bytes,
        has_selective=works.has_selected,
    )
    least = np.broadcast_to(memory.level, layouts.pp.shape)
    level = _of_whole_blocks(least, run)
    if isinstance(on.recompute_blocks, tuple):  # the memory of these stages is known when they are priced
        level = np.zeros(len(candidates))
    elif on.recompute_blocks is not None:
        part = np.minimum(on.recompute_blocks * run.pp * run.virtual / run.blocks, 1.0)
        wanted = part if on.most_level == 1 else np.where(part > 0, 1 + part, 0.0)
        level = np.where(least <= wanted * (1 + _ROUNDING), wanted, NO_LEVEL)
    if on.cuts is not None:  # nothing is known of their memory before they are priced
        level = np.where(np.isfinite(level) & (level <= on.most_level), level, 0.0)
    mixed = sum(part * step.seconds for part, step in zip(level_weights(level), steps, strict=True))
    if isinstance(on.recompute_blocks, tuple):
        mixed = _least_of_stages(steps)
    selective, full = memory.mean_selective, memory.mean_full
    means = (1 - selective - full, selective, full)
    by_stage = sum(part * step.seconds for part, step in zip(means, steps, strict=True))
    legal = np.isfinite(cuts[0].largest) & on.allows(works, layouts)
    can = (level <= on.most_level) & legal
    least_s = np.minimum.reduce(np.broadcast_arrays(*(step.seconds for step in steps)))
    if on.cuts is not None:  # the bounds assume the cuts that make the slowest stage fastest
        mixed, least_s = np.zeros(len(candidates)), np.zeros(len(candidates))
    return Screening(
        seconds=np.where(can, mixed, np.inf),
        recomputed_seconds=np.where(can, steps[2].seconds, np.inf),
        least_seconds=np.where(legal, least_s, np.inf),
        pipeline=steps[0].pipeline_s,
        selective_pipeline=steps[1].pipeline_s,
        recomputed_pipeline=steps[2].pipeline_s,
        level=level,
        by_stage_seconds=np.where((full <= 1) & legal, by_stage, np.inf),
        without_bytes=np.broadcast_to(memory.without, level.shape),
        recomputed_bytes=np.broadcast_to(memory.recomputed, level.shape),
        state_bytes=np.broadcast_to(memory.state, level.shape),
        largest=np.broadcast_to(memory.largest, level.shape),
    )


def _least_of_stages(steps: Sequence[StepTimes]) -> Floats:
    """The least seconds if every stage recomputes a number of blocks of its own: as without recomputation."""
    copies = np.minimum.reduce(np.broadcast_arrays(*(step.host_copies for step in steps)))
    return np.asarray((steps[0].before - steps[0].host_copies + copies) * (1 + steps[0].straggling))


def _of_whole_blocks(level: Floats, run: PipelineRun) -> Floats:
    """The level as plans recompute: the same number of whole blocks of a level in every stage, or all blocks."""
    stages = run.pp * run.virtual
    whole = np.maximum(np.ceil(level * (1 - _ROUNDING)) - 1, 0.0)
    blocks = np.ceil((level - whole) * run.blocks / stages * (1 - _ROUNDING))
    return np.where(level > MOST_LEVEL, level, whole + np.minimum(blocks * stages / run.blocks, 1.0))
