"""Plans that are priced only: bounds and best plans against full enumeration, and their marks."""

import pytest
from search_cases import Case

from autopar.search.bounds.lower_bounds import Beyond, Machinery, screen
from autopar.search.driver.priced_only import combinations, constraints_of, machinery_of, search_beyond
from autopar.search.pricing.exact import Priced, priced
from autopar.search.pricing.objective import Goal, Part
from autopar.search.space.candidates import candidates
from autopar.search.space.constraints import Constraints

FORBID = {"schedule": ("gpipe", "interleaved-1f1b", "interleaved-zero-bubble", "dualpipev"), "zero": 1}


def case_of(memory_bytes: float) -> tuple[Case, Machinery]:
    case = Case(model="mixtral", cluster="4xh100", global_batch=4, tokens=256, memory_bytes=memory_bytes)
    return case, case.on


def narrowed(case: Case) -> Constraints:
    return case.constraints.narrowed(forbid=FORBID)


def enumerated(case: Case, on: Machinery, beyond: Beyond) -> list[tuple[Priced, float]]:
    """Every candidate with its exact price and its bound."""
    own, machine = constraints_of(narrowed(case), case.spec), machinery_of(on, beyond)
    every = candidates(own)
    found = []
    for tp in set(every.tp.tolist()):
        mine = every.at(every.tp == tp)
        bounds = screen(case.works(tp), mine, machine).seconds
        for i, bound in enumerate(bounds.tolist()):
            found.append((priced(case.works(tp), mine.degrees(i), machine), bound))
    return found


@pytest.mark.parametrize("memory_bytes", [80e9, 20e6, 15e6])
def test_no_plan_beyond_is_better_than_the_one_found(memory_bytes: float) -> None:
    case, on = case_of(memory_bytes)
    goal = Goal(objective="time", parts={4: Part(cluster=case.spec, on=on, weight=1.0)})
    found = search_beyond(case.works, case.spec, narrowed(case), goal, most_exact=10_000)
    seconds = []
    for beyond in combinations(case.works(1), case.spec):
        for one, bound in enumerated(case, on, beyond):
            if one.fits:
                assert bound <= one.seconds * (1 + 1e-9), (beyond, one.degrees)
                seconds.append(one.seconds)
    assert {one.ep for one in combinations(case.works(1), case.spec)} == {2, 4}
    assert found is not None
    assert found.value == found.bound == min(seconds)
    assert found.formula_only(case.spec)
