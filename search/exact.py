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
    plain = _pricing(works, degrees, (), cluster, on)
    cuts = stage_cuts(works, plain, moved) if degrees.num_stages > 1 else ()
    blocks_of_stage = -(-sum(count for _, count in works.counts) // degrees.num_stages)
    found = _at(works, degrees, cuts, cluster, on, 0)
    if found.fits:
        return found
    whole = _at(works, degrees, cuts, cluster, on, blocks_of_stage)
    if not whole.fits:
        return whole
    low, high, best = 0, blocks_of_stage, whole  # low does not fit, high does
    while high - low > 1:
        middle = (low + high) // 2
        found = _at(works, degrees, cuts, cluster, on, middle)
        if found.fits:
            high, best = middle, found
        else:
            low = middle
    return best


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
        weights[end] = max(0.0, weights[end] + count * block)
    return partition(weights, pricing.question.degrees.num_stages, can_be_alone=[bool(role) for role in works.calls])


def _at(
    works: ProgramWorks, degrees: Degrees, cuts: tuple[int, ...], cluster: ClusterSpec, on: Machinery, blocks: int
) -> Priced:
    every = blocks * degrees.num_stages >= sum(count for _, count in works.counts)
    wanted = degrees
    if blocks:
        wanted = replace(degrees, recompute="full", recompute_blocks=None if every else blocks)
    pricing = _pricing(works, wanted, cuts, cluster, on)
    layouts = layouts_of(works, pricing.question)
    step, memory = pricing.step(layouts), pricing.memory(layouts)
    needed = float(sum(np.max(part) for name, part in memory.parts.items() if name != "cache"))
    return Priced(
        degrees=wanted,
        cuts=cuts,
        seconds=float(np.max(step.seconds)),
        needed_bytes=needed,
        fits=needed <= on.capacity_bytes,
        step=step,
        memory=memory,
    )


def _pricing(
    works: ProgramWorks, degrees: Degrees, cuts: tuple[int, ...], cluster: ClusterSpec, on: Machinery
) -> Pricing:
    question = Question(cluster=cluster, degrees=degrees, engine=on.engine, precision=on.precision, cuts=cuts)
    return Pricing(works, question, on.machine, on.mechanisms, on.precision)
