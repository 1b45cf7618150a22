"""Screening: a lower bound of the step's seconds, and what memory leaves, for every candidate at once.

Bounds and plans share their prices (`autopar.cost_model.step`): only the pipeline is bounded instead of replayed, and
the recomputed part of the blocks is the least that fits instead of whole blocks.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.cluster_machine import ClusterMachine
from autopar.cost_model.engine import Engine
from autopar.cost_model.layout import Layouts
from autopar.cost_model.mechanisms import Mechanisms
from autopar.cost_model.pricing import family_at, shape_of
from autopar.cost_model.program_works import ProgramWorks
from autopar.cost_model.row_estimate import FULL
from autopar.cost_model.step import step_seconds
from autopar.search.even_cuts import EvenCuts
from autopar.search.memory_bounds import memory_bounds
from autopar.search.pipeline_bounds import Run, lower_bound
from autopar.search.space import Candidates

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """What candidates are priced on."""

    machine: ClusterMachine
    engine: Engine
    mechanisms: Mechanisms
    precision: str
    ranks_per_core: float = 1.0

    @property
    def capacity_bytes(self) -> float:
        """What a rank may hold."""
        return FULL * self.machine.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """Per candidate: a lower bound in seconds (infinite where it cannot fit), the part of the blocks that it must
    recompute, and bytes of the fullest rank without recomputation, with all of it, and of its state alone."""

    seconds: Floats
    share: Floats
    without_bytes: Floats
    recomputed_bytes: Floats
    state_bytes: Floats

    @property
    def fits(self) -> NDArray[np.bool_]:
        return np.isfinite(self.seconds)


def layouts_of(found: Candidates, *, sequence_parallel: bool, recompute: int = 0) -> Layouts:
    """Candidates as the cost model takes them."""
    one = np.ones(len(found))
    return Layouts(
        tp=found.tp.astype(float),
        sequence_parallel=one * sequence_parallel,
        pp=found.pp.astype(float),
        virtual=found.virtual.astype(float),
        cp=one,
        ep=one,
        dp=found.dp.astype(float),
        shard=found.dp_shard.astype(float),
        zero=found.zero.astype(float),
        micro_batch=found.micro_batch.astype(float),
        micro_batches=found.micro_batches.astype(float),
        recompute=one * recompute,
    )


def screen(works: ProgramWorks, found: Candidates, on: Machinery) -> Screened:
    """Price candidates whose labels `works` are for; of a mesh with one tensor dimension, at any tensor degree."""
    layouts = layouts_of(found, sequence_parallel=works.sequence_parallel)
    family = family_at(works, layouts, on.mechanisms)
    shape, fused = shape_of(works), on.engine.attention == "fused"
    run = Run(
        schedule=found.schedule,
        pp=layouts.pp,
        virtual=layouts.virtual,
        micro_batches=layouts.micro_batches,
        counts=works.counts,
        ranks_per_core=on.ranks_per_core,
    )
    cuts: list[EvenCuts] = []
    seconds = [
        step_seconds(
            family,
            shape,
            replace(layouts, recompute=np.full(len(found), float(level))),
            on.machine.machine,
            on.engine,
            on.mechanisms,
            in_float8=on.precision == "fp8",
            fused=fused,
            pipeline=lower_bound(run, waits=0.0 if on.engine.messages == "overlapped" else 1.0, found=cuts),
        ).seconds
        for level in (0, 2)
    ]
    memory = memory_bounds(
        found.schedule,
        family,
        shape,
        layouts,
        on.engine,
        cuts[0],
        capacity_bytes=on.capacity_bytes,
        reserve_bytes=on.machine.profile.reserve_bytes,
        fused=fused,
    )
    share = np.broadcast_to(memory.share, layouts.pp.shape)
    mixed = (1 - share) * seconds[0] + share * seconds[1]
    return Screened(
        seconds=np.where((share <= 1) & np.isfinite(cuts[0].largest), mixed, np.inf),
        share=share,
        without_bytes=np.broadcast_to(memory.without, share.shape),
        recomputed_bytes=np.broadcast_to(memory.recomputed, share.shape),
        state_bytes=np.broadcast_to(memory.state, share.shape),
    )
