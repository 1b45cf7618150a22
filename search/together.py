"""Exact prices of candidates by their position, priced together with those that are likely to be asked for next."""

from collections.abc import Mapping, Sequence

from autopar.cost_model.program_works import ProgramWorks
from autopar.search.exact import AS_IT_IS, Cut, Prepared, Priced
from autopar.search.objective import Goal
from autopar.search.space import Candidates

Varied = tuple[int, Cut]  # a candidate, and how it is cut


class Together:
    """Prices of candidates under a goal; `works` are those of labels by tensor degree."""

    def __init__(self, candidates: Candidates, works: Mapping[int, ProgramWorks], goal: Goal) -> None:
        self.candidates, self.works, self.goal = candidates, works, goal
        self.devices = candidates.num_devices
        self.found: dict[Varied, Priced] = {}

    def priced(self, index: int, cut: Cut = AS_IT_IS) -> Priced:
        """One candidate as it would run on the devices that it uses."""
        self.price([(index, cut)])
        return self.found[index, cut]

    def price(self, wanted: Sequence[Varied]) -> None:
        """Price several that are likely to be asked for: together where labels and devices are the same."""
        groups: dict[tuple[int, int, bool], list[Varied]] = {}
        for one in dict.fromkeys(wanted):
            if one not in self.found:
                c, index = self.candidates, one[0]
                key = int(self.devices[index]), int(c.tp[index]), bool(c.pp[index] * c.virtual[index] > 1)
                groups.setdefault(key, []).append(one)
        for (devices, tp, _), group in groups.items():
            part, degrees = self.goal.parts[devices], [self.candidates.degrees(index) for index, _ in group]
            prepared = Prepared(self.works[tp], degrees, part.cluster, part.on, least_memory=self.goal.is_memory)
            prices = prepared.priced({position: cut for position, (_, cut) in enumerate(group)})
            self.found |= {one: prices[position] for position, one in enumerate(group)}
