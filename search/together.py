"""Exact prices of candidates by their position, priced together with those that are likely to be asked for next."""

from collections.abc import Mapping, Sequence

from autopar.cost_model.program_works import ProgramWorks
from autopar.search.exact import Prepared, Priced
from autopar.search.objective import Goal
from autopar.search.space import Candidates

NONE = (0, 0)


class Together:
    """Prices of candidates under a goal; `works` are those of labels by tensor degree."""

    def __init__(self, candidates: Candidates, works: Mapping[int, ProgramWorks], goal: Goal) -> None:
        self.candidates, self.works, self.goal = candidates, works, goal
        self.prepared: dict[int, tuple[Prepared, int]] = {}  # with which others, and its position among them
        self.found: dict[int, Priced] = {}

    def priced(self, index: int, moved: tuple[int, int] = NONE) -> Priced:
        """One candidate as it would run on the devices that it uses, so many blocks moved out of its end stages."""
        if moved == NONE and index in self.found:
            return self.found[index]
        self._prepare([index])
        prepared, position = self.prepared[index]
        return prepared.priced({position: moved})[position]

    def price(self, indices: Sequence[int]) -> None:
        """Price several that are likely to be asked for."""
        for group in self._prepare(indices):
            prepared = self.prepared[group[0]][0]
            prices = prepared.priced(dict.fromkeys(range(len(group)), NONE))
            self.found |= {index: prices[position] for position, index in enumerate(group)}

    def _prepare(self, indices: Sequence[int]) -> list[list[int]]:
        """Price the blocks of those that are new, together where labels and devices are the same."""
        groups: dict[tuple[int, int, bool], list[int]] = {}
        for index in indices:
            if index not in self.prepared:
                c = self.candidates
                key = int(c.num_devices[index]), int(c.tp[index]), bool(c.pp[index] * c.virtual[index] > 1)
                groups.setdefault(key, []).append(index)
        for (devices, tp, _), group in groups.items():
            part, degrees = self.goal.parts[devices], [self.candidates.degrees(index) for index in group]
            found = Prepared(self.works[tp], degrees, part.cluster, part.on, least_memory=self.goal.is_memory)
            self.prepared |= {index: (found, position) for position, index in enumerate(group)}
        return list(groups.values())
