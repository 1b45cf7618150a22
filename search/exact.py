"""Candidates, priced as they would run: their stages cut by the seconds of their blocks, their action lists replayed.

Cuts make the slowest stage fastest. Recomputation covers the fewest blocks of every stage that let the plan fit: one
number for all stages, which bounds know too, or each stage's own, with cuts that follow (`autopar.search.by_stage`).
What is priced is what `autopar.estimate` prints for the plan. Candidates of one tensor degree are prepared together:
all but cuts, stages and their memory is arithmetic on arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np

from autopar.cost_model.pricing import (
    Pricing,
    Question,
    family_at,
    layouts_of_degrees,
    memory_between,
    ranks_per_core,
    shape_of,
    step_between,
)
from autopar.cost_model.program_works import ProgramWorks
from autopar.cost_model.staged import (
    Stages,
    bytes_of_roles,
    fullest,
    memory_of_each_rank,
    pipelines_of,
    role_bytes,
    stages_at,
)
from autopar.cost_model.step import StepSeconds, priced_blocks, step_of
from autopar.cost_model.step_assembly import passes_of_roles
from autopar.cost_model.step_basis import Basis, Floats
from autopar.cost_model.step_memory import StepMemory, step_memory
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Degrees
from autopar.search.by_stage import CallCosts, costs_of, cuts_by_stage, fewest_blocks
from autopar.search.cuts import partition
from autopar.search.screen import Machinery, pipeline_seconds

LEVELS = (0, 2)  # of recomputation: none and full


class Cut(NamedTuple):
    """How many blocks are moved out of a pipeline's first and last stage, and whether stages that must recompute have
    each a number of blocks of their own."""

    out_of_first: int = 0
    out_of_last: int = 0
    by_stage: bool = False


AS_IT_IS, BY_STAGE = Cut(), Cut(by_stage=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan's degrees, its cuts, its seconds, the bytes of its fullest rank, and whether it fits. `pipelines` are
    seconds of its pipeline without recomputation and, if it recomputes, with all of it; none with one stage. `regather`
    is that of its plan."""

    degrees: Degrees
    cuts: tuple[int, ...]
    seconds: float
    needed_bytes: float
    fits: bool
    step: StepSeconds
    memory: StepMemory
    pipelines: tuple[float, ...] = ()
    regather: bool = True


def priced(
    works: ProgramWorks,
    degrees: Degrees,
    cluster: ClusterSpec,
    on: Machinery,
    *,
    cut: Cut = AS_IT_IS,
    least_memory: bool = False,
) -> Priced:
    """Price `degrees`, which recompute nothing, with as much recomputation as they need, or with none or all of it
    where what counts is the `least_memory`. `works` are those of labels for their tensor degree."""
    return Prepared(works, [degrees], cluster, on, least_memory=least_memory).priced({0: cut})[0]


