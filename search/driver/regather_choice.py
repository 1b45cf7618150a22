"""The choice of `Plan.regather`: values gathered for products are gathered again for the backward pass, or kept for it.

Candidates are searched as if they gathered again. With kept values, the same labels send less and hold more. The second
gathers take a fraction of a block's backward pass, and a step saves at most the largest such fraction. If weight
gradients are a pass of their own, the fraction is of the backward pass without them. Without a pipeline, it is of the
forward and the backward pass together.

A candidate is priced anew only if its value, less this fraction, is below the best. The smallest comes first, until no
bound is below the best. Then no candidate is better under either setting.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.pricing import family_at, shape_of_works
from autopar.cost_model.step.block_prices import block_prices, end_passes
from autopar.cost_model.step.context import Basis, Passes, repeated_roles
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.unique_rows import distinct, numbered, spread
from autopar.cost_model.work.block_work import Family
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import AutoparError
from autopar.ir.arrays import Floats
from autopar.search.bounds.lower_bounds import Machinery, layouts_of, screen
from autopar.search.bounds.memory import level_weights
from autopar.search.bounds.pipeline import SPLITS_BACKWARD
from autopar.search.driver.alternatives import raised_seconds
from autopar.search.driver.branch_and_bound import ROUNDING, best_first
from autopar.search.driver.optuna_refine import MOVES
from autopar.search.driver.optuna_seeds import NEARLY
from autopar.search.driver.search import SearchState, Works, sharing, stand_in, works_behind
from autopar.search.pricing.batch import Together, Varied
from autopar.search.pricing.exact import AS_IT_IS, Cut, PricedPlan
from autopar.search.space.candidates import Candidates, Split

_ENDS = ("first", "last")
SPLITS = np.flatnonzero(SPLITS_BACKWARD)  # schedules that split the backward pass
NOTHING_KNOWN = -1e200  # seconds
MOST_VARIED = 4  # candidates whose cuts are moved


def with_kept(
    search: SearchState, works_kept: Works, *, most_exact: int, should_continue: Callable[[], bool] = lambda: True
) -> SearchState:
    """The search's result with the best plan that keeps gathered values, and with a bound of both kinds."""
    if search.proof.best is None or search.goal.is_memory:
        return search
    kept, old = _KeptGathers(search, works_kept), search.proof
    proof = best_first(
        kept.bounds,
        search.members.classes,
        kept.value,
        most=most_exact if should_continue() else 0,
        should_continue=should_continue,
        prefetch=lambda likely: kept.price([(index, AS_IT_IS) for index in likely]),
        added=kept.added,
    )
    kept.price_moved()
    both = replace(old, bound=min(old.bound, proof.bound), is_proven=old.is_proven and proof.is_proven)
    return replace(search, kept=kept.best, proof=both)


