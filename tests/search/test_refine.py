"""Moved cuts: never slower than what they started from, the same for the same seed, and worth their trials."""

from functools import cache
from typing import Any

from search_cases import Case

from autopar.search.exact import Priced, priced
from autopar.search.plan_search import Searched, search_degrees
from autopar.search.refine import Refined, refine
from autopar.search.space import wishes

CASE = Case(model="llama", cluster="4xh100", global_batch=8, tokens=4096, memory_bytes=1e9)


@cache
def searched(trials: int, seed: int = 0) -> Searched:
    wanted = wishes({"pp": (2, 4)})
    return search_degrees(CASE.works, CASE.spec, CASE.limits, wanted, CASE.on, most_exact=400, trials=trials, seed=seed)


def test_no_slower_than_the_best_uniform_plan() -> None:
    found = searched(30)
    assert found.best is not None
    assert found.proof.best is not None
    assert found.best.seconds <= found.proof.best.value
    assert found.best.fits
    assert 0 < len(found.refined) <= 30
    assert found.refined[0].moved == (0, 0)
    assert found.refined[0].candidate == found.proof.best.index


def test_cuts_that_are_priced_are_those_of_the_plan() -> None:
    found = searched(30)
    one = min(found.refined, key=lambda one: one.priced.seconds)
    degrees = found.candidates.degrees(one.candidate)
    again = priced(CASE.works(degrees.tp), degrees, CASE.spec, CASE.on, moved=one.moved)
    assert again.cuts == one.priced.cuts
    assert again.seconds == one.priced.seconds
    assert len(again.cuts) == degrees.num_stages - 1


def test_the_same_seed_tries_the_same() -> None:
    def tried(found: Searched) -> list[Any]:
        return [(one.candidate, one.moved, one.priced.seconds) for one in found.refined]

    searched.cache_clear()
    first = tried(searched(12, seed=3))
    searched.cache_clear()
    assert tried(searched(12, seed=3)) == first


def test_no_trials_without_a_pipeline() -> None:
    found = search_degrees(CASE.works, CASE.spec, CASE.limits, wishes({"pp": 1}), CASE.on, most_exact=400, trials=20)
    assert found.refined == ()


def test_what_does_not_fit_is_told_as_a_constraint() -> None:
    """Moves of the second candidate never fit: the sampler keeps to the first, and nothing unfit is the best."""
    base = searched(30).best
    assert base is not None
    capacity = base.needed_bytes

    def price(index: int, moved: tuple[int, int]) -> Priced:
        slower = 1 + 0.01 * (abs(moved[0] - 1) + abs(moved[1]))
        needed = capacity + (1e6 if index == 1 else 0.0)
        fake: dict[str, Any] = {name: getattr(base, name) for name in Priced.__slots__}
        fake |= {"seconds": base.seconds * slower * (0.5 if index == 1 else 1.0), "needed_bytes": needed}
        return Priced(**fake | {"fits": index == 0})

    found: list[Refined] = refine([0, 1], price, trials=40, capacity_bytes=capacity, seed=1)
    fitting = [one for one in found if one.priced.fits]
    assert sum(one.priced.fits for one in found[20:]) > 10
    best = min(fitting, key=lambda one: one.priced.seconds)
    assert best.priced.seconds <= base.seconds * 1.01
    assert best.candidate == 0
    assert len(fitting) < len(found)
