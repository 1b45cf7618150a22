"""The search of degrees: screen every candidate, price exactly those that could be the best, let Optuna vary cuts.

    screening    `autopar.search.screen`: bounds of all candidates, and which cannot fit
    exact        `autopar.search.best_first` over `autopar.search.exact`, from baselines and the smallest bound on,
                 until no bound is below the best price
    refining     `autopar.search.refine`: Optuna moves stage cuts of the best candidates, which bounds cannot rank

Labels are chosen per tensor degree and only for degrees that a bound leaves open: until then a degree is priced with
the labels of the smallest one above 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.program_works import ProgramWorks
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.search.baselines import Baseline, baselines
from autopar.search.best_first import Proof, best_first
from autopar.search.exact import Priced, priced
from autopar.search.refine import Refined, refine
from autopar.search.screen import Machinery, Screened, screen
from autopar.search.space import Candidates, Limits, Wishes, candidates

Floats = NDArray[np.float64]
# from a tensor degree to what its blocks cost; AutoparError where the model cannot be split so
Works = Callable[[int], ProgramWorks]
NEARLY = 0.05  # slower than the best: what moving cuts has been seen to gain
MOST_REFINED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """Candidates, what screening made of them, and every exact price by candidate.

    `refused` says why tensor degrees cannot be used.
    """

    candidates: Candidates
    screened: Screened
    exact: Mapping[int, Priced] = field(hash=False)
    proof: Proof
    baselines: tuple[Baseline, ...]
    refined: tuple[Refined, ...]
    refused: Mapping[int, str] = field(hash=False)

    @property
    def best(self) -> Priced | None:
        """The fastest plan that fits, with moved cuts where those are faster."""
        if self.proof.best is None:
            return None
        found = [self.exact[self.proof.best.index], *(one.priced for one in self.refined if one.priced.fits)]
        return min(found, key=lambda one: one.seconds)


def search_degrees(
    works_of: Works,
    cluster: ClusterSpec,
    limits: Limits,
    wanted: Wishes,
    on: Machinery,
    *,
    most_exact: int,
    trials: int = 0,
    seed: int = 0,
    goes_on: Callable[[], bool] = lambda: True,
    say: Callable[[str], None] = lambda _: None,
) -> Searched:
    """The fastest candidate that fits, proven where `most_exact` exact prices suffice, and at most `trials` variations
    of the cuts of those that are nearly as fast."""
    found = _Search(works_of, cluster, limits, wanted, on)
    say(f"{len(found.candidates):,} candidates")
    while True:
        proof = found.explore(most_exact, goes_on, say)
        open_degree = found.open_degree(proof)
        if open_degree is None:
            return found.result(proof, found.refined(proof, trials, seed, goes_on, say))
        say(f"labels for tensor degree {open_degree}")
        found.label(open_degree)


class _Search:
    """One search; holds what rounds with other labels share."""

    def __init__(self, works_of: Works, cluster: ClusterSpec, limits: Limits, wanted: Wishes, on: Machinery) -> None:
        self.works_of, self.cluster, self.on = works_of, cluster, on
        self.refused: dict[int, str] = {}
        self.works: dict[int, ProgramWorks] = {}
        self.candidates = candidates(limits, wanted)
        self.columns = {name: np.full(len(self.candidates), np.inf) for name in Screened.__slots__}
        self.exact: dict[int, Priced] = {}
        degrees = sorted({int(tp) for tp in self.candidates.tp})
        self.unlabelled = degrees
        for tp in degrees[:2] if degrees[:1] == [1] else degrees[:1]:
            self.label(tp)
        while not self.works and self.unlabelled:
            self.label(self.unlabelled[0])
        self.baselines = baselines(self.candidates, cluster)

    def label(self, tp: int) -> None:
        """Choose labels for a tensor degree, and screen what depends on them."""
        self.unlabelled = [other for other in self.unlabelled if other != tp]
        try:
            self.works[tp] = self.works_of(tp)
        except AutoparError as error:
            self.refused[tp] = str(error)
            self._put(np.flatnonzero(self.candidates.tp == tp), None)
        else:
            is_first = tp > 1 and sum(one > 1 for one in self.works) == 1
            index = np.flatnonzero(np.isin(self.candidates.tp, [tp, *(self.unlabelled if is_first else ())]))
            self._put(index, screen(self.works[tp], self.candidates.at(index), self.on))

    def _put(self, index: NDArray[Any], screened: Screened | None) -> None:
        for name, column in self.columns.items():
            column[index] = np.inf if screened is None else getattr(screened, name)

    def explore(self, most: int, goes_on: Callable[[], bool], say: Callable[[str], None]) -> Proof:
        """Price exactly until the best is proven, or a candidate whose labels are not known comes first."""
        needs_labels = np.isin(self.candidates.tp, self.unlabelled)
        stopped = False

        def price(index: int) -> float:
            nonlocal stopped
            if needs_labels[index]:
                stopped = True
                return float(self.columns["seconds"][index])
            if index not in self.exact:
                degrees = self.candidates.degrees(index)
                self.exact[index] = priced(self.works[degrees.tp], degrees, self.cluster, self.on)
                say(f"{len(self.exact)} plans priced")
            one = self.exact[index]
            return one.seconds if one.fits else np.inf

        known = [*self.exact, *(one.index for one in self.baselines if not needs_labels[one.index])]
        return best_first(
            self.columns["seconds"],
            self.classes(),
            price,
            first=known,
            most=most,
            goes_on=lambda: goes_on() and not stopped,
        )

    def open_degree(self, proof: Proof) -> int | None:
        """The tensor degree without labels that came up as the best."""
        last = proof.priced[-1].index if proof.priced else None
        tp = None if last is None else int(self.candidates.tp[last])
        return tp if tp in self.unlabelled else None

    def classes(self) -> NDArray[np.int64]:
        """A number for all candidates whose pipelines run the same."""
        c = self.candidates
        columns: Sequence[Any] = (c.tp, c.pp, c.schedule, c.virtual, c.micro_batch, c.micro_batches)
        share = self.columns["share"]
        alone = np.where(c.pp > 1, 0, 1 + np.arange(len(c)))  # without a pipeline bounds are exact
        rows = np.stack([*columns, alone, np.unique(share, return_inverse=True)[1]], axis=1)
        return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)

    def refined(
        self, proof: Proof, trials: int, seed: int, goes_on: Callable[[], bool], say: Callable[[str], None]
    ) -> list[Refined]:
        """Moved cuts of the fastest candidates with several stages, where they could be faster than the best."""
        if proof.best is None or not trials:
            return []
        near = proof.best.value * (1 + NEARLY)
        staged = [i for i, one in self.exact.items() if one.fits and one.seconds <= near and one.degrees.num_stages > 1]
        if not staged:
            return []

        def price(index: int, moved: tuple[int, int]) -> Priced:
            degrees = self.candidates.degrees(index)
            return priced(self.works[degrees.tp], degrees, self.cluster, self.on, moved=moved)

        say(f"moving cuts of {min(len(staged), MOST_REFINED)} plans")
        order = sorted(staged, key=lambda i: (self.exact[i].seconds, i))
        return refine(
            order[:MOST_REFINED],
            price,
            trials=trials,
            capacity_bytes=self.on.capacity_bytes,
            seed=seed,
            goes_on=goes_on,
        )

    def result(self, proof: Proof, refined: Sequence[Refined]) -> Searched:
        return Searched(
            candidates=self.candidates,
            screened=Screened(**self.columns),
            exact=self.exact,
            proof=proof,
            baselines=self.baselines,
            refined=tuple(refined),
            refused=self.refused,
        )
