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
from autopar.search.driver.branch_and_bound import AHEAD, ROUNDING, Proof, best_first
from autopar.search.driver.optuna_refine import Refinement, refine
from autopar.search.driver.optuna_seeds import NEARLY, kinds_of, starts_of
from autopar.search.driver.study import StudyPlace, study_values
from autopar.search.pricing.batch import Together
from autopar.search.pricing.exact import AS_IT_IS, BY_STAGE, Cut, PricedPlan
from autopar.search.pricing.objective import Goal, Part
from autopar.search.result.format import readable_value
from autopar.search.space.baselines import baselines
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
    baselines: Mapping[int, str] = field(hash=False)  # names by candidate
    refused: Mapping[Split, str] = field(hash=False)  # why a split cannot be used
    labelled: tuple[Split, ...]
    goal: Goal
    members: Members = field(hash=False, compare=False)
    together: Together = field(hash=False, compare=False)  # prices more candidates of splits with labels
    refined: Refinement = field(default_factory=Refinement)
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
    def values(self) -> Floats:
        """The price of every candidate, or its bound, raised by the prices of candidates with the same pipeline."""
        values = self.goal.bounds(self.candidates, replace(self.screened, seconds=raised_seconds(self)))
        for index, plan in self.exact.items():
            values[index] = self.goal.value(plan) if plan.fits else np.inf
        return values

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
    every = candidates(constraints)
    members = Members(classes=classes_of(every, goal))
    search = Exploration(works_of, every, members, goal, below, should_continue, labelled_as, on_progress)
    on_progress(f"{len(every):,} candidates")
    search.begin(_stand_ins(search.unlabelled, labelled_as))
    search.baselines = baselines(every, cluster)
    state = search.state(search.proof(most_exact))
    if not trials:
        return state
    return replace(state, refined=_refined(state, trials, seed, place, below, should_continue, on_progress))


def explored_again(
    search: SearchState,
    works_of: Works,
    mask: NDArray[np.bool_],
    least: float,
    most_exact: int,
    should_continue: Callable[[], bool],
) -> tuple["Exploration", Proof]:
    """Those candidates of a mask that may beat the value `least` of the best plan under the costs of `works_of`."""
    below = least * (1 - ROUNDING)
    explored = Exploration(works_of, search.candidates, search.members, search.goal, below, should_continue, mask=mask)
    explored.unlabelled = [split for split in explored.unlabelled if split not in search.refused]
    like = {split if split in search.labelled else stand_in(split, search.labelled) for split in explored.unlabelled}
    explored.begin([split for split in search.labelled if split in like])
    return explored, explored.proof(most_exact if should_continue() else 0)


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


def raised_seconds(search: SearchState) -> Floats:
    """Bounds in seconds, raised by the exact prices of candidates with the same pipeline."""
    seconds = search.screened.seconds.copy()
    for index, plan in search.exact.items():
        raise_alike(search, seconds, index, plan)
    return seconds


def raise_alike(search: SearchState, seconds: Floats, index: int, plan: PricedPlan) -> None:
    """Raise, in place, the `seconds` of the candidates that have the pipeline of a priced candidate."""
    bounds = search.screened.seconds
    if np.isfinite(bounds[index]):
        peers = search.members.like(index)
        peers = peers[np.isfinite(seconds[peers])]
        more = added_seconds(search.screened, index, plan, peers)
        seconds[peers] = np.maximum(seconds[peers], bounds[peers] + more)


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


