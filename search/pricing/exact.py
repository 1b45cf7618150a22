"""Exact prices: stages are cut by the seconds of their blocks, and action lists are replayed.

Cuts make the slowest stage fastest. Recomputation is the least that lets the plan fit. It takes *steps*: each makes
another block of a stage selective, until all are, and then another block full. Either all stages take the same number
of steps, as the bounds assume, or each stage its own number (`autopar.search.pricing.per_stage_recompute`). The price
equals the figure that `autopar.estimate` prints for the plan. Candidates of one tensor degree are prepared together:
everything but cuts, stages and their memory is array arithmetic.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.memory.formula import StepMemory
from autopar.cost_model.memory.per_stage import HeldByRanks, bytes_of_roles, fullest, held_by_ranks
from autopar.cost_model.pipeline.stages import Stages, pipelines_of, stages_at
from autopar.cost_model.pricing import Pricing, Question, layout_of, level_shares, parts_between, step_between
from autopar.cost_model.shared_prices import SharedPrices
from autopar.cost_model.step.assembly import assembled
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.step import StepSeconds, step_of
from autopar.cost_model.step.unique_rows import spread
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.arrays import Floats
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.schedules.registry import SCHEDULES
from autopar.memo import Memo
from autopar.search.bounds.lower_bounds import Machinery
from autopar.search.pricing.cuts import fastest_cuts, seconds_of_calls
from autopar.search.pricing.per_stage_recompute import CallCosts, StageRecompute, cuts_by_stage, fewest_blocks

NONE, SELECTIVE, FULL = 0, 1, 2  # levels of recomputation, positions in `RECOMPUTE`


class Cut(NamedTuple):
    """A variation of cuts: blocks moved out of the first and the last stage, and how stages recompute."""

    out_of_first: int = 0
    out_of_last: int = 0
    by_stage: bool = False


AS_IT_IS, BY_STAGE = Cut(), Cut(by_stage=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A plan's degrees, its cuts, the memory of its fullest rank, and whether it fits."""

    degrees: Degrees
    cuts: tuple[int, ...]
    memory: StepMemory
    peak_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan(Placement):
    """A plan with its seconds.

    `pipelines` are the seconds of its pipeline without recomputation, with selective and with full recomputation, up to
    the highest level that the plan has. A plan with one stage has none.
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
) -> PricedPlan:
    """Price `degrees`, which name no recomputation, with the least recomputation that fits."""
    layout, memo = layout_of(works, degrees), Memo()
    return PlanPricer(works, layout, lambda _: degrees, on, memo, least_memory=least_memory).priced([(0, cut)])[0]


class PlanPricer:
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
        self.shared = SharedPrices(works, layouts, on.machine)
        self.cache = on.machine.mechanisms.allocator_cache
        self.allowed = np.broadcast_to(on.allows(works, layouts), len(layouts.tp))
        self.num_blocks = sum(count for _, count in works.counts)
        self.levels = (NONE, SELECTIVE, FULL) if works.has_selected else (NONE, FULL)

    def priced(self, wanted: Sequence[tuple[int, Cut]]) -> list[PricedPlan]:
        """The prices of candidates with one cut each. All of them have several stages, or all have one."""
        plans = [self._with_stages(index, cut) for index, cut in wanted if self.degrees(index).num_stages > 1]
        plans = plans or self._without_stages([index for index, _ in wanted])
        return [
            PricedPlan(
                degrees=plan.degrees,
                cuts=plan.cuts,
                seconds=float(np.max(step.seconds)),
                peak_bytes=plan.peak_bytes,
                fits=plan.fits,
                step=step,
                memory=plan.memory,
                pipelines=pipelines,
                regather=self.works.regather,
            )
            for plan, (step, pipelines) in zip(plans, self._steps(plans), strict=True)
        ]

    def _without_stages(self, index: Sequence[int]) -> "list[_OpenPlan]":
        layouts, positions = self.shared.layouts.at(index), np.array(index)
        levels = []
        for level in self.levels:
            again = replace(layouts, recompute=np.full(len(index), float(level)))
            parts = self.shared.unstaged_memory(again, positions).parts
            columns = [np.broadcast_to(part, len(index)).tolist() for part in parts.values()]
            levels.append([dict(zip(parts, row, strict=True)) for row in zip(*columns, strict=True)])
        return [
            self._recomputing(i, (), None, parts) for i, parts in zip(index, zip(*levels, strict=True), strict=True)
        ]

    def _with_stages(self, index: int, cut: Cut) -> "_OpenPlan":
        degrees = self.degrees(index)
        cuts = self._cuts(index, cut, degrees.num_stages)
        stages = stages_at(self.works.calls, cuts, degrees)
        held = self._held(index, stages)

        parts = [_of_fullest(held.memory(*held.every_block(level))) for level in self.levels]
        if self._is_by_stage(cut, must_recompute=not self._fits(index, sum(parts[0].values()))):
            return self._by_stage(index, cut, cuts, held)
        return self._recomputing(index, cuts, stages, parts)

    def _fits(self, index: int, peak_bytes: float) -> bool:
        return peak_bytes <= self.on.capacity_bytes and bool(self.allowed[index])

    def _cuts(self, index: int, cut: Cut, num_stages: int) -> tuple[int, ...]:
        """The calls before which stages begin: the pinned cuts, or the cuts that make the slowest stage fastest."""
        if (cuts := self.on.cuts) is not None:
            return cuts
        return fastest_cuts(self.works, self._weights(index, cut), num_stages)

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
        shared = self.shared
        blocks = spread(shared.bytes_of_roles, shared.row[[index]])
        return held_by_ranks(stages, blocks, shared.layouts.at([index]), shared.basis)

    def _is_by_stage(self, cut: Cut, must_recompute: bool) -> bool:
        if isinstance(self.on.recompute_blocks, tuple):
            return True
        is_open = self.on.recompute_blocks is None and not self.least_memory
        return cut.by_stage and is_open and must_recompute

    def _by_stage(self, index: int, cut: Cut, even: tuple[int, ...], held: HeldByRanks) -> "_OpenPlan":
        """Cuts, stages, and the recomputed blocks of each stage: the fewest that fit, or the pinned number."""
        capacity, cuts, stages = self.on.capacity_bytes, even, held.stages
        room = self.on.room_bytes
        if self.on.cuts is None and self.on.recompute_blocks is None:
            cuts = cuts_by_stage(self.works, self._costs(index, cut), stages, room_bytes=room) or even
            if cuts != even:
                stages = stages_at(self.works.calls, cuts, self.degrees(index))
                held = self._held(index, stages)

        def memory(blocks: StageRecompute) -> StepMemory:
            return held.memory(*held.first_blocks(blocks.full, blocks.selective))

        if isinstance(pinned := self.on.recompute_blocks, tuple):
            nothing = (0,) * len(pinned)
            is_selective = self.on.most_level == SELECTIVE
            blocks = StageRecompute(nothing, pinned) if is_selective else StageRecompute(pinned, nothing)
        else:
            blocks = fewest_blocks(
                stages, lambda blocks: memory(blocks).peak_bytes, capacity, self.levels, self.on.most_level
            )
        sums = memory(blocks)
        peak, degrees = float(np.max(sums.peak_bytes)), self.degrees(index)
        return _OpenPlan(
            index=index,
            degrees=with_recompute(degrees, blocks.full, blocks.selective),
            cuts=cuts,
            stages=replace(stages, full=blocks.full, selective=blocks.selective),
            shares={NONE: 1.0},
            memory=fullest(sums),
            peak_bytes=peak,
            fits=self._fits(index, peak),
        )

    def _costs(self, index: int, cut: Cut) -> CallCosts:
        shared, row = self.shared, self.shared.row[[index]]
        blocks = spread(shared.bytes_of_roles, row)
        state, saved = bytes_of_roles(blocks, shared.layouts.at([index]), shared.basis)
        again = {role: float(np.max(spread(prices.selective, row))) for role, prices in shared.blocks.items()}
        has_selected, passes = self.works.has_selected, self._passes(index)

        def each(values: Mapping[str, float]) -> Floats:
            return np.array([values.get(role, 0.0) for role in self.works.calls])

        return CallCosts(
            seconds=np.array(self._weights(index, cut)),
            selective_s=each(again if has_selected else {}),
            full_s=each({role: passes[role][0] for role in shared.blocks}),
            state_bytes=each(state),
            saved_bytes=each(saved[NONE]),
            selective_bytes=each(saved[SELECTIVE if has_selected else NONE]),
            full_bytes=each(saved[FULL]),
        )

    def _recomputing(
        self, index: int, cuts: tuple[int, ...], stages: Stages | None, parts_of: Sequence[Mapping[str, float]]
    ) -> "_OpenPlan":
        """The recomputation of every stage: the fewest steps that let a candidate fit, all if none fits, or the pinned
        number of blocks."""
        of_level, degrees = dict(zip(self.levels, parts_of, strict=True)), self.degrees(index)

        def parts_with(steps: int) -> dict[str, float]:
            shares = level_shares(self.works, self._recomputing_steps(degrees, steps, most))
            return parts_between([*shares.values()], [of_level[level] for level in shares], self.cache)

        most = -(-self.num_blocks // degrees.num_stages)
        every = most * min(len(self.levels) - 1, self.on.most_level)
        if isinstance(self.on.recompute_blocks, int):
            steps = min(self.on.recompute_blocks, most)
        elif self.least_memory:
            steps = min((0, every), key=lambda count: sum(parts_with(count).values()))
        else:
            steps = self._fewest_steps(lambda count: self._fits(index, sum(parts_with(count).values())), most, every)
        parts, degrees = parts_with(steps), self._recomputing_steps(degrees, steps, most)
        peak = sum(parts.values())
        return _OpenPlan(
            index=index,
            degrees=degrees,
            cuts=cuts,
            stages=stages if stages is None else replace(stages, recomputes=steps > 0),
            shares=level_shares(self.works, degrees),
            memory=StepMemory(parts={name: np.array([part]) for name, part in parts.items()}),
            peak_bytes=peak,
            fits=self._fits(index, peak),
        )

    @staticmethod
    def _fewest_steps(fits: Callable[[int], bool], most: int, every: int) -> int:
        """The fewest steps that fit, `every` if none fits. Within a level, more steps need less memory."""
        least = 0
        if fits(0):
            return 0
        for top in range(most, every + 1, most):
            if fits(top):
                while top - least > 1:
                    middle = (top + least) // 2
                    top, least = (middle, least) if fits(middle) else (top, middle)
                return top
            least = top
        return every

    def _recomputing_steps(self, degrees: Degrees, steps: int, most: int) -> Degrees:
        """The degrees after so many steps in every stage. None are all blocks."""
        if not steps:
            return degrees
        phase, rest = divmod(steps - 1, most)
        blocks = rest + 1 if (rest + 1) * degrees.num_stages < self.num_blocks else None
        if self.levels[phase + 1] == SELECTIVE:
            return with_recompute(degrees, 0, blocks)
        return with_recompute(degrees, blocks, None if phase and blocks is not None else 0)

    def _steps(self, plans: "Sequence[_OpenPlan]") -> list[tuple[StepSeconds, tuple[float, ...]]]:
        """The step of every plan, made from the steps of the levels of its blocks."""
        ones = [(k, level) for k, plan in enumerate(plans) for level in self._levels(plan)]
        in_parts = _in_parts(plans)
        index = np.array([plans[k].index for k in (*(k for k, _ in ones), *in_parts)])
        levels = np.array([float(level) for _, level in ones] + [0.0] * len(in_parts))
        steps, pipeline_s = self._priced(index, levels, [*(plans[k].stages for k, _ in ones), *in_parts.values()])
        of_pipelines = np.broadcast_to(pipeline_s, len(index)).tolist()
        place = {key: at for at, key in enumerate(ones)}
        for k, seconds in zip(in_parts, of_pipelines[len(ones) :], strict=True):
            of_pipelines[place[k, NONE]] = seconds
        results = []
        for k, plan in enumerate(plans):
            of_levels = [spread(steps, slice(place[k, level], place[k, level] + 1)) for level in plan.shares]
            pipelines = {level: of_pipelines[place[k, level]] for level in self._levels(plan)}
            step = step_between([*plan.shares.values()], of_levels)
            results.append((step, _by_level(pipelines) if plan.cuts else ()))
        return results

    def _priced(
        self, index: NDArray[np.intp], levels: Floats, stages: Sequence[Stages | None]
    ) -> tuple[StepSeconds, Floats]:
        """Steps of candidates with a level of recomputation each, under their stages if any, and of their pipelines."""
        layouts, machine = replace(self.shared.layouts.at(index), recompute=levels), self.on.machine
        several, pipeline = [each for each in stages if each is not None], None
        if several:
            exposed = machine.mechanisms.message_exposed
            pipeline = pipelines_of(several, machine.engine, exposed, machine.ranks_per_core, self.memo)
        basis, prices = self.shared.basis, self.shared.prices(index)
        times = assembled(basis, layouts, prices, pipeline)
        return step_of(basis, layouts, prices, times), times.pipeline_s

    def _levels(self, plan: "_OpenPlan") -> tuple[int, ...]:
        """The levels whose steps make up a plan's step and its comparison with other plans of its class."""
        if plan.stages is None:
            return tuple(plan.shares)
        return tuple(level for level in self.levels if level <= max(plan.shares))


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenPlan(Placement):
    """A candidate with its stages and its recomputation, before its seconds are known."""

    index: int
    stages: Stages | None
    shares: Mapping[int, float]  # the part of the blocks of each level; stages that recompute by themselves count as 0