class _KeptGathers:
    """Candidates that may beat the best plan if they keep gathered values."""

    def __init__(self, search: SearchState, works_kept: Works) -> None:
        assert search.best is not None
        self.found, self.goal, self.works_kept = search, search.goal, works_kept
        self.least = search.goal.value(search.best) * (1 - ROUNDING)
        self.works: dict[Split, ProgramWorks] = {}
        self.refused: set[Split] = set()
        self.together = Together(search.candidates, self.works, self.goal)
        self.per_second = self.goal.bounds(
            search.candidates, replace(search.screened, seconds=np.ones(len(search.candidates)))
        )
        self.bounds = self._bounds()

    @property
    def best(self) -> PricedPlan | None:
        fitting = [plan for plan in self.together.found.values() if plan.fits]
        return min(fitting, key=self.goal.value, default=None)

    def _bounds(self) -> Floats:
        """Bounds with kept values. A bound that is not below the least value is infinite."""
        c = self.found.candidates
        bounds = self.goal.bounds(c, replace(self.found.screened, seconds=raised_seconds(self.found)))
        for index, plan in self.found.exact.items():
            bounds[index] = self.goal.value(plan) if plan.fits else np.inf
        bounds[c.of(Split(1))] = np.inf
        mine = np.flatnonzero(np.isfinite(bounds))
        if len(mine):
            bounds[mine] *= 1 - most_saved(self.found, mine)
        for works, splits in self._priced_alike(bounds < self.least):
            for count, part in self.goal.parts.items():
                mine = np.flatnonzero((bounds < self.least) & c.of(*splits) & (c.num_devices == count))
                if len(mine):
                    screened = screen(works, c.at(mine), part.on)
                    bounds[mine] = np.maximum(bounds[mine], self.goal.bounds(c.at(mine), screened))
        return np.where(bounds < self.least, bounds, np.inf)

    def _priced_alike(self, mask: NDArray[np.bool_]) -> list[tuple[ProgramWorks, list[Split]]]:
        """The block costs that screen the candidates of a mask, or stand in for their own, each with its splits."""
        c, labelled = self.found.candidates, self.found.labelled

        def works_of(split: Split) -> ProgramWorks | None:
            labels = split if split in labelled else stand_in(split, labelled)
            return self.works[labels] if labels is not None and self._can_price(labels) else None

        return sharing((split for split in c.splits() if len(c.among(split, mask))), works_of)

    def _can_price(self, split: Split) -> bool:
        """Whether there are labels for a split."""
        if split not in self.works and split not in self.refused:
            try:
                self.works[split] = self.works_kept(*split)
            except AutoparError:
                self.refused.add(split)
        return split in self.works

    def price(self, wanted: Sequence[Varied]) -> None:
        """Price the wanted candidates whose split has labels."""
        self.together.price([varied for varied in wanted if self._can_price(self.found.candidates.split(varied[0]))])

    def value(self, index: int) -> float:
        self.price([(index, AS_IT_IS)])
        plan = self.together.found.get((index, AS_IT_IS))
        return self.goal.value(plan) if plan is not None and plan.fits else np.inf

    def added(self, index: int, peers: NDArray[np.int64]) -> Floats:
        """The value that an exact price adds to the bounds of other candidates of its class."""
        screened, plan = self.found.screened, self.together.found[index, AS_IT_IS]
        levels = [each[index] for each in screened.pipelines]
        more = [pipeline - bound for pipeline, bound in zip(plan.pipelines, levels, strict=False)]
        more += [NOTHING_KNOWN] * (len(levels) - len(more))
        parts, known = level_weights(screened.level[peers]), self.bounds[peers]
        seconds = screened.seconds[peers] + sum(part * each for part, each in zip(parts, more, strict=True))
        values = seconds * self.per_second[peers]
        return np.where(values < self.least, np.maximum(values - known, 0.0), np.inf)

    def price_moved(self) -> None:
        """Price the varied cuts of the best plan and, if the search has trials, of the few nearly best candidates."""
        c, before, best = self.found.candidates, self.found.together.found, replace(self.found, chunked=None).best
        moved = [varied for varied, priced in before.items() if varied[1] != AS_IT_IS and priced is best]
        near = [
            (self.goal.value(plan), index)
            for (index, _), plan in self.together.found.items()
            if plan.fits and c.pp[index] > 1 and self.goal.value(plan) < self.least * (1 + NEARLY)
        ]
        if self.found.refined.trials:
            varied = [index for _, index in sorted(near)[:MOST_VARIED]]
            cuts = [Cut(first, last, by_stage=True) for first, last in product(MOVES, MOVES)]
            moved += [(index, cut) for index in varied for cut in cuts]
        self.price([varied for varied in moved if c.split(varied[0]) != Split(1)])


def most_saved(search: SearchState, index: NDArray[np.int64]) -> Floats:
    """The largest fraction of a step that each candidate can save by keeping gathered values."""
    c, works = search.candidates.at(index), search.together.works
    columns = (c.tp, c.cp, c.ep, c.num_devices, c.micro_batch, c.dp, c.pp, c.order, np.isin(c.schedule, SPLITS))
    each = distinct([numbered(column) for column in columns])
    few = c.at(each.rows)
    saved = np.zeros(len(few))
    for shared, splits in sharing(few.splits(), lambda split: works_behind(split, works)):
        for devices, part in search.goal.parts.items():
            mine = np.flatnonzero(few.of(*splits) & (few.num_devices == devices))
            if len(mine):
                saved[mine] = _most_saved(shared, few.at(mine), part.on)
    return np.broadcast_to(spread(saved, each.index), len(index))


def _most_saved(works: ProgramWorks, candidates: Candidates, on: Machinery) -> Floats:
    basis = Basis(shape=shape_of_works(works), machine=on.machine)
    layouts = layouts_of(candidates, sequence_parallel=works.sequence_parallel)
    gathered = family_at(works, layouts, on.machine.mechanisms)
    kept = _without_second_gathers(gathered)
    staged, splits = candidates.pp > 1, np.isin(candidates.schedule, SPLITS)
    saved = np.zeros(len(candidates))
    for role in (*repeated_roles(basis.shape), *_ENDS):
        ours, theirs = _passes(basis, gathered, layouts, role), _passes(basis, kept, layouts, role)
        least = ours.backward + np.where(staged, np.where(splits, -ours.weight, 0.0), ours.forward)
        less = ours.backward - theirs.backward
        saved = np.maximum(saved, np.where(less > 0, less / np.where(less > 0, least, 1.0), 0.0))
    return saved


def _passes(basis: Basis, family: Family[Any], layouts: Layouts, role: str) -> Passes:
    if role in _ENDS:
        return end_passes(basis, family, layouts, role)
    prices = block_prices(basis, family, layouts, role)
    return Passes(forward=prices.forward, backward=prices.backward, weight=prices.weight)


def _without_second_gathers(family: Family[Any]) -> Family[Any]:
    """A family of captured blocks, whose variants are the same, as if gathered values were kept."""
    blocks = []
    for role, variants in family.blocks:
        work = variants[0][1]
        less = replace(work, sent=tuple(sent for sent in work.sent if sent.of != "regather"))
        blocks.append((role, tuple((name, less) for name, _ in variants)))
    return replace(family, blocks=tuple(blocks))