class Exploration:
    """Candidates, or those of a `mask`, under the block costs of `works_of`. Rounds with different labels share it."""

    def __init__(
        self,
        works_of: Works,
        every: Candidates,
        members: Members,
        goal: Goal,
        below: float,
        should_continue: Callable[[], bool],
        labelled_as: Callable[[Split], Split] = lambda split: split,
        on_progress: Callable[[str], None] = lambda _: None,
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        self.works_of, self.goal, self.below, self.labelled_as = works_of, goal, below, labelled_as
        self.should_continue, self.on_progress = should_continue, on_progress
        self.candidates, self.members = every, members
        self.mask = np.ones(len(every), dtype=bool) if mask is None else mask
        self.refused: dict[Split, str] = {}
        self.works: dict[Split, ProgramWorks] = {}
        self.machinery: list[tuple[Machinery, NDArray[np.bool_]]] = []  # with the candidates that are priced on it
        for on in {id(part.on): part.on for part in goal.parts.values()}.values():
            counts = [count for count, part in goal.parts.items() if part.on is on]
            self.machinery.append((on, np.isin(every.num_devices, counts)))
        self.columns = {name: np.full(len(every), np.inf) for name in Screening.__slots__}
        self.exact: dict[int, PricedPlan] = {}
        self.baselines: dict[int, str] = {}  # that are priced first
        self.together = Together(every, self.works, goal)
        self.unlabelled = [split for split in every.splits() if len(every.among(split, self.mask))]
        self.needs_labels = np.ones(len(every), dtype=bool)
        self.values = np.full(len(every), np.inf)  # the bounds

    def begin(self, splits: Sequence[Split]) -> None:
        """Screen all candidates with the labels of these splits, and with labels of splits that none stands in for."""
        first = [split for split in splits if self._choose(split)]
        for split in first:
            self._screen(split)
        for split in tuple(self.unlabelled):
            if split in self.unlabelled and stand_in(split, first) is None:
                self.label(split)

    def label(self, split: Split) -> None:
        """Choose labels for a split and for the splits that share them, and screen their candidates."""
        if self._choose(split):
            self._screen(split, only_open=split.cp > 1 and stand_in(split, tuple(self.works)) is not None)

    def _choose(self, split: Split) -> bool:
        """Choose labels for a split and for the splits that share them. False if there are none."""
        of = self.labelled_as(split)
        peers = [split, *(s for s in self.unlabelled if s != split and self.labelled_as(s) == of)]
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

    def _screen(self, split: Split, *, only_open: bool = False) -> None:
        """Screen the candidates that depend on the labels of a split: its own, and the candidates it stands in for.

        If a stand-in has screened them already, only its own candidates that may still matter.
        """
        works, labelled = self.works[split], tuple(self.works)
        places = self._places([other for other in labelled if self.works[other] is works])
        if only_open:
            places = places[self._is_open(places)]
        behind = {other: stand_in(other, labelled) for other in self.unlabelled}
        others = self._places([other for other, first in behind.items() if first and self.works[first] is works])
        wanted = np.sort(np.concatenate([places, others]))
        for on, mine in self.machinery:
            index = wanted[mine[wanted]]
            if len(index):
                self._put(index, screen(works, self.candidates.at(index), on))

    def _places(self, splits: Sequence[Split]) -> NDArray[np.intp]:
        """The candidates of splits."""
        every = [self.candidates.among(split, self.mask) for split in splits]
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

    @property
    def bounds(self) -> Floats:
        """The smallest possible value of every candidate. It is infinite if it is not smaller than `below`."""
        return np.where(self.values < self.below, self.values, np.inf)

    @property
    def best(self) -> PricedPlan | None:
        """The best priced plan that fits. None if it is not below `below`."""
        fitting = [plan for plan in self.together.found.values() if plan.fits and self.goal.value(plan) < self.below]
        return min(fitting, key=self.goal.value, default=None)

    def proof(self, most: int) -> Proof:
        """Price candidates until the best is proven. A candidate that is next gets its own labels first."""
        while True:
            if self.unlabelled and not self.exact:
                self._best_first(np.where(self.needs_labels, np.inf, self.bounds), min(most, AHEAD))
            proof = self._best_first(self.bounds, most)
            split = self.candidates.split(proof.priced[-1].index) if proof.priced else None
            if split not in self.unlabelled:
                return proof
            self.on_progress(f"labels for {split}")
            self.label(split)

    def _best_first(self, bounds: Floats, most: int) -> Proof:
        """Price candidates until the best is proven, or until a candidate without labels is next."""
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

        def added(index: int, peers: NDArray[np.int64]) -> Floats:
            if index not in self.exact:
                return np.zeros(len(peers))
            return added_values(Screening(**self.columns), bounds, index, self.exact[index], peers)

        def on_bound(best: float, bound: float) -> None:
            status = f"best {readable_value(best, self.goal.unit)}" if np.isfinite(best) else "none fits yet"
            told = readable_value(bound, self.goal.unit)
            self.on_progress(f"{len(self.exact):,} plans priced: {status}, bound {told}")

        known = [*self.exact, *(index for index in self.baselines if not needs_labels[index])]
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
            added=added,
            on_bound=on_bound,
        )

    def state(self, proof: Proof) -> SearchState:
        return SearchState(
            candidates=self.candidates,
            screened=Screening(**self.columns),
            exact=self.exact,
            proof=proof,
            baselines=self.baselines,
            refused=self.refused,
            labelled=tuple(self.works),
            goal=self.goal,
            members=self.members,
            together=self.together,
        )


