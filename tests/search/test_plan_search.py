"""The search against full enumeration, its bounds against exact prices, and what it says of what does not fit."""

from dataclasses import replace
from itertools import product

import pytest
from search_cases import Case

from autopar.search.exact import Priced, priced
from autopar.search.plan_search import Searched, search_degrees
from autopar.search.screen import screen
from autopar.search.space import candidates, wishes

CLUSTERS = (("4xh100", 4), ("2xv100-32gb", 4), ("3xh100", 6))
MEMORIES = (80e9, 20e6, 10e6, 5e6)  # from room for everything to none for any
CASES = tuple(
    Case(model=model, cluster=cluster, global_batch=batch, tokens=tokens, memory_bytes=memory)
    for (cluster, batch), memory, (model, tokens) in product(
        CLUSTERS, MEMORIES, (("llama", 16), ("llama", 512), ("gpt2", 128))
    )
)

LARGER = tuple(
    replace(case, cluster=cluster, global_batch=batch)
    for case, (cluster, batch) in product(CASES[:12], (("6xa100-80gb", 6), ("8xa100-80gb", 16), ("7xh100", 14)))
)


def enumerated(case: Case) -> list[Priced]:
    """Every candidate, priced exactly."""
    found, on = candidates(case.limits, wishes()), case.on
    return [priced(case.works(int(found.tp[i])), found.degrees(i), case.spec, on) for i in range(len(found))]


def searched(case: Case, most: int = 10_000) -> Searched:
    return search_degrees(case.works, case.spec, case.limits, wishes(), case.on, most_exact=most)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_plan_is_better_than_the_one_found(case: Case) -> None:
    found = searched(case)
    assert found.proof.is_proven
    fits = [one.seconds for one in enumerated(case) if one.fits]
    if not fits:
        assert found.best is None
        return
    assert found.best is not None
    assert found.best.fits
    assert found.best.seconds == min(fits)
    assert len(found.exact) < len(found.candidates)


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGER, ids=str)
def test_no_plan_is_better_on_more_devices(case: Case) -> None:
    test_no_plan_is_better_than_the_one_found(case)


SHARED = replace(CASES[1], ranks_per_core=2.0)


@pytest.mark.parametrize("case", (*CASES[::3], SHARED), ids=str)
def test_bounds_are_bounds(case: Case) -> None:
    found = candidates(case.limits, wishes())
    for tp in set(found.tp.tolist()):
        mine = found.at(found.tp == tp)
        bounds = screen(case.works(tp), mine, case.on)
        for i in range(0, len(mine), 5):
            one = priced(case.works(tp), mine.degrees(i), case.spec, case.on)
            if one.fits:
                assert bounds.seconds[i] <= one.seconds * (1 + 1e-9), mine.degrees(i)
            least = priced(case.works(tp), mine.degrees(i), case.spec, case.on, least_memory=True)
            held = min(bounds.without_bytes[i], bounds.recomputed_bytes[i])
            assert held <= least.needed_bytes * (1 + 1e-9), mine.degrees(i)
