"""One candidate, priced as it would run: its stages cut by the seconds of its blocks, its action list replayed.

Cuts make the slowest stage fastest. Recomputation covers the fewest blocks of every stage that let the plan fit. What
is priced is what `autopar.estimate` prints for the plan.
"""

from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_model.pricing import Pricing, Question, layouts_of
from autopar.cost_model.program_works import ProgramWorks
from autopar.cost_model.step import StepSeconds
from autopar.cost_model.step_memory import StepMemory
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Degrees
from autopar.ir.sharding import Mesh
from autopar.search.cuts import partition
from autopar.search.screen import Machinery


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan's degrees, its cuts, its seconds, the bytes of its fullest rank, and whether it fits."""

    degrees: Degrees
    cuts: tuple[int, ...]
    seconds: float
    needed_bytes: float
    fits: bool
    step: StepSeconds
    memory: StepMemory


def priced(
    works: ProgramWorks, degrees: Degrees, cluster: ClusterSpec, on: Machinery, *, moved: tuple[int, int] = (0, 0)
) -> Priced:
    """Price `degrees`, which recompute nothing, with as much recomputation as they need. `works` are those of labels
    for their tensor degree. So many blocks as `moved` says are moved out of the first and the last stage."""
    works = at_mesh(works, degrees)
    plain = _pricing(works, degrees, cluster, on)
    cuts = stage_cuts(works, plain, moved) if degrees.num_stages > 1 else ()

    def recomputing(blocks: int) -> _Recomputing:
        return _recomputing(plain, cuts, blocks, on)

    most = -(-sum(count for _, count in works.counts) // degrees.num_stages)  # blocks of a stage
    found = recomputing(0)
    if not found.fits:
        found, least = recomputing(most), 0
        while found.fits and found.blocks - least > 1:
            one = recomputing((found.blocks + least) // 2)
            found, least = (one, least) if one.fits else (found, one.blocks)
    layouts = layouts_of(works, found.pricing.question)
    step = found.pricing.step(layouts)
    return Priced(
        degrees=found.pricing.question.degrees,
        cuts=cuts,
        seconds=float(np.max(step.seconds)),
        needed_bytes=found.needed_bytes,
        fits=found.fits,
        step=step,
        memory=found.memory,
    )


def at_mesh(works: ProgramWorks, degrees: Degrees) -> ProgramWorks:
    """The same labels on a mesh of other degrees."""
    mesh = degrees.mesh if len(degrees.mesh.names) == len(works.mesh.names) else None
    if mesh is None:  # the tensor degree in two: the labels' own
        mesh = Mesh(works.mesh.names, (degrees.dp, *works.mesh.degrees[1:]))
    return replace(works, mesh=mesh)


def stage_cuts(works: ProgramWorks, pricing: Pricing, moved: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    """The calls before which stages begin: the slowest stage is as fast as can be, the ends taken to be slower by as
    many blocks as are `moved` out of them."""
    passes = pricing.passes(layouts_of(works, pricing.question))
    seconds = {role: float(np.max(one.both)) for role, one in passes.items()}
    weights = [seconds[role] if role else 0.0 for role in works.calls]
    block = sum(count * seconds[role] for role, count in works.counts) / sum(count for _, count in works.counts)
    for end, count in zip((0, -1), moved, strict=True):
        weights[end] += count * block
    return partition(weights, pricing.question.degrees.num_stages, can_be_alone=[bool(role) for role in works.calls])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recomputing:
    """A plan that recomputes in some blocks of every stage, and what it needs."""

    blocks: int
    pricing: Pricing
    memory: StepMemory
    needed_bytes: float
    fits: bool


def _recomputing(plain: Pricing, cuts: tuple[int, ...], blocks: int, on: Machinery) -> _Recomputing:
    works, degrees = plain.works, plain.question.degrees
    if blocks:
        every = blocks * degrees.num_stages >= sum(count for _, count in works.counts)
        degrees = replace(degrees, recompute="full", recompute_blocks=None if every else blocks)
    pricing = plain.of(replace(plain.question, degrees=degrees, cuts=cuts))
    memory = pricing.memory(layouts_of(works, pricing.question))
    needed = float(sum(np.max(part) for name, part in memory.parts.items() if name != "cache"))
    return _Recomputing(
        blocks=blocks, pricing=pricing, memory=memory, needed_bytes=needed, fits=needed <= on.capacity_bytes
    )


def _pricing(works: ProgramWorks, degrees: Degrees, cluster: ClusterSpec, on: Machinery) -> Pricing:
    question = Question(cluster=cluster, degrees=degrees, engine=on.engine, precision=on.precision)
    return Pricing(works, question, on.machine, on.mechanisms, on.precision)