def _refined(
    search: SearchState,
    trials: int,
    seed: int,
    place: StudyPlace | None,
    below: float,
    should_continue: Callable[[], bool],
    on_progress: Callable[[str], None],
) -> Refinement:
    """Vary the cuts, and the recomputation by stage, of the fastest candidates with several stages."""
    together, proof, value = search.together, search.proof, search.goal.value
    can_be_priced = search.candidates.of(*search.labelled)
    least = below if proof.best is None else min(proof.best.value, below)
    others = _by_stage(search, can_be_priced, least, should_continue)
    if proof.best is None and not others:
        return Refinement()
    best = others[0] if proof.best is None else proof.best.index

    def values(indices: Sequence[int]) -> list[float]:
        together.price([(index, BY_STAGE) for index in indices])
        return [value(together.priced(index, BY_STAGE)) for index in indices]

    starts = starts_of(
        search.candidates,
        np.where(can_be_priced, search.values, np.inf),
        values,
        best,
        others,
        {index: name for index, name in search.baselines.items() if can_be_priced[index]},
    )
    if place is None and not any(start.is_varied for start in starts):
        return Refinement()

    as_they_are = {start.index for start in starts if not start.is_varied}

    def cut(index: int, moved: tuple[int, int]) -> Cut:
        return Cut(*moved, by_stage=index not in as_they_are)

    on_progress(f"moving cuts of {len(starts) - len(as_they_are)} plans")
    with nullcontext() if place is None else study_values(place.where):
        return refine(
            starts,
            lambda index, moved: together.priced(index, cut(index, moved)),
            value=value,
            trials=trials,
            capacity_bytes=search.goal.part(together.priced(best)).on.capacity_bytes,
            seed=seed,
            index_of=search.candidates.index_of,
            place=place,
            should_continue=should_continue,
            prefetch=lambda likely: together.price([(index, cut(index, moved)) for index, moved in likely]),
        )


def _by_stage(
    search: SearchState, can_be_priced: NDArray[np.bool_], below: float, should_continue: Callable[[], bool]
) -> list[int]:
    """Candidates that may have a value below `below` if every stage recomputes its own number of blocks.

    Bounds assume one number for all stages. Here screening estimates the value, and the fraction `NEARLY` is
    subtracted. The smallest estimate is priced first, while it is below the best value. Estimates are too small by
    about the same amount for all pipelines of a schedule.
    """
    goal, screened = search.goal, search.screened
    if goal.is_memory or any(part.on.recompute_blocks is not None for part in goal.parts.values()):
        return []
    recomputes = screened.level > 0
    recomputes[[index for index, plan in search.exact.items() if plan.degrees.recompute != "none"]] = True
    mine = can_be_priced & recomputes & (search.candidates.pp > 1)
    if not np.any(mine):
        return []
    seconds = np.where(mine, screened.by_stage_seconds, np.inf)
    estimates = goal.bounds(search.candidates, replace(screened, seconds=seconds))
    least = estimates * (1 - NEARLY)

    def price(index: int) -> float:
        plan = search.together.priced(index, BY_STAGE)
        return goal.value(plan) if plan.fits else np.inf

    proof = best_first(
        np.where(least < below, least, np.inf),
        kinds_of(search.candidates, ("schedule",)),
        price,
        most=MOST_BY_STAGE,
        should_continue=should_continue,
        prefetch=lambda likely: search.together.price([(index, BY_STAGE) for index in likely]),
        added=lambda index, _: max(0.0, price(index) - float(estimates[index])),
    )
    fitting = [price for price in proof.priced if np.isfinite(price.value)]
    return [price.index for price in sorted(fitting, key=lambda price: price.value)]
