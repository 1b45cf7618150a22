"""The search against full enumeration, its bounds against exact prices, and candidates that do not fit."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from search_cases import Case
from suites import thinned

from autopar.ir.rank_order import ORDERS
from autopar.search.bounds import lower_bounds
from autopar.search.bounds.lower_bounds import Screening, screen
from autopar.search.driver.search import SearchState, search_degrees, stand_in
from autopar.search.pricing.exact import PricedPlan, priced
from autopar.search.space.candidates import Split, candidates

CLUSTERS = (("4xh100", 4), ("2xv100-32gb", 4), ("3xh100", 6))
MEMORIES = (80e9, 20e6, 10e6, 5e6)  # from room for everything to none for any
CASES = tuple(
    Case(model=model, cluster=cluster, global_batch=batch, tokens=tokens, memory_bytes=memory)
    for (cluster, batch), memory, (model, tokens) in product(
        CLUSTERS, MEMORIES, (("llama", 16), ("llama", 512), ("gpt2", 128))
    )
)

# hosts linked slowly, beside stages that recompute: where pipeline ranks inside data-parallel ones are faster
IN_HOSTS = (
    Case(model="gpt2", cluster="4xh100", per_host=2, gigabits=4, global_batch=8, tokens=512, memory_bytes=18e6),
    Case(model="gpt2", cluster="6xh100", per_host=2, gigabits=200, global_batch=6, tokens=2048),
)
LARGER_IN_HOSTS = (
    Case(model="gpt2", cluster="8xh100", per_host=4, gigabits=20, global_batch=16, tokens=128, memory_bytes=10e6),
    Case(model="llama", cluster="8xh100", per_host=2, gigabits=2, global_batch=16, tokens=512, memory_bytes=20e6),
    Case(model="llama", cluster="6xh100", per_host=3, gigabits=40, global_batch=6, tokens=128),
)

# blocks recompute some operators, all operators or none
SELECTIVE = tuple(replace(case, selective=True) for case in CASES if case.memory_bytes < 80e9)

# sequences may be split over context ranks
CONTEXT = tuple(
    replace(case, context_degrees=(1, 2, 4), tokens=tokens, global_batch=batch)
    for case in CASES[:6:2]
    for tokens, batch in ((512, 4), (8192, 2), (65536, 1))
)

# experts may be split
EXPERTS = tuple(
    Case(
        model="mixtral",
        cluster=cluster,
        per_host=per_host,
        gigabits=40,
        global_batch=batch,
        tokens=tokens,
        memory_bytes=memory,
        expert_degrees=(1, 2, 4),
        context_degrees=(1, 2) if tokens > 4096 else (1,),
    )
    for cluster, per_host, batch, tokens, memory in (
        ("4xh100", None, 8, 512, 80e9),
        ("4xh100", 2, 8, 4096, 80e9),
        ("4xh100", None, 4, 8192, 60e6),
        ("8xh100", 4, 16, 1024, 40e6),
        ("8xh100", 2, 8, 128, 80e9),
    )
)

LARGER = tuple(
    replace(case, cluster=cluster, global_batch=batch)
    for case, (cluster, batch) in product(CASES[:12], (("6xa100-80gb", 6), ("8xa100-80gb", 16), ("7xh100", 14)))
)


def enumerated(case: Case) -> list[PricedPlan]:
    """Every candidate, priced exactly."""
    found, on = candidates(case.constraints), case.on
    return [priced(case.works(*found.split(i)), found.degrees(i), on) for i in range(len(found))]


def searched(case: Case, most: int = 10_000) -> SearchState:
    return search_degrees(case.works, case.spec, case.constraints, case.on, most_exact=most)


@pytest.mark.parametrize(
    "case",
    thinned(
        (*CASES, *SELECTIVE, *CONTEXT, *EXPERTS), keep=(*CASES[4::12], *SELECTIVE[1::13], CONTEXT[4], *EXPERTS[:1])
    ),
    ids=str,
)
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


@pytest.mark.long
@pytest.mark.parametrize("case", LARGER, ids=str)
def test_no_plan_is_better_on_more_devices(case: Case) -> None:
    test_no_plan_is_better_than_the_one_found(case)


def both_orders(case: Case) -> tuple[list[PricedPlan], list[PricedPlan]]:
    """Every candidate in the default order, and each in the other one, listed or not, or as it is where that is it."""
    found, on = candidates(case.constraints.narrowed({"order": ORDERS[0]})), case.on
    sides: tuple[list[PricedPlan], list[PricedPlan]] = ([], [])
    for i in range(len(found)):
        degrees = found.degrees(i)
        other = replace(degrees, order=ORDERS[1]) if degrees.pp > 1 and degrees.dp > 1 else degrees
        for side, one in zip(sides, (degrees, other), strict=True):
            side.append(priced(case.works(degrees.tp), one, on))
    return sides


@pytest.mark.parametrize("case", thinned(IN_HOSTS, keep=IN_HOSTS[1:]), ids=str)
def test_no_order_of_ranks_is_better_than_the_one_found(case: Case) -> None:
    """Whether candidates of the other order are listed or not."""
    found = searched(case)
    assert found.proof.is_proven
    assert found.best is not None and found.best.degrees.order == ORDERS[1]
    sides = both_orders(case)
    default, other = ([one.seconds for one in side if one.fits] for side in sides)
    assert found.best.seconds == min(other) < min(default)
    check_not_listed(case, *sides)


def check_not_listed(case: Case, default: list[PricedPlan], other: list[PricedPlan]) -> None:
    """What is not listed is no faster, and needs as much memory."""
    listed = candidates(case.constraints)
    known = {listed.degrees(i) for i in range(len(listed))}
    left_out = 0
    for one, moved in zip(default, other, strict=True):
        assert one.peak_bytes == moved.peak_bytes
        if replace(moved.degrees, recompute="none", recompute_blocks=None) not in known:
            left_out += 1
            assert moved.seconds >= one.seconds
    assert left_out or case.spec.num_hosts == 2  # in whose hosts every pipeline beside another fits


@pytest.mark.long
@pytest.mark.parametrize("case", LARGER_IN_HOSTS, ids=str)
def test_orders_of_ranks_on_more_devices(case: Case) -> None:
    found, sides = searched(case), both_orders(case)
    assert found.best is not None
    assert found.best.seconds == min(one.seconds for side in sides for one in side if one.fits)
    check_not_listed(case, *sides)
    test_bounds_are_bounds(case)


SHARED = replace(CASES[1], ranks_per_core=2.0)


@pytest.mark.parametrize(
    "case",
    thinned(
        (*CASES[::3], *SELECTIVE[::2], *IN_HOSTS, LARGER_IN_HOSTS[0], SHARED),
        keep=(*CASES[::9], *SELECTIVE[::8], IN_HOSTS[1], LARGER_IN_HOSTS[0], SHARED),
    ),
    ids=str,
)
def test_bounds_are_bounds(case: Case) -> None:
    found = candidates(case.constraints)
    for tp in set(found.tp.tolist()):
        mine = found.at(found.tp == tp)
        bounds = screen(case.works(tp), mine, case.on)
        for i in range(0, len(mine), 5):
            one = priced(case.works(tp), mine.degrees(i), case.on)
            if one.fits:
                assert bounds.seconds[i] <= one.seconds * (1 + 1e-9), mine.degrees(i)
            least = priced(case.works(tp), mine.degrees(i), case.on, least_memory=True)
            held = min(bounds.without_bytes[i], bounds.recomputed_bytes[i])
            assert held <= least.peak_bytes * (1 + 1e-9), mine.degrees(i)


def test_screening_in_parts_gives_the_same_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    found = candidates(case.constraints)
    mine = found.at(found.tp == 2)
    whole = screen(case.works(2), mine, case.on)
    monkeypatch.setattr(lower_bounds, "_PART", 7)
    parts = screen(case.works(2), mine, case.on)
    assert len(mine) > 7
    for name in Screening.__slots__:
        assert np.allclose(getattr(parts, name), getattr(whole, name), rtol=1e-12), name


def test_a_stand_in_has_the_expert_degree_if_it_is_labelled() -> None:
    labelled = (Split(1), Split(2), Split(1, 1, 4), Split(2, 2), Split(1, 2, 8))
    assert stand_in(Split(1, 2, 4), labelled) == Split(1, 1, 4)
    assert stand_in(Split(8, 2, 4), labelled) == Split(2)  # no expert ranks with several tensor ranks
    assert stand_in(Split(1, 4, 8), labelled) == Split(1)  # a stand-in has no context ranks
    assert stand_in(Split(4, 2), (Split(1), Split(2, 2))) is None
