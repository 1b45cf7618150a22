"""The choice of `Degrees.loss_chunks`: logits and loss in chunks of tokens, so that the logits never exist whole.

Candidates are searched with whole logits. In chunks, the product of the head is computed once more, and a chunk's
kernels are smaller. A plan in chunks is therefore better only if the free memory makes it fit, or makes it recompute
fewer blocks. So only candidates that recompute or do not fit are screened again. Fewer chunks take less time and more
memory. The first screening has the block costs of the fewest chunks, and no logits. It rules out most candidates. The
others are screened with the largest number of chunks, with half of it, and so on. Their exact prices come in the order
of their bounds, until no bound is below the best. The proof is about all these numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import AutoparError
from autopar.ir.arrays import Floats
from autopar.search.bounds.lower_bounds import Screening, screen
from autopar.search.driver.branch_and_bound import ROUNDING, best_first
from autopar.search.driver.search import SearchState, added_seconds, stand_in
from autopar.search.pricing.batch import Together
from autopar.search.pricing.exact import AS_IT_IS, PricedPlan
from autopar.search.space.candidates import Split

TOKENS_OF_A_CHUNK = 1024  # of one sequence; fewer rows make the head's product slow
FEWEST, MOST = 4, 64  # of the largest number of chunks that a search tries
LEAST_CHUNKS = 2


class WorksInChunks(Protocol):
    """The block costs under the labels of a split, with the loss in chunks."""

    def __call__(self, tp: int, cp: int = 1, ep: int = 1, *, chunks: int) -> ProgramWorks: ...


def chunks_of(sequence: int | None) -> int:
    """The largest number of chunks that a search tries for sequences of so many tokens: a power of two."""
    most = max(FEWEST, min(MOST, (sequence or 0) // TOKENS_OF_A_CHUNK))
    return 1 << (most.bit_length() - 1)


def with_chunks(
    search: SearchState,
    works_in_chunks: WorksInChunks,
    chunks: int,
    *,
    most_exact: int,
    should_continue: Callable[[], bool] = lambda: True,
) -> SearchState:
    """The search's result with the best plan whose loss runs in chunks, if it is better, and with a bound of both."""
    best, proof = None, search.proof
    least = np.inf if search.best is None else search.goal.value(search.best)
    could = _InChunks(search, works_in_chunks, LEAST_CHUNKS, least, _can_gain(search, least), logits=False)
    can_gain = np.isfinite(could.bounds)
    while chunks >= LEAST_CHUNKS and np.any(can_gain):
        choice = _InChunks(search, works_in_chunks, chunks, least, can_gain)
        if np.any(np.isfinite(choice.bounds)):
            chunked = best_first(
                choice.bounds,
                search.members.classes,
                choice.value,
                most=most_exact if should_continue() else 0,
                should_continue=should_continue,
                prefetch=choice.price,
                added=choice.added,
            )
            better = choice.best()
            if better is not None:
                best, least = better, search.goal.value(better)
            bound = min(proof.bound, chunked.bound, least)
            proof = replace(proof, bound=bound, is_proven=proof.is_proven and chunked.is_proven)
        chunks //= 2
    if np.isfinite(least) and proof.bound >= least * (1 - ROUNDING):  # bounds of the searches before rule out the rest
        proof = replace(proof, is_proven=True)
    return replace(search, chunked=best, proof=proof)


