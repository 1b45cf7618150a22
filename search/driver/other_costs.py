"""The candidates of a search under other block costs, such as those of a loss in chunks."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import AutoparError
from autopar.ir.arrays import Floats
from autopar.search.bounds.lower_bounds import Screening, screen
from autopar.search.driver.branch_and_bound import ROUNDING, Proof, best_first
from autopar.search.driver.search import SearchState, Works, added_values, stand_in
from autopar.search.pricing.batch import Together, Varied
from autopar.search.pricing.exact import AS_IT_IS, PricedPlan
from autopar.search.space.candidates import Split


class OtherCosts:
    """Those candidates of a mask that may beat the value `least` of the best plan under the costs of `works_of`."""

    def __init__(self, search: SearchState, works_of: Works, mask: NDArray[np.bool_], least: float) -> None:
        self.candidates, self.classes = search.candidates, search.members.classes
        self.goal, self.works_of, self.least = search.goal, works_of, least * (1 - ROUNDING)
        self.works: dict[Split, ProgramWorks] = {}
        self.refused = set(search.refused)
        self.together = Together(self.candidates, self.works, self.goal)
        self.columns = {name: np.full(len(self.candidates), np.inf) for name in Screening.__slots__}
        self.bounds = self._screened(mask, search.labelled)

    def _screened(self, mask: NDArray[np.bool_], labelled: Sequence[Split]) -> Floats:
        """Bounds of the candidates of a mask. A bound that is not below the least value is infinite."""
        c, bounds = self.candidates, np.full(len(self.candidates), np.inf)
        behind: dict[Split, ProgramWorks] = {}
        for split in (split for split in c.splits() if len(c.among(split, mask))):
            labels = split if split in labelled else stand_in(split, labelled)
            if labels is not None and self._can_price(labels):
                behind[split] = self.works[labels]
        for works in {id(works): works for works in behind.values()}.values():
            of_works = mask & c.of(*(split for split, shared in behind.items() if shared is works))
            for count, part in self.goal.parts.items():
                mine = np.flatnonzero(of_works & (c.num_devices == count))
                if len(mine):
                    screened = screen(works, c.at(mine), part.on)
                    bounds[mine] = self.goal.bounds(c.at(mine), screened)
                    for name, column in self.columns.items():
                        column[mine] = getattr(screened, name)
        return np.where(bounds < self.least, bounds, np.inf)

    def _can_price(self, split: Split) -> bool:
        """Whether a split has labels under which there are block costs."""
        if split not in self.works and split not in self.refused:
            try:
                self.works[split] = self.works_of(*split)
            except AutoparError:
                self.refused.add(split)
        return split in self.works

    def proof(self, most_exact: int, should_continue: Callable[[], bool]) -> Proof:
        """Price candidates until no bound is below the best value."""
        return best_first(
            self.bounds,
            self.classes,
            self._value,
            most=most_exact if should_continue() else 0,
            should_continue=should_continue,
            prefetch=lambda likely: self.price([(index, AS_IT_IS) for index in likely]),
            added=lambda index, peers: added_values(
                Screening(**self.columns), self.bounds, index, self.together.priced(index), peers
            ),
        )

    def price(self, wanted: Sequence[Varied]) -> None:
        """Price the wanted candidates whose split has labels."""
        self.together.price([varied for varied in wanted if self._can_price(self.candidates.split(varied[0]))])

    def _value(self, index: int) -> float:
        self.price([(index, AS_IT_IS)])
        plan = self.together.found.get((index, AS_IT_IS))
        return self.goal.value(plan) if plan is not None and plan.fits else np.inf

    @property
    def best(self) -> PricedPlan | None:
        """The best fitting plan. None if it is not below the least value."""
        fitting = [plan for plan in self.together.found.values() if plan.fits and self.goal.value(plan) < self.least]
        return min(fitting, key=self.goal.value, default=None)
