"""The check of a search's result passes what searches find, and names every fault that is planted in it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from search_cases import Case
from work import lines_run

from autopar.errors import SearchError
from autopar.ir.plan import Plan
from autopar.search.driver.check import check_result
from autopar.search.driver.search import SearchState, search_degrees
from autopar.search.pricing.exact import PricedPlan
from autopar.search.space.dimensions import Constraints

STAGED = Case(model="llama", cluster="4xh100", global_batch=8, tokens=512, memory_bytes=20e6)
RECOMPUTING = replace(STAGED, memory_bytes=10e6)
ALONE = replace(STAGED, cluster="8xa100-80gb", global_batch=16, memory_bytes=80e9)
FIXED = {STAGED: {"pp": 2}, RECOMPUTING: {"pp": 2}, ALONE: {"pp": 1}}


def searched(case: Case, trials: int = 0) -> tuple[SearchState, Constraints]:
    narrowed = case.constraints.narrowed(FIXED[case])
    return search_degrees(case.works, case.spec, narrowed, case.on, most_exact=1000, trials=trials), narrowed


def plan_of(found: SearchState) -> Plan:
    best = found.best
    assert best is not None
    batch = best.degrees.dp * (best.degrees.micro_batch or 0)
    return Plan(fingerprint="", model="", degrees=best.degrees, blocks=(), cuts=best.cuts, batch=batch)


def check(case: Case, found: SearchState, narrowed: Constraints, plan: Plan | None = None, **changes: Any) -> None:
    best = found.best
    assert best is not None
    works = case.works(best.degrees.tp)
    check_result(found, plan or plan_of(found), works, replace(narrowed, **changes))


@pytest.mark.parametrize("case", FIXED, ids=str)
def test_what_a_search_finds_passes(case: Case) -> None:
    found, narrowed = searched(case, trials=8)
    check(case, found, narrowed)
    assert lines_run(lambda: check(case, found, narrowed)) < lines_run(lambda: searched(case, trials=8)) / 5


def with_best(
    found: SearchState, *, moved: bool = False, degrees: dict[str, Any] | None = None, **fields: Any
) -> SearchState:
    """The search with something else in its best price."""
    assert found.proof.best is not None
    index = found.proof.best.index
    best = found.exact[index]
    other = replace(best, degrees=replace(best.degrees, **(degrees or {})), **fields)
    if moved:
        return replace(found, refined=replace(found.refined, best=other))
    return replace(found, exact={**found.exact, index: other})


def worse(found: SearchState, best: PricedPlan) -> SearchState:
    """The search with a plan as its best that is not the best."""
    others = [one for one in found.proof.priced if one.value != best.seconds]
    alone = min(others, key=lambda one: one.value)
    return replace(found, proof=replace(found.proof, priced=(alone,)))


Fault = Callable[[SearchState, PricedPlan], SearchState]
PLANTED: dict[str, Fault] = {
    "degrees": lambda found, best: with_best(found, degrees={"dp_shard": 2 * best.degrees.dp_shard}),
    "global_batch": lambda found, best: with_best(found, degrees={"micro_batches": 3 * best.degrees.micro_batches}),
    "virtual_stages": lambda found, _: with_best(found, degrees={"schedule": "gpipe", "virtual_stages": 2}),
    "schedule": lambda found, _: with_best(found, degrees={"schedule": "backwards"}),
    "cuts.*without a block": lambda found, best: with_best(found, cuts=(*best.cuts[:-1], best.cuts[0])),
    "cuts.*one between any two": lambda found, best: with_best(found, cuts=(*best.cuts, best.cuts[-1] + 1)),
    "seconds": lambda found, best: with_best(found, seconds=best.seconds * (1 - 1e-6)),
    "seconds.*nan": lambda found, _: with_best(found, seconds=float("nan")),
    "peak_bytes": lambda found, best: with_best(found, peak_bytes=best.peak_bytes * 0.999),
    "must fit": lambda found, _: with_best(found, fits=False),
    "bound": lambda found, _: replace(found, proof=replace(found.proof, bound=found.proof.bound * 1.01)),
    "value": worse,
    "pp: is not among the values that were asked for": lambda found, _: with_best(
        found, degrees={"pp": 1, "dp_shard": 4}
    ),
}


@pytest.fixture(scope="module")
def staged() -> tuple[SearchState, Constraints]:
    return searched(STAGED)


@pytest.mark.parametrize("said", PLANTED)
def test_planted_faults_are_named(staged: tuple[SearchState, Constraints], said: str) -> None:
    found, narrowed = staged
    best = found.best
    assert best is not None
    with pytest.raises(SearchError, match=f"(?s)bug in autopar.*{said}"):
        check(STAGED, PLANTED[said](found, best), narrowed)


def test_a_moved_plan_is_checked_too(staged: tuple[SearchState, Constraints]) -> None:
    found, narrowed = staged
    assert found.best is not None
    faster = with_best(found, moved=True, seconds=found.best.seconds / 2)
    with pytest.raises(SearchError, match="seconds"):
        check(STAGED, faster, narrowed)


def test_memory_is_counted_on_the_devices(staged: tuple[SearchState, Constraints]) -> None:
    found, narrowed = staged
    small = replace(found.goal.parts[4], on=RECOMPUTING.on)
    with pytest.raises(SearchError, match="must fit"):
        check(STAGED, replace(found, goal=replace(found.goal, parts={4: small})), narrowed)


def test_the_plan_handed_out_is_the_one_that_was_priced(staged: tuple[SearchState, Constraints]) -> None:
    found, narrowed = staged
    plan = plan_of(found)
    recompute = "none" if plan.degrees.recompute == "full" else "full"
    changed = replace(plan, degrees=replace(plan.degrees, recompute=recompute), batch=1000, cuts=(1, 2, 3))
    with pytest.raises(SearchError) as raised:
        check(STAGED, found, narrowed, changed)
    assert {one.path for one in raised.value.problems} == {"plan.degrees.recompute", "plan.batch", "plan.cuts"}


def test_a_batch_that_cannot_be_split_in_time(staged: tuple[SearchState, Constraints]) -> None:
    found, narrowed = staged
    with pytest.raises(SearchError, match="would change the loss"):
        check(STAGED, found, narrowed, accumulates=False)
