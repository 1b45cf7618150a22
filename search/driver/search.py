"""The search of degrees: screen every candidate, price the possible best ones exactly, let Optuna vary their cuts.

    screening    lower bounds of all candidates, and the candidates that cannot fit
                 (`autopar.search.bounds.lower_bounds`)
    exact        prices of the baselines, then from the smallest bound on, until no bound is below the best price
                 (`autopar.search.driver.branch_and_bound` over `autopar.search.pricing.exact`)
    refining     Optuna moves stage cuts of the best candidates, which bounds cannot rank
                 (`autopar.search.driver.optuna_refine`)

Bounds and prices are values of the objective. Labels are chosen per split, which is a tensor degree, a context degree
and an expert degree, only for splits that a bound leaves open. Until then, screening uses the labels of tensor degree
1, or of the smallest tensor degree above 1, with the same expert degree. Context ranks then send nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.step.unique_rows import distinct, numbered
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import AutoparError
from autopar.ir.arrays import Floats
from autopar.ir.cluster import ClusterSpec
from autopar.search.bounds.lower_bounds import Machinery, Screening, screen
from autopar.search.bounds.memory import level_weights
from autopar.search.driver.branch_and_bound import AHEAD, Proof, best_first
from autopar.search.driver.optuna_refine import Refinement, refine
from autopar.search.driver.optuna_seeds import NEARLY, kinds_of, starts_of
from autopar.search.driver.study import StudyPlace, study_values
from autopar.search.pricing.batch import Together
from autopar.search.pricing.exact import AS_IT_IS, BY_STAGE, Cut, PricedPlan
from autopar.search.pricing.objective import Goal, Part
from autopar.search.result.format import readable_value
from autopar.search.space.baselines import Baseline, baselines
from autopar.search.space.candidates import Candidates, Split, candidates
from autopar.search.space.dimensions import Constraints

MOST_BY_STAGE = 48  # prices of candidates whose stages recompute their own numbers of blocks


class Works(Protocol):
    """The block costs under the labels of a split (`autopar.search.space.candidates.Split`).

    Raises `AutoparError` if the model cannot be split like this.
    """

    def __call__(self, tp: int, cp: int = 1, ep: int = 1) -> ProgramWorks: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Members:
    """The candidates of every class. `classes` has the number of each candidate's class, without gaps."""

    classes: NDArray[np.int64]

    @cached_property
    def _sorted(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        ends = np.cumsum(np.bincount(self.classes))
        return np.argsort(self.classes, kind="stable"), np.concatenate([[0], ends])

    def like(self, index: int) -> NDArray[np.intp]:
        """The candidates of the class of one of them, in order."""
        (order, begins), number = self._sorted, int(self.classes[index])
        return order[begins[number] : begins[number + 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """Candidates, their screening, and the exact prices by candidate."""

    candidates: Candidates
    screened: Screening
    exact: Mapping[int, PricedPlan] = field(hash=False)
    proof: Proof
    baselines: tuple[Baseline, ...]
    refined: Refinement
    refused: Mapping[Split, str] = field(hash=False)  # why a split cannot be used
    labelled: tuple[Split, ...]
    goal: Goal
    members: Members = field(hash=False, compare=False)
    together: Together = field(hash=False, compare=False)  # prices more candidates of splits with labels
    # the best plan that keeps gathered values, if one was priced (`autopar.search.driver.regather_choice`)
    kept: PricedPlan | None = None
    # the best plan whose loss runs in chunks, if it is better (`autopar.search.driver.chunk_choice`)
    chunked: PricedPlan | None = None

    @property
    def best(self) -> PricedPlan | None:
        """The fitting plan of the smallest value."""
        best = None if self.proof.best is None else self.exact[self.proof.best.index]
        for plan in (self.refined.best, self.kept, self.chunked):
            if best is None or (plan is not None and self.goal.value(plan) < self.goal.value(best)):
                best = plan
        return best

    @property
    def index_of_best(self) -> int | None:
        """The candidate of the best plan. None if the plan has varied cuts or keeps gathered values."""
        best = self.best
        return next((index for index, plan in self.exact.items() if plan is best), None)


def search_degrees(
    works_of: Works,
    cluster: ClusterSpec,
    constraints: Constraints,
    on: Machinery,
    *,
    most_exact: int,
    trials: int = 0,
    seed: int = 0,
    place: StudyPlace | None = None,
    should_continue: Callable[[], bool] = lambda: True,
    on_progress: Callable[[str], None] = lambda _: None,
    goal: Goal | None = None,
    below: float = np.inf,
    labelled_as: Callable[[Split], Split] = lambda split: split,
) -> SearchState:
    """Search for the fastest candidate that fits, or for the best one under another `goal`.

    The best candidate is proven if `most_exact` exact prices are enough. Optuna then tries at most `trials` variations
    of the cuts of nearly best candidates. The study at `place` keeps the trials. A candidate must have a value smaller
    than `below`.
    """
    whole = Part(cluster=cluster, on=on, weight=1.0)
    goal = goal or Goal(objective="time", parts={cluster.num_devices: whole})
    search = _Search(works_of, cluster, constraints, goal, below, labelled_as, should_continue, on_progress)
    on_progress(f"{len(search.candidates):,} candidates")
    while True:
        proof = search.explore(most_exact)
        open_split = search.open_split(proof)
        if open_split is None:
            return search.result(proof, search.refined(proof, trials, seed, place))
        on_progress(f"labels for {open_split}")
        search.label(open_split)


def classes_of(c: Candidates, goal: Goal) -> NDArray[np.int64]:
    """The class of every candidate. Pipelines of one class are equal except for recomputation, on as many devices."""
    if goal.is_memory or not len(c):
        return np.arange(len(c))
    alone = np.where(c.pp > 1, 0, 1 + np.arange(len(c)))  # without a pipeline bounds are exact
    columns: Sequence[Any] = (
        c.num_devices, c.tp, c.cp, c.ep, c.pp, c.schedule, c.virtual, c.micro_batch, c.micro_batches, c.order,
    )  # fmt: skip
    return distinct([numbered(column) for column in (*columns, alone)]).numbers(len(c))


def added_seconds(screened: Screening, index: int, plan: PricedPlan, peers: NDArray[np.int64]) -> Floats:
    """Seconds that the exact price of a candidate adds to the bounds of other candidates of its class."""
    bounds = [each[index] for each in screened.pipelines]
    more = [max(0.0, pipeline - bound) for pipeline, bound in zip(plan.pipelines, bounds, strict=False)]
    parts = level_weights(screened.level[peers])
    added = [part * seconds for part, seconds in zip(parts, more, strict=False)]
    return np.asarray(sum(added, np.zeros(len(peers))))


def added_values(screened: Screening, bounds: Floats, index: int, plan: PricedPlan, peers: NDArray[np.int64]) -> Floats:
    """The value that the exact price of a candidate adds to the bounds of other candidates of its class."""
    worth = bounds[peers] / np.maximum(screened.seconds[peers], 1e-300)  # of a second
    return np.asarray(added_seconds(screened, index, plan, peers) * worth)


def stand_in(split: Split, labelled: Sequence[Split]) -> Split | None:
    """The split whose labels screen the candidates of a split without labels; None if there is none.

    It has no context ranks, and several tensor ranks if `split` has. It has the expert ranks of `split`, or none. It is
    the first such one of the `labelled` splits.
    """
    like = [s for s in labelled if s.cp == 1 and (s.tp > 1) == (split.tp > 1) and s.ep in (1, split.ep)]
    return max(like, key=lambda s: s.ep, default=None)


def _stand_ins(splits: Sequence[Split], labelled_as: Callable[[Split], Split]) -> list[Split]:
    """The smallest split of each kind that `stand_in` tells apart. Expert degrees with the same labels are one kind."""
    stand_ins: dict[tuple[int, bool], Split] = {}
    for split in sorted(splits, key=lambda split: (split.ep, split.tp)):
        if split.cp == 1:
            stand_ins.setdefault((labelled_as(split).ep, split.tp > 1), split)
    return list(stand_ins.values())


class _Search:
    """One search. It holds the data that rounds with different labels share."""

    def __init__(
        self,
        works_of: Works,
        cluster: ClusterSpec,
        constraints: Constraints,
        goal: Goal,
        below: float,
        labelled_as: Callable[[Split], Split],
        should_continue: Callable[[], bool],
        on_progress: Callable[[str], None],
    ) -> None:
        self.works_of, self.goal, self.below, self.labelled_as = works_of, goal, below, labelled_as
        self.should_continue, self.on_progress = should_continue, on_progress
        self.refused: dict[Split, str] = {}
        self.works: dict[Split, ProgramWorks] = {}
        self.candidates = candidates(constraints)
        self.machinery: list[tuple[Machinery, NDArray[np.bool_]]] = []  # with the candidates that are priced on it
        for on in {id(part.on): part.on for part in goal.parts.values()}.values():
            counts = [count for count, part in goal.parts.items() if part.on is on]
            self.machinery.append((on, np.isin(self.candidates.num_devices, counts)))
        self.columns = {name: np.full(len(self.candidates), np.inf) for name in Screening.__slots__}
        self.exact: dict[int, PricedPlan] = {}
        self.members = Members(classes=classes_of(self.candidates, goal))
        self.together = Together(self.candidates, self.works, goal)
        self.unlabelled = self.candidates.splits()
        self.needs_labels = np.ones(len(self.candidates), dtype=bool)
        self.values = np.full(len(self.candidates), np.inf)  # the bounds
        first = [split for split in _stand_ins(self.unlabelled, labelled_as) if self._choose(split)]
        for split in first:
            self._screen(split)
        for split in tuple(self.unlabelled):
            if split in self.unlabelled and stand_in(split, first) is None:
                self.label(split)
        self.baselines = baselines(self.candidates, cluster)

    def label(self, split: Split) -> None:
        """Choose labels for a split and for the splits that share them, and screen their candidates."""
        if self._choose(split):
            self._screen(split)

    def _choose(self, split: Split) -> bool:
        """Choose labels for a split and for the splits that share them. False if there are none."""
        of = self.labelled_as(split)
        peers = [other for other in self.unlabelled if self.labelled_as(other) == of]
        self.unlabelled = [other for other in self.unlabelled if other not in peers]
        places = self._places(peers)
        self.needs_labels[places] = False
        try:
            self.works |= dict.fromkeys(peers, self.works_of(*split))
        except AutoparError as error:
            self.refused |= dict.fromkeys(peers, str(error))
            self._put(places, None)
            return False
        return True

    def _screen(self, split: Split) -> None:
        """Screen the candidates that depend on the labels of a split: its own, and the candidates it stands in for."""
        works, labelled = self.works[split], tuple(self.works)
        places = self._places([other for other in labelled if self.works[other] is works])
        if split.cp > 1 and stand_in(split, labelled) is not None:
            places = places[self._is_open(places)]
        others = self._places([other for other in self.unlabelled if self._stands_in(works, other, labelled)])
        wanted = np.sort(np.concatenate([places, others]))
        for on, mine in self.machinery:
            index = wanted[mine[wanted]]
            if len(index):
                self._put(index, screen(works, self.candidates.at(index), on))

    def _stands_in(self, works: ProgramWorks, split: Split, labelled: Sequence[Split]) -> bool:
        """Whether the candidates of an unlabelled split are screened with these block costs for now."""
        first = stand_in(split, labelled)
        return first is not None and self.works[first] is works

    def _places(self, splits: Sequence[Split]) -> NDArray[np.intp]:
        """The candidates of splits."""
        every = [self.candidates.places[split] for split in splits]
        return np.concatenate(every) if every else np.zeros(0, dtype=np.intp)

    def _is_open(self, index: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Whether candidates may still matter, by the bounds of their stand-in."""
        least = min(self.below, *(self.goal.value(plan) for plan in self.exact.values() if plan.fits), np.inf)
        if not np.isfinite(least):
            return np.ones(len(index), dtype=bool)
        screened = Screening(**{name: column[index] for name, column in self.columns.items()})
        by_stage = replace(screened, seconds=screened.by_stage_seconds * (1 - NEARLY))
        c = self.candidates.at(index)
        values = np.minimum(self.values[index], self.goal.bounds(c, by_stage))
        return np.asarray(values < least * (1 + NEARLY))

    def _put(self, index: NDArray[Any], screened: Screening | None) -> None:
        for name, column in self.columns.items():
            column[index] = np.inf if screened is None else getattr(screened, name)
        self.values[index] = np.inf if screened is None else self.goal.bounds(self.candidates.at(index), screened)

    def explore(self, most: int) -> Proof:
        """Price candidates until the best is proven, or until a candidate without labels is next."""
        needs_labels, bounds = self.needs_labels, self.bounds()
        if self.unlabelled and not self.exact:
            self._best_first(np.where(needs_labels, np.inf, bounds), min(most, AHEAD))
        return self._best_first(bounds, most)

    def _best_first(self, bounds: Floats, most: int) -> Proof:
        needs_labels = self.needs_labels
        stopped = False

        def price(index: int) -> float:
            nonlocal stopped
            if needs_labels[index]:
                stopped = True
                return float(bounds[index])
            if index not in self.exact:
                self.exact[index] = self.together.priced(index)
            plan = self.exact[index]
            return self.goal.value(plan) if plan.fits else np.inf

        def on_bound(best: float, bound: float) -> None:
            status = f"best {readable_value(best, self.goal.unit)}" if np.isfinite(best) else "none fits yet"
            told = readable_value(bound, self.goal.unit)
            self.on_progress(f"{len(self.exact):,} plans priced: {status}, bound {told}")

        known = [*self.exact, *(baseline.index for baseline in self.baselines if not needs_labels[baseline.index])]
        return best_first(
            bounds,
            self.members.classes,
            price,
            first=known,
            most=most,
            should_continue=lambda: self.should_continue() and not stopped,
            ties=self.columns["seconds"],
            prefetch=lambda likely: self.together.price(
                [(i, AS_IT_IS) for i in likely if not needs_labels[i] and np.isfinite(bounds[i])]
            ),
            added=lambda index, peers: self.added(bounds, index, peers),
            on_bound=on_bound,
        )

    def added(self, bounds: Floats, index: int, peers: NDArray[np.int64]) -> Floats:
        """The value that an exact price adds to the bounds of other candidates of its class."""
        if index not in self.exact:
            return np.zeros(len(peers))
        return added_values(Screening(**self.columns), bounds, index, self.exact[index], peers)

    def bounds(self) -> Floats:
        """The smallest possible value of every candidate. It is infinite if it is not smaller than `below`."""
        return np.where(self.values < self.below, self.values, np.inf)

    def open_split(self, proof: Proof) -> Split | None:
        """The split without labels whose candidate was next."""
        last = proof.priced[-1].index if proof.priced else None
        split = None if last is None else self.candidates.split(last)
        return split if split in self.unlabelled else None

    def refined(self, proof: Proof, trials: int, seed: int, place: StudyPlace | None) -> Refinement:
        """Vary the cuts, and the recomputation by stage, of the fastest candidates with several stages."""
        if not trials:
            return Refinement()
        can_be_priced, value = self.candidates.of(*self.works), self.goal.value
        others = self.by_stage(can_be_priced, np.inf if proof.best is None else proof.best.value)
        if proof.best is None and not others:
            return Refinement()
        best = others[0] if proof.best is None else proof.best.index

        def values(indices: Sequence[int]) -> list[float]:
            self.together.price([(index, BY_STAGE) for index in indices])
            return [value(self.together.priced(index, BY_STAGE)) for index in indices]

        starts = starts_of(
            self.candidates,
            np.where(can_be_priced, self.raised(), np.inf),
            values,
            best,
            others,
            [baseline for baseline in self.baselines if can_be_priced[baseline.index]],
        )
        if place is None and not any(start.is_varied for start in starts):
            return Refinement()

        as_they_are = {start.index for start in starts if not start.is_varied}

        def cut(index: int, moved: tuple[int, int]) -> Cut:
            return Cut(*moved, by_stage=index not in as_they_are)

        self.on_progress(f"moving cuts of {len(starts) - len(as_they_are)} plans")
        with nullcontext() if place is None else study_values(place.where):
            return refine(
                starts,
                lambda index, moved: self.together.priced(index, cut(index, moved)),
                value=value,
                trials=trials,
                capacity_bytes=self.goal.part(self.together.priced(best)).on.capacity_bytes,
                seed=seed,
                index_of=self.candidates.index_of,
                place=place,
                should_continue=self.should_continue,
                prefetch=lambda likely: self.together.price([(index, cut(index, moved)) for index, moved in likely]),
            )

    def raised(self) -> Floats:
        """Bounds, raised by the exact prices of their class."""
        bounds = self.bounds()
        raised = bounds.copy()
        for index in self.exact:
            peers = self.members.like(index)
            peers = peers[np.isfinite(bounds[peers])]
            raised[peers] = np.maximum(raised[peers], bounds[peers] + self.added(bounds, index, peers))
        for index, plan in self.exact.items():
            raised[index] = self.goal.value(plan) if plan.fits else np.inf
        return raised

    def by_stage(self, can_be_priced: NDArray[np.bool_], best: float) -> list[int]:
        """Candidates that may beat the best value, or fit, if every stage recomputes its own number of blocks.

        Bounds assume one number for all stages. Here screening estimates the value, and the fraction `NEARLY` is
        subtracted. The smallest estimate is priced first, while it is below the best value. Estimates are too small by
        about the same amount for all pipelines of a schedule.
        """
        if self.goal.is_memory or any(on.recompute_blocks is not None for on, _ in self.machinery):
            return []
        screened = Screening(**self.columns)
        recomputes = screened.level > 0
        recomputes[[index for index, plan in self.exact.items() if plan.degrees.recompute != "none"]] = True
        mine = can_be_priced & recomputes & (self.candidates.pp > 1)
        if not np.any(mine):
            return []
        seconds = np.where(mine, screened.by_stage_seconds, np.inf)
        estimates = self.goal.bounds(self.candidates, replace(screened, seconds=seconds))
        least = estimates * (1 - NEARLY)

        def price(index: int) -> float:
            plan = self.together.priced(index, BY_STAGE)
            return self.goal.value(plan) if plan.fits else np.inf

        proof = best_first(
            np.where(least < min(best, self.below), least, np.inf),
            kinds_of(self.candidates, ("schedule",)),
            price,
            most=MOST_BY_STAGE,
            should_continue=self.should_continue,
            prefetch=lambda likely: self.together.price([(index, BY_STAGE) for index in likely]),
            added=lambda index, _: max(0.0, price(index) - float(estimates[index])),
        )
        fitting = [price for price in proof.priced if np.isfinite(price.value)]
        return [price.index for price in sorted(fitting, key=lambda price: price.value)]

    def result(self, proof: Proof, refined: Refinement) -> SearchState:
        return SearchState(
            candidates=self.candidates,
            screened=Screening(**self.columns),
            exact=self.exact,
            proof=proof,
            baselines=self.baselines,
            refined=refined,
            refused=self.refused,
            labelled=tuple(self.works),
            goal=self.goal,
            members=self.members,
            together=self.together,
        )
