"""Exact prices: stages are cut by the seconds of their blocks, and action lists are replayed.

Cuts make the slowest stage fastest. Recomputation covers the fewest blocks that let the plan fit. Either all stages
recompute the same number of blocks, as the bounds assume, or each stage its own number
(`autopar.search.pricing.per_stage_recompute`). The price equals the figure that `autopar.estimate` prints for the plan.
Candidates of one tensor degree are prepared together: everything but cuts, stages and their memory is array arithmetic.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autopar.cost_model.memory.formula import StepMemory
from autopar.cost_model.memory.per_stage import HeldByRanks, bytes_of_roles, fullest, held_by_ranks
from autopar.cost_model.pipeline.stages import Stages, pipelines_of, stages_at
from autopar.cost_model.pricing import Pricing, Question, layouts_of_degrees, parts_between
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.step import StepSeconds, step_of
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.arrays import Floats
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.schedules.registry import SCHEDULES
from autopar.memo import Memo
from autopar.search.bounds.lower_bounds import Machinery, pipeline_seconds
from autopar.search.pricing.cuts import even_cuts, seconds_of_calls
from autopar.search.pricing.per_stage_recompute import CallCosts, costs_of, cuts_by_stage, fewest_blocks
from autopar.search.pricing.shared import SharedPrices

LEVELS = (0, 2)  # of recomputation: none and full


class Cut(NamedTuple):
    """A variation of cuts: blocks moved out of the first and the last stage, and how stages recompute."""

    out_of_first: int = 0
    out_of_last: int = 0
    by_stage: bool = False


AS_IT_IS, BY_STAGE = Cut(), Cut(by_stage=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A plan's degrees, its cuts, the memory of its fullest rank, and whether it fits."""

    degrees: Degrees
    cuts: tuple[int, ...]
    memory: StepMemory
    needed_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced(Placed):
    """A plan with its seconds.

    `pipelines` are the seconds of its pipeline without recomputation and, if it recomputes, with full recomputation. A
    plan with one stage has none.
    """

    seconds: float
    step: StepSeconds
    pipelines: tuple[float, ...] = ()
    regather: bool = True


def priced(
    works: ProgramWorks,
    degrees: Degrees,
    on: Machinery,
    *,
    cut: Cut = AS_IT_IS,
    least_memory: bool = False,
) -> Priced:
    """Price `degrees`, which name no recomputation, with the least recomputation that fits.

    With `least_memory` the price has no recomputation or full recomputation. `works` are the block costs under the
    labels of the tensor degree.
    """
    beyond = on.beyond
    layouts = layouts_of_degrees(works, [degrees], recompute=0, cp=beyond.cp, ep=beyond.ep)
    return Prepared(works, layouts, lambda _: degrees, on, Memo(), least_memory=least_memory).priced([(0, cut)])[0]


