"""Exact prices of candidates. Candidates that are likely to be needed next are priced in the same call."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.memo import Memo
from autopar.search.bounds.lower_bounds import layouts_of
from autopar.search.pricing.exact import AS_IT_IS, Cut, PlanPricer, PricedPlan
from autopar.search.pricing.objective import Goal, Part
from autopar.search.space.candidates import Candidates, Split

_Index = NDArray[np.intp]
Varied = tuple[int, Cut]  # a candidate, and how it is cut


class Together:
    """Prices of candidates under a goal. `works` has the block costs under the labels of each split.

    `found` is the table of the prices so far. `memo` has everything that several prices share.
    """

    def __init__(
        self, candidates: Candidates, works: Mapping[Split, ProgramWorks], goal: Goal, memo: Memo | None = None
    ) -> None:
        self.candidates, self.works, self.goal = candidates, works, goal
        self.devices = candidates.num_devices
        self.found: dict[Varied, PricedPlan] = {}
        self.memo = Memo() if memo is None else memo

    def priced(self, index: int, cut: Cut = AS_IT_IS) -> PricedPlan:
        """The price of one candidate as it would run, on the devices that it uses."""
        self.price([(index, cut)])
        return self.found[index, cut]

    def price(self, wanted: Sequence[Varied]) -> None:
        """Price several candidates. Candidates with the same labels and devices are priced together."""
        groups: dict[tuple[int, Split, bool], list[Varied]] = {}
        for varied in dict.fromkeys(wanted):
            if varied not in self.found:
                c, index = self.candidates, varied[0]
                key = int(self.devices[index]), c.split(index), bool(c.pp[index] * c.virtual[index] > 1)
                groups.setdefault(key, []).append(varied)
        for (devices, split, _), group in groups.items():
            part, is_memory = self.goal.parts[devices], self.goal.is_memory
            mine, prepared = self.memo(
                _prepared, self.candidates, devices, split, self.works[split], part, is_memory, self.memo
            )
            places = np.searchsorted(mine, [index for index, _ in group]).tolist()
            prices = prepared.priced([(place, cut) for place, (_, cut) in zip(places, group, strict=True)])
            self.found |= dict(zip(group, prices, strict=True))


def _prepared(
    c: Candidates, devices: int, split: Split, works: ProgramWorks, part: Part, least_memory: bool, memo: Memo
) -> tuple[_Index, PlanPricer]:
    """All candidates of one split on one number of devices, and the object that prices them."""
    mine = c.among(split, c.num_devices == devices)
    layouts = layouts_of(c.at(mine), sequence_parallel=works.sequence_parallel)
    return mine, PlanPricer(
        works, layouts, lambda place: c.degrees(int(mine[place])), part.on, memo, least_memory=least_memory
    )
