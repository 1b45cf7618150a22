"""Exact prices of candidates. Candidates that are likely to be needed next are priced in the same call."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.search.bounds.lower_bounds import layouts_of
from autopar.search.pricing.exact import AS_IT_IS, Cut, Prepared, Priced
from autopar.search.pricing.objective import Goal
from autopar.search.space.candidates import Candidates

_Index = NDArray[np.intp]
Varied = tuple[int, Cut]  # a candidate, and how it is cut


class Together:
    """Prices of candidates under a goal. `works` has the block costs under the labels of each tensor degree."""

    def __init__(self, candidates: Candidates, works: Mapping[int, ProgramWorks], goal: Goal) -> None:
        self.candidates, self.works, self.goal = candidates, works, goal
        self.devices = candidates.num_devices
        self.found: dict[Varied, Priced] = {}
        self.prepared: dict[tuple[int, int], tuple[_Index, Prepared]] = {}

    def priced(self, index: int, cut: Cut = AS_IT_IS) -> Priced:
        """The price of one candidate as it would run, on the devices that it uses."""
        self.price([(index, cut)])
        return self.found[index, cut]

    def price(self, wanted: Sequence[Varied]) -> None:
        """Price several candidates. Candidates with the same labels and devices are priced together."""
        groups: dict[tuple[int, int, bool], list[Varied]] = {}
        for one in dict.fromkeys(wanted):
            if one not in self.found:
                c, index = self.candidates, one[0]
                key = int(self.devices[index]), int(c.tp[index]), bool(c.pp[index] * c.virtual[index] > 1)
                groups.setdefault(key, []).append(one)
        for (devices, tp, _), group in groups.items():
            mine, prepared = self._prepared(devices, tp)
            places = np.searchsorted(mine, [index for index, _ in group]).tolist()
            prices = prepared.priced([(place, cut) for place, (_, cut) in zip(places, group, strict=True)])
            self.found |= dict(zip(group, prices, strict=True))

    def _prepared(self, devices: int, tp: int) -> tuple[_Index, Prepared]:
        """All candidates of one tensor degree on one number of devices, and the object that prices them."""
        if (devices, tp) not in self.prepared:
            c, part, works = self.candidates, self.goal.parts[devices], self.works[tp]
            mine = np.flatnonzero((self.devices == devices) & (c.tp == tp))
            layouts = layouts_of(c.at(mine), sequence_parallel=works.sequence_parallel, beyond=part.on.beyond)
            self.prepared[devices, tp] = (
                mine,
                Prepared(
                    works,
                    layouts,
                    lambda place: c.degrees(int(mine[place])),
                    part.cluster,
                    part.on,
                    least_memory=self.goal.is_memory,
                ),
            )
        return self.prepared[devices, tp]