class Prepared:
    """Candidates of one tensor degree on the same devices, by their positions in `layouts` (without recomputation).

    Prices that several candidates share are computed once. `memo` has the replayed pipelines.
    """

    def __init__(
        self,
        works: ProgramWorks,
        layouts: Layouts,
        degrees: Callable[[int], Degrees],
        on: Machinery,
        memo: Memo,
        *,
        least_memory: bool = False,
    ) -> None:
        self.memo = memo
        self.works, self.on, self.least_memory = works, on, least_memory
        self.degrees = lambda index: replace(degrees(index), offload=on.machine.engine.offload)
        self.sharing = on.machine.ranks_per_core
        self.shared = SharedPrices(works, layouts, on)
        self.allowed = np.broadcast_to(on.allows(works, layouts), len(layouts.tp))
        self.num_blocks = sum(count for _, count in works.counts)

    def priced(self, wanted: Sequence[tuple[int, Cut]]) -> list[Priced]:
        """The prices of candidates with one cut each. All of them have several stages, or all have one."""
        plans = [self._with_stages(index, cut) for index, cut in wanted if self.degrees(index).num_stages > 1]
        plans = plans or self._without_stages([index for index, _ in wanted])
        return [
            Priced(
                degrees=plan.degrees,
                cuts=plan.cuts,
                seconds=float(np.max(step.seconds)),
                needed_bytes=plan.needed_bytes,
                fits=plan.fits,
                step=step,
                memory=plan.memory,
                pipelines=pipelines,
                regather=self.works.regather,
            )
            for plan, (step, pipelines) in zip(plans, self._steps(plans), strict=True)
        ]

    def _without_stages(self, index: Sequence[int]) -> "list[_Unpriced]":
        layouts, positions = self.shared.layouts.at(index), np.array(index)
        found = []
        for level in LEVELS:
            again = replace(layouts, recompute=np.full(len(index), float(level)))
            parts = self.shared.unstaged_memory(again, positions).parts
            columns = [np.broadcast_to(part, len(index)).tolist() for part in parts.values()]
            found.append([dict(zip(parts, row, strict=True)) for row in zip(*columns, strict=True)])
        return [
            self._recomputing(i, self.degrees(i), (), None, parts)
            for i, parts in zip(index, zip(*found, strict=True), strict=True)
        ]

    def _with_stages(self, index: int, cut: Cut) -> "_Unpriced":
        degrees = self.degrees(index)
        cuts = self._cuts(index, cut, degrees.num_stages)
        stages = stages_at(self.works.calls, cuts, degrees)
        held = self._held(index, stages)

        parts = [
            {name: float(part[0]) for name, part in fullest(held.memory(level * held.calls)).parts.items()}
            for level in range(len(LEVELS))
        ]
        if self._is_by_stage(cut, must_recompute=not self._fits(index, _needed(parts[0]))):
            return self._by_stage(index, cut, cuts, held)
        return self._recomputing(index, degrees, cuts, stages, parts)

    def _fits(self, index: int, needed_bytes: float) -> bool:
        return needed_bytes <= self.on.capacity_bytes and bool(self.allowed[index])

    def _cuts(self, index: int, cut: Cut, num_stages: int) -> tuple[int, ...]:
        """The calls before which stages begin: the pinned cuts, or the cuts that make the slowest stage fastest."""
        if (cuts := self.on.cuts) is not None:
            return cuts
        return even_cuts(self.works, self._weights(index, cut), num_stages)

    def _passes(self, index: int) -> Mapping[str, tuple[float, float]]:
        """Seconds of one micro-batch in every role: of the forward pass, and of both passes."""
        return self.shared.passes[int(self.shared.row[index])]

    def _weights(self, index: int, cut: Cut) -> list[float]:
        """Seconds of every call. An end counts as slower by the number of blocks that are moved out of it."""
        passes = self._passes(index)
        weights = seconds_of_calls(self.works, passes)
        block = sum(count * passes[role][1] for role, count in self.works.counts) / self.num_blocks
        weights[0] += cut.out_of_first * block
        weights[-1] += cut.out_of_last * block
        return weights

    def _held(self, index: int, stages: Stages) -> HeldByRanks:
        shared, row = self.shared, int(self.shared.row[index])
        return held_by_ranks(stages, shared.bytes_of_roles, row, shared.layouts.at([index]), shared.memory_basis)

    def _is_by_stage(self, cut: Cut, must_recompute: bool) -> bool:
        if isinstance(self.on.recompute_blocks, tuple):
            return True
        is_open = self.on.recompute_blocks is None and not self.least_memory
        return cut.by_stage and is_open and must_recompute

    def _by_stage(self, index: int, cut: Cut, even: tuple[int, ...], held: HeldByRanks) -> "_Unpriced":
        """Cuts, stages, and the recomputed blocks of each stage: the fewest that fit, or the pinned number.

        `even` are the cuts if all stages recompute the same number of blocks, `held` their memory.
        """
        capacity, cuts, stages = self.on.capacity_bytes, even, held.stages
        room = capacity - self.on.machine.reserve_bytes
        if self.on.cuts is None and self.on.recompute_blocks is None:
            cuts = cuts_by_stage(self.works, self._costs(index, cut), stages, room_bytes=room) or even
            if cuts != even:
                stages = stages_at(self.works.calls, cuts, self.degrees(index))
                held = self._held(index, stages)

        def memory(again: tuple[int, ...]) -> StepMemory:
            return held.memory(held.first_blocks(again))

        again = self.on.recompute_blocks
        if not isinstance(again, tuple):
            again = fewest_blocks(stages, lambda counts: memory(counts).needed_bytes, capacity)
        found = memory(again)
        needed, degrees = float(np.max(found.needed_bytes)), self.degrees(index)
        return _Unpriced(
            index=index,
            degrees=replace(degrees, recompute="full", recompute_blocks=again) if any(again) else degrees,
            cuts=cuts,
            stages=replace(stages, again=again),
            blocks=max(again),
            share=0.0,
            memory=fullest(found),
            needed_bytes=needed,
            fits=self._fits(index, needed),
        )

    def _costs(self, index: int, cut: Cut) -> CallCosts:
        shared, row = self.shared, int(self.shared.row[index])
        held = bytes_of_roles(shared.bytes_of_roles, row, shared.layouts.at([index]), shared.memory_basis)
        forward = {role: one for role, (one, _) in self._passes(index).items()}
        return costs_of(self.works.calls, self._weights(index, cut), forward, *held)

    def _recomputing(
        self,
        index: int,
        degrees: Degrees,
        cuts: tuple[int, ...],
        stages: Stages | None,
        parts_of: Sequence[Mapping[str, float]],
    ) -> "_Unpriced":
        """The recomputed blocks of every stage: the fewest that let a candidate fit, all if none fits, or the pinned
        number.

        If the goal is the least memory, no blocks or all blocks. `parts_of` are the parts of memory in bytes of each of
        `LEVELS`.
        """

        def recomputing(blocks: int) -> tuple[float, dict[str, float]]:
            every = blocks * degrees.num_stages >= self.num_blocks
            share = 1.0 if every else blocks * degrees.num_stages / self.num_blocks
            levels = (0,) if not blocks else (1,) if every else (0, 1)
            return share, parts_between(share, [parts_of[level] for level in levels])

        def needed_with(blocks: int) -> float:
            return _needed(recomputing(blocks)[1])

        def fits_with(blocks: int) -> bool:
            return self._fits(index, needed_with(blocks))

        most = -(-self.num_blocks // degrees.num_stages)
        if isinstance(self.on.recompute_blocks, int):
            blocks = min(self.on.recompute_blocks, most)
        elif self.least_memory:
            blocks = min((0, most), key=needed_with)
        else:
            blocks = 0 if fits_with(0) else most
            least = 0 if blocks and fits_with(most) else blocks
            while blocks - least > 1:
                middle = (blocks + least) // 2
                blocks, least = (middle, least) if fits_with(middle) else (blocks, middle)
        share, parts = recomputing(blocks)
        again = replace(degrees, recompute="full", recompute_blocks=None if share == 1 else blocks)
        return _Unpriced(
            index=index,
            degrees=again if blocks else degrees,
            cuts=cuts,
            stages=stages if stages is None else replace(stages, recomputes=blocks > 0),
            blocks=blocks,
            share=share,
            memory=StepMemory(
                peak_bytes=np.array([sum(parts.values())]),
                parts={name: np.array([part]) for name, part in parts.items()},
            ),
            needed_bytes=_needed(parts),
            fits=self._fits(index, _needed(parts)),
        )

    def _steps(self, plans: "Sequence[_Unpriced]") -> list[tuple[StepSeconds, tuple[float, ...]]]:
        """The step of every plan, made from the steps without and with full recomputation.

        Plans with stages also get the seconds of their pipelines. Without stages, only the needed steps are priced.
        """
        ones = [(k, level) for k, plan in enumerate(plans) for level in _levels(plan)]
        index = np.array([plans[k].index for k, _ in ones])
        layouts, blocks = self.shared.at(index, np.array([float(level) for _, level in ones]))
        stages, pipeline = [plans[k].stages for k, _ in ones], None
        if stages[0] is not None:
            each = [one for one in stages if one is not None]
            pipeline = pipelines_of(
                each, self.on.machine.engine, self.on.machine.mechanisms.message_exposed, self.sharing, self.memo
            )
        steps = step_of(self.shared.basis, layouts, blocks, pipeline)
        of_pipelines = np.broadcast_to(pipeline_seconds(steps), len(ones)).tolist()
        for k, seconds in self._in_parts(plans).items():
            of_pipelines[next(at for at, one in enumerate(ones) if one[0] == k)] = seconds
        # the first and the last step of every plan, which may be the same
        first = np.flatnonzero(np.diff([k for k, _ in ones], prepend=-1))
        last = np.append(first[1:], len(ones)) - 1
        share = np.array([plan.share for plan in plans])
        rows = np.array([np.broadcast_to(row, len(ones)) for row in (steps.seconds, *_each(steps))])
        both = (1 - share) * rows[:, first] + share * rows[:, last]
        found = np.where(first == last, rows[:, first], both)
        return [
            (_step(steps, found[:, k : k + 1]), tuple(of_pipelines[a : b + 1]) if plan.cuts else ())
            for k, (plan, a, b) in enumerate(zip(plans, first.tolist(), last.tolist(), strict=True))
        ]

    def _in_parts(self, plans: "Sequence[_Unpriced]") -> dict[int, float]:
        """Pipeline seconds of recomputing plans as if they did not recompute, if backward passes would run in parts.

        The search compares other candidates of the same class with these figures.
        """
        found = {
            k: replace(plan.stages, recomputes=False)
            for k, plan in enumerate(plans)
            if plan.stages is not None and plan.stages.recomputes and SCHEDULES[plan.stages.schedule].splits_backward
        }
        if not found:
            return {}
        layouts, blocks = self.shared.at(np.array([plans[k].index for k in found]), np.zeros(len(found)))
        exposed = self.on.machine.mechanisms.message_exposed
        pipeline = pipelines_of([*found.values()], self.on.machine.engine, exposed, self.sharing, self.memo)
        seconds = pipeline_seconds(step_of(self.shared.basis, layouts, blocks, pipeline))
        return dict(zip(found, np.broadcast_to(seconds, len(found)).tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unpriced(Placed):
    """A candidate with its stages and its recomputation, before its seconds are known.

    Every stage recomputes at most `blocks` blocks. `share` is the recomputed fraction of all blocks, if stages
    recompute some of their blocks.
    """

    index: int
    stages: Stages | None
    blocks: int
    share: float


def _needed(parts: Mapping[str, float]) -> float:
    """All parts of memory without the cache: the allocator gives the cache back before it fails."""
    return sum(part for name, part in parts.items() if name != "cache")


def _levels(plan: _Unpriced) -> tuple[int, ...]:
    """The levels of recomputation whose steps make up a plan's step and its comparison."""
    none, full = LEVELS
    if not plan.share:
        return (none,)
    return (full,) if plan.share == 1 and plan.stages is None else LEVELS


def _each(step: StepSeconds) -> tuple[Floats, ...]:
    return (*step.parts.values(), *step.hidden.values())


def _step(like: StepSeconds, values: Floats) -> StepSeconds:
    """A step from its seconds and the values in the order of `_each`."""
    at = 1 + len(like.parts)
    return StepSeconds(
        seconds=values[0],
        parts=dict(zip(like.parts, values[1:at], strict=True)),
        hidden=dict(zip(like.hidden, values[at:], strict=True)),
    )


def pricing_of(works: ProgramWorks, plan: Priced, cluster: ClusterSpec, on: Machinery) -> Pricing:
    """The pricing of a plan, for the figures that a report needs beside its price."""
    question = Question(
        cluster=cluster, degrees=plan.degrees, engine=on.machine.engine, precision=on.machine.precision, cuts=plan.cuts
    )
    return Pricing(works, question, on.machine)