def _of_fullest(memory: StepMemory) -> dict[str, float]:
    rank = int(np.argmax(memory.peak_bytes))
    return {name: float(part[rank]) for name, part in memory.parts.items()}


def _in_parts(plans: Sequence[_OpenPlan]) -> dict[int, Stages]:
    """Stages of recomputing plans as if they did not recompute, if backward passes would run in parts."""
    return {
        k: replace(plan.stages, recomputes=False)
        for k, plan in enumerate(plans)
        if plan.stages is not None and plan.stages.recomputes and SCHEDULES[plan.stages.schedule].splits_backward
    }


def with_recompute(
    degrees: Degrees, full: int | tuple[int, ...] | None, selective: int | tuple[int, ...] | None
) -> Degrees:
    """Degrees with these numbers of fully and selectively recomputed blocks of every stage, or of each. None: all."""
    has_full, has_selective = (blocks is None or bool(np.any(blocks)) for blocks in (full, selective))
    if has_full and full is not None and has_selective:
        return replace(degrees, recompute="auto", recompute_blocks=full, selective_blocks=selective)
    if has_full or has_selective:
        kind, blocks = ("full", full) if has_full else ("selective", selective)
        return replace(degrees, recompute=kind, recompute_blocks=blocks)
    return degrees


def _by_level(known: Mapping[int, float]) -> tuple[float, ...]:
    """Values of all levels up to the highest. Without a selective level, blocks at it are not recomputed."""
    return tuple(known.get(level, known[NONE]) for level in range(max(known) + 1))


def pricing_of(works: ProgramWorks, plan: PricedPlan, cluster: ClusterSpec, on: Machinery) -> Pricing:
    """The pricing of a plan, for the figures that a report needs beside its price."""
    question = Question(
        cluster=cluster, degrees=plan.degrees, engine=on.machine.engine, precision=on.machine.precision, cuts=plan.cuts
    )
    return Pricing(works, question, on.machine)