class _InChunks:
    """Candidates that may beat the value `least` of the best plan if their loss runs in so many chunks.

    `can_gain` says which of them are screened. Without `logits`, the logits take no memory.
    """

    def __init__(
        self,
        search: SearchState,
        works_in_chunks: WorksInChunks,
        chunks: int,
        least: float,
        can_gain: NDArray[np.bool_],
        *,
        logits: bool = True,
    ) -> None:
        self.found, self.goal, self.works_in_chunks, self.chunks = search, search.goal, works_in_chunks, chunks
        self.least, self.logits = least * (1 - ROUNDING), logits
        self.works: dict[Split, ProgramWorks] = {}
        self.refused = set(search.refused)
        self.together = Together(search.candidates, self.works, self.goal)
        self.columns = {name: np.full(len(search.candidates), np.inf) for name in Screening.__slots__}
        self.bounds = np.full(len(search.candidates), np.inf)
        self._screen(can_gain)

    def _screen(self, can_gain: NDArray[np.bool_]) -> None:
        """Bounds in chunks. A bound that is not below the least value is infinite."""
        c = self.found.candidates
        each = {split: c.among(split, can_gain) for split in c.splits() if split not in self.refused}
        each = {split: index for split, index in each.items() if len(index)}
        labelled = [split for split in each if split in self.found.labelled]
        self._put_all(each, {split: split for split in labelled})
        firsts = {split: stand_in(split, self.found.labelled) for split in each if split not in labelled}
        # as in the search, until a bound asks for the labels of a split
        self._put_all(each, {split: first for split, first in firsts.items() if first is not None})
        wanted = [split for split in firsts if np.any(np.isfinite(self.bounds[each[split]]))]
        self._put_all(each, {split: split for split in wanted})
        self.screened_values = self.bounds.copy()
        self._raise()

    def _raise(self) -> None:
        """Raise bounds by the exact prices of the search: in chunks, no pipeline of a class is faster."""
        for index, plan in self.found.exact.items():
            peers = self.found.members.like(index)
            peers = peers[np.isfinite(self.bounds[peers])]
            if len(peers) and plan.pipelines:
                values = np.maximum(self.bounds[peers], self._raised(int(peers[0]), plan, peers))
                self.bounds[peers] = np.where(values < self.least, values, np.inf)

    def _put_all(self, each: Mapping[Split, NDArray[np.intp]], labels: Mapping[Split, Split]) -> None:
        """Screen the candidates of splits with the block costs of the split that `labels` names for each."""
        groups: dict[int, tuple[ProgramWorks, list[NDArray[np.intp]]]] = {}
        for split, labelled in labels.items():
            self.bounds[each[split]] = np.inf
            if self._can_price(labelled):
                works = self.works[labelled]
                groups.setdefault(id(works), (works, []))[1].append(each[split])
        for works, indices in groups.values():
            self._put(np.sort(np.concatenate(indices)), works)

    def _put(self, index: NDArray[np.intp], works: ProgramWorks) -> None:
        c = self.found.candidates
        for count, part in self.goal.parts.items():
            at = index[c.num_devices[index] == count]
            if len(at):
                screened = screen(works, c.at(at), part.on, logits=self.logits)
                for name, column in self.columns.items():
                    column[at] = getattr(screened, name)
                values = self.goal.bounds(c.at(at), screened)
                self.bounds[at] = np.where(values < self.least, values, np.inf)

    def _can_price(self, split: Split) -> bool:
        """Whether a split has labels, and the model a loss that runs in chunks."""
        if split not in self.works and split not in self.refused:
            try:
                self.works[split] = self.works_in_chunks(*split, chunks=self.chunks)
            except AutoparError:
                self.refused.add(split)
        return split in self.works and self.works[split].is_chunked

    def price(self, wanted: Sequence[int]) -> None:
        """Price candidates."""
        self.together.price([(index, AS_IT_IS) for index in wanted if np.isfinite(self.bounds[index])])

    def value(self, index: int) -> float:
        plan = self.together.priced(index)
        return self.goal.value(plan) if plan.fits else np.inf

    def added(self, index: int, peers: NDArray[np.int64]) -> Floats:
        """The value that an exact price adds to the bounds of other candidates of its class."""
        values = self._raised(index, self.together.priced(index), peers)
        return np.asarray(np.maximum(values - self.bounds[peers], 0.0))

    def _raised(self, index: int, plan: PricedPlan, peers: NDArray[np.int64]) -> Floats:
        """Bounds of candidates whose pipelines are that of `index`, raised by a priced pipeline of this class."""
        screened = Screening(**self.columns)
        values = self.screened_values[peers]
        worth = values / np.maximum(screened.seconds[peers], 1e-300)  # of a second
        return np.asarray(values + added_seconds(screened, index, plan, peers) * worth)

    def best(self) -> PricedPlan | None:
        """The best fitting plan in chunks. None if it is not below the least value."""
        fitting = [(self.goal.value(plan), index) for (index, _), plan in self.together.found.items() if plan.fits]
        if not fitting or min(fitting)[0] >= self.least:
            return None
        plan = self.together.priced(min(fitting)[1])
        return replace(plan, degrees=replace(plan.degrees, loss_chunks=self.chunks))


def _can_gain(search: SearchState, least: float) -> NDArray[np.bool_]:
    """Candidates that recompute or do not fit, and whose pipeline and least step are faster than the best plan."""
    c, screened, goal = search.candidates, search.screened, search.goal
    if goal.is_memory:
        return np.ones(len(c), dtype=bool)
    gains = screened.level > 0
    for index, plan in search.exact.items():
        gains[index] |= not plan.fits or plan.degrees.recompute != "none"
    for seconds in (screened.pipeline, screened.least_seconds):
        gains &= goal.bounds(c, replace(screened, seconds=seconds)) < least
    return gains
