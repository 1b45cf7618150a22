"""Candidates that are priced together have exactly the prices that each has alone."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from search_cases import Case

from autopar.memo import Memo
from autopar.search.pricing.batch import Together
from autopar.search.pricing.exact import AS_IT_IS, BY_STAGE, Cut, PricedPlan, priced
from autopar.search.pricing.objective import Goal, Part
from autopar.search.space.candidates import Split, candidates

CASES = (
    Case(model="llama", cluster="8xh100", global_batch=16, tokens=512, memory_bytes=20e6, per_host=2),
    Case(model="gpt2", cluster="6xh100", global_batch=12, tokens=128, memory_bytes=10e6, ranks_per_core=2.0),
)


def plain(values: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    return {name: float(np.max(value)) for name, value in values.items()}


def numbers(one: PricedPlan) -> tuple[object, ...]:
    parts = (plain(each) for each in (one.step.parts, one.step.hidden, one.memory.parts))
    return (one.degrees, one.cuts, one.seconds, one.peak_bytes, one.fits, one.pipelines, *parts)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prices_are_those_of_each_alone(case: Case) -> None:
    found, on = candidates(case.constraints.narrowed({"tp": (1, 2)})), case.on
    works = {Split(tp): case.works(tp) for tp in (1, 2)}
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
        alone = priced(works[found.split(index)], found.degrees(index), on, cut=cut)
        assert numbers(together.priced(index, cut)) == numbers(alone), (found.text(index), cut)


def test_searches_that_share_a_memo_get_their_own_prices() -> None:
    """Other links, another memory, other labels, another goal: each is an input of the memo's keys."""
    memo, told = Memo(), []
    for case in CASES[0], replace(CASES[0], memory_bytes=40e6), replace(CASES[0], per_host=8):
        found, on, works = candidates(case.constraints.narrowed({"tp": (1, 2)})), case.on, case.works
        for objective in ("time", "memory"):
            for second in (works(2), replace(works(2), regather=False)):
                labels = {Split(1): works(1), Split(2): second}
                goal = Goal(objective=objective, parts={8: Part(cluster=case.spec, on=on, weight=1.0)})
                wanted = [(index, BY_STAGE) for index in range(0, len(found), max(1, len(found) // 20))]
                shared, alone = (Together(found, labels, goal, each) for each in (memo, Memo()))
                prices = [numbers(shared.priced(*one)) for one in wanted]
                assert prices == [numbers(alone.priced(*one)) for one in wanted]
                told.append(prices)
    assert len({str(prices) for prices in told}) > 3
