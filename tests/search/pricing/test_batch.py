"""Candidates that are priced together have exactly the prices that each has alone."""

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray
from search_cases import Case

from autopar.search.pricing.batch import Together
from autopar.search.pricing.exact import AS_IT_IS, BY_STAGE, Cut, Priced, priced
from autopar.search.pricing.objective import Goal, Part
from autopar.search.space.candidates import candidates

CASES = (
    Case(model="llama", cluster="8xh100", global_batch=16, tokens=512, memory_bytes=20e6, per_host=2),
    Case(model="gpt2", cluster="6xh100", global_batch=12, tokens=128, memory_bytes=10e6, ranks_per_core=2.0),
)


def plain(values: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    return {name: float(np.max(value)) for name, value in values.items()}


def numbers(one: Priced) -> tuple[object, ...]:
    parts = (plain(each) for each in (one.step.parts, one.step.hidden, one.memory.parts))
    return (one.degrees, one.cuts, one.seconds, one.needed_bytes, one.fits, one.pipelines, *parts)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prices_are_those_of_each_alone(case: Case) -> None:
    found, on = candidates(case.constraints.narrowed({"tp": (1, 2)})), case.on
    works = {tp: case.works(tp) for tp in (1, 2)}
    goal = Goal(objective="time", parts={case.spec.num_devices: Part(cluster=case.spec, on=on, weight=1.0)})
    together = Together(found, works, goal)
    wanted = [
        (index, cut)
        for index in range(0, len(found), max(1, len(found) // 40))
        for cut in (AS_IT_IS, BY_STAGE, Cut(out_of_first=1, out_of_last=-1, by_stage=True))
    ]
    together.price(wanted)
    assert any(together.priced(*one).degrees.recompute == "full" for one in wanted)
    for index, cut in wanted:
        alone = priced(works[int(found.tp[index])], found.degrees(index), case.spec, on, cut=cut)
        assert numbers(together.priced(index, cut)) == numbers(alone), (found.text(index), cut)