class Prepared:
    """Candidates of one tensor degree, all with several stages or all with one, whose blocks are priced.

    Other cuts of a candidate are priced without pricing its blocks again.
    """

    def __init__(
        self,
        works: ProgramWorks,
        degrees: Sequence[Degrees],
        cluster: ClusterSpec,
        on: Machinery,
        *,
        least_memory: bool = False,
    ) -> None:
        self.works, self.degrees, self.on, self.least_memory = works, degrees, on, least_memory
        self.sharing = ranks_per_core(on.machine, cluster)
        beyond = on.beyond
        self.layouts = [
            layouts_of_degrees(works, degrees, recompute=level, cp=beyond.cp, ep=beyond.ep) for level in LEVELS
        ]
        self.allowed = np.broadcast_to(on.allows(works, self.layouts[0]), len(degrees))
        self.shape, self.fused = shape_of(works), on.engine.attention == "fused"
        self.family = family_at(works, self.layouts[0], on.mechanisms)
        self.basis = Basis(
            shape=self.shape,
            machine=on.machine.machine,
            engine=on.engine,
            mechanisms=on.mechanisms,
            in_float8=on.precision == "fp8",
            fused=self.fused,
        )
        self.blocks = priced_blocks(self.basis, self.family, self.layouts[0])
        self.num_blocks = sum(count for _, count in works.counts)
        self.is_staged = degrees[0].num_stages > 1
        self.of_roles = role_bytes(self.family, self.shape, self.layouts[0], on.engine, fused=self.fused)

    def priced(self, wanted: Mapping[int, Cut]) -> dict[int, Priced]:
        """The price of every candidate whose position is a key, with that cut."""
        cuts: dict[int, tuple[int, ...]] = self._cuts(wanted) if self.is_staged else dict.fromkeys(wanted, ())
        stages = {i: stages_at(self.works.calls, cuts[i], self.degrees[i]) for i in wanted if self.is_staged}
        found = {i: self._recomputing(i, cache(partial(self._memory, i, stages.get(i)))) for i in wanted}
        for i, cut in wanted.items():
            if self._is_by_stage(cut, found[i]):
                cuts[i], stages[i], found[i] = self._by_stage(i, cut, cuts[i])
        steps = self._steps(stages, {i: one.share for i, one in found.items()})
        regather = self.works.regather
        return {i: _priced(one, cuts[i], steps[i], regather) for i, one in found.items()}

    def _cuts(self, wanted: Mapping[int, Cut]) -> dict[int, tuple[int, ...]]:
        """The calls before which stages begin: the slowest stage is as fast as can be; or those that are pinned."""
        if (cuts := self.on.pinned.cuts) is not None:
            return dict.fromkeys(wanted, cuts)
        can_be_alone = [bool(role) for role in self.works.calls]
        return {
            i: partition(self._weights(i, cut), self.degrees[i].num_stages, can_be_alone=can_be_alone)
            for i, cut in wanted.items()
        }

    @cached_property
    def _passes(self) -> dict[str, tuple[Floats, Floats]]:
        """Seconds of one micro-batch in every role, forward and both ways, of all candidates."""
        passes = passes_of_roles(self.basis, self.layouts[0], self.blocks.prices, self.blocks.weights)
        size = len(self.degrees)
        return {
            role: (np.broadcast_to(one.forward, size), np.broadcast_to(one.both, size)) for role, one in passes.items()
        }

    def _weights(self, index: int, cut: Cut) -> list[float]:
        """Seconds of every call, the ends taken to be slower by as many blocks as are moved out of them."""
        seconds = {role: float(both[index]) for role, (_, both) in self._passes.items()}
        weights = [seconds[role] if role else 0.0 for role in self.works.calls]
        block = sum(count * seconds[role] for role, count in self.works.counts) / self.num_blocks
        weights[0] += cut.out_of_first * block
        weights[-1] += cut.out_of_last * block
        return weights

    def _memory(self, index: int, stages: Stages | None, level: int) -> StepMemory:
        """Memory of a candidate without recomputation, or with all of it."""
        if stages is not None:
            return fullest(self._of_ranks(index, stages, level))
        found = self._unstaged_memories[level]
        return StepMemory(peak_bytes=_one(found.peak_bytes, index), parts=_each(found.parts, index))

    @cached_property
    def _unstaged_memories(self) -> list[StepMemory]:
        engine, given = self.on.engine, self._memory_options
        return [step_memory(self.family, self.shape, one, engine, fused=self.fused, **given) for one in self.layouts]

    @property
    def _memory_options(self) -> dict[str, float]:
        return {
            "reserve_bytes": self.on.machine.profile.reserve_bytes,
            "cache": self.on.mechanisms.allocator_cache,
        }

    def _of_ranks(self, index: int, stages: Stages, level: int = 0) -> StepMemory:
        """Memory of every rank of a candidate."""
        layout, engine = self.layouts[level].at([index]), self.on.engine
        return memory_of_each_rank(stages, self.of_roles, index, self.shape, layout, engine, **self._memory_options)

    def _is_by_stage(self, cut: Cut, found: "_Recomputing") -> bool:
        if isinstance(self.on.pinned.recompute_blocks, tuple):
            return True
        is_open = self.on.pinned.recompute_blocks is None and not self.least_memory
        return cut.by_stage and self.is_staged and is_open and found.blocks > 0

    def _by_stage(self, index: int, cut: Cut, cuts: tuple[int, ...]) -> tuple[tuple[int, ...], Stages, "_Recomputing"]:
        """Cuts, stages, and the fewest blocks of each stage that let its rank fit, or as many as are pinned."""
        capacity, pinned, degrees = self.on.capacity_bytes, self.on.pinned, self.degrees[index]
        room = capacity - self.on.machine.profile.reserve_bytes
        stages = stages_at(self.works.calls, cuts, degrees)
        if pinned.cuts is None and pinned.recompute_blocks is None:
            cuts = cuts_by_stage(self.works.calls, self._costs(index, cut), stages, room_bytes=room) or cuts
            stages = stages_at(self.works.calls, cuts, degrees)

        def memory(again: tuple[int, ...]) -> StepMemory:
            return self._of_ranks(index, replace(stages, again=again))

        again = pinned.recompute_blocks
        if not isinstance(again, tuple):
            again = fewest_blocks(stages, lambda counts: memory(counts).needed_bytes, capacity)
        needed = memory(again)
        found = _Recomputing(
            degrees=replace(degrees, recompute="full", recompute_blocks=again) if any(again) else degrees,
            blocks=max(again),
            share=0.0,
            memory=fullest(needed),
            needed_bytes=float(np.max(needed.needed_bytes)),
            fits=bool(np.max(needed.needed_bytes) <= capacity and self.allowed[index]),
        )
        return cuts, replace(stages, again=again), found

    def _costs(self, index: int, cut: Cut) -> CallCosts:
        held = bytes_of_roles(self.of_roles, index, self.shape, self.layouts[0].at([index]), self.on.engine)
        forward = {role: float(one[index]) for role, (one, _) in self._passes.items()}
        return costs_of(self.works.calls, self._weights(index, cut), forward, *held)

    def _recomputing(self, index: int, memory_at: Callable[[int], StepMemory]) -> "_Recomputing":
        """The fewest blocks of every stage that let a candidate fit, or all where none do; none or all of them where
        what counts is the least memory; or as many as are pinned. `memory_at` is that of a position in `LEVELS`."""
        degrees, capacity = self.degrees[index], self.on.capacity_bytes

        def recomputing(blocks: int) -> _Recomputing:
            every = blocks * degrees.num_stages >= self.num_blocks
            share = 1.0 if every else blocks * degrees.num_stages / self.num_blocks
            levels = (0,) if not blocks else (1,) if every else (0, 1)
            memory = memory_between(share, [memory_at(level) for level in levels])
            needed = float(sum(np.max(part) for name, part in memory.parts.items() if name != "cache"))
            again = replace(degrees, recompute="full", recompute_blocks=None if every else blocks)
            return _Recomputing(
                degrees=again if blocks else degrees,
                blocks=blocks,
                share=share,
                memory=memory,
                needed_bytes=needed,
                fits=needed <= capacity and bool(self.allowed[index]),
            )

        most = -(-self.num_blocks // degrees.num_stages)
        if isinstance(self.on.pinned.recompute_blocks, int):
            return recomputing(min(self.on.pinned.recompute_blocks, most))
        found, least = recomputing(0), 0
        if self.least_memory:
            return min(found, recomputing(most), key=lambda one: one.needed_bytes)
        if not found.fits:
            found = recomputing(most)
            while found.fits and found.blocks - least > 1:
                one = recomputing((found.blocks + least) // 2)
                found, least = (one, least) if one.fits else (found, one.blocks)
        return found

    def _steps(self, stages: Mapping[int, Stages], shares: Mapping[int, float]) -> dict[int, list[StepSeconds]]:
        """Every step without recomputation and with all of it, or without stages only the one of them that runs."""
        found: dict[int, list[StepSeconds]] = {i: [] for i in shares}
        for level, layouts in zip(LEVELS, self.layouts, strict=True):
            wanted = [i for i, share in shares.items() if (share < 1 or self.is_staged if level == 0 else share > 0)]
            if not wanted:
                continue
            pipeline = None
            if self.is_staged:
                each = [stages[i] if i in wanted else None for i in range(len(self.degrees))]
                pipeline = pipelines_of(each, self.on.engine, self.on.mechanisms.message_exposed, self.sharing)
            step = step_of(self.basis, layouts, self.blocks, pipeline)
            for i in wanted:
                found[i].append(
                    StepSeconds(seconds=_one(step.seconds, i), parts=_each(step.parts, i), hidden=_each(step.hidden, i))
                )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recomputing:
    """A plan that recomputes in some blocks of every stage, and what it needs."""

    degrees: Degrees
    blocks: int
    share: float
    memory: StepMemory
    needed_bytes: float
    fits: bool


def _priced(found: _Recomputing, cuts: tuple[int, ...], steps: Sequence[StepSeconds], regather: bool) -> Priced:
    step = step_between(found.share, steps)
    return Priced(
        degrees=found.degrees,
        cuts=cuts,
        seconds=float(np.max(step.seconds)),
        needed_bytes=found.needed_bytes,
        fits=found.fits,
        step=step,
        memory=found.memory,
        pipelines=tuple(float(np.max(pipeline_seconds(one))) for one in steps) if cuts else (),
        regather=regather,
    )


def _one(values: Floats, index: int) -> Floats:
    """The value of one candidate; an array of one value is that of all."""
    column = np.asarray(values).reshape(-1)
    return column[index : index + 1] if len(column) > 1 else column


def _each(values: Mapping[str, Floats], index: int) -> dict[str, Floats]:
    return {name: _one(value, index) for name, value in values.items()}


def pricing_of(works: ProgramWorks, plan: Priced, cluster: ClusterSpec, on: Machinery) -> Pricing:
    """A priced plan's question, for what a report asks beside its price."""
    question = Question(cluster=cluster, degrees=plan.degrees, engine=on.engine, precision=on.precision, cuts=plan.cuts)
    return Pricing(works, question, on.machine, on.mechanisms, on.precision)
