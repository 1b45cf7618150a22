"""Moved cuts: never slower than the start, the same for the same seed, and worth their trials."""

from dataclasses import replace
from functools import cache

from search_cases import Case

from autopar.search.driver.optuna_refine import Refinement, Start, refine
from autopar.search.driver.optuna_seeds import BEST
from autopar.search.driver.search import SearchState, search_degrees
from autopar.search.pricing.exact import Cut, PricedPlan, priced

CASE = Case(model="llama", cluster="4xh100", global_batch=8, tokens=4096, memory_bytes=1e9)


@cache
def searched(trials: int, seed: int = 0) -> SearchState:
    narrowed = CASE.constraints.narrowed({"pp": (2, 4)})
    return search_degrees(CASE.works, CASE.spec, narrowed, CASE.on, most_exact=400, trials=trials, seed=seed)


def test_no_slower_than_the_best_uniform_plan() -> None:
    found = searched(30)
    assert found.best is not None
    assert found.proof.best is not None
    assert found.best.seconds <= found.proof.best.value
    assert found.best.fits
    different = {str(one.params) for one in found.refined.trials}
    assert 10 < len(different) <= 30
    first = found.refined.trials[0]
    assert first.source == f"enqueued: {BEST}"
    assert first.params["out_of_first"] == first.params["out_of_last"] == 0
    assert found.candidates.index_of(first.params["candidate"]) == found.proof.best.index
    assert first.value == found.proof.best.value


def test_best_trial_is_what_is_priced() -> None:
    found = searched(30)
    fits = [one for one in found.refined.trials if one.missing_bytes is not None and one.missing_bytes <= 0]
    best = min(fits, key=lambda one: one.value or 0.0)
    degrees = found.candidates.degrees(found.candidates.index_of(best.params["candidate"]))
    moved = (best.params["out_of_first"], best.params["out_of_last"])
    again = priced(CASE.works(degrees.tp), degrees, CASE.on, cut=Cut(*moved, by_stage=True))
    assert found.refined.best is not None
    assert again.cuts == found.refined.best.cuts
    assert again.seconds == found.refined.best.seconds == best.value
    assert len(again.cuts) == degrees.num_stages - 1


def test_the_same_seed_tries_the_same() -> None:
    searched.cache_clear()
    first = searched(12, seed=3).refined.trials
    searched.cache_clear()
    assert searched(12, seed=3).refined.trials == first
    searched.cache_clear()
    assert searched(12, seed=4).refined.trials != first


def test_pipelines_of_other_kinds_are_tried() -> None:
    kinds = {one.params["candidate"] for one in searched(30).refined.trials}
    assert len({kind.split("schedule=")[1] for kind in kinds}) > 1


def test_no_trials_without_a_pipeline() -> None:
    found = search_degrees(
        CASE.works, CASE.spec, CASE.constraints.narrowed({"pp": 1}), CASE.on, most_exact=400, trials=20
    )
    assert found.refined.trials == ()


def test_what_does_not_fit_is_told_as_a_constraint() -> None:
    """Moves of all but the first candidate never fit: the sampler keeps to it, and nothing unfit is the best."""
    base = searched(30).best
    assert base is not None
    capacity = base.peak_bytes

    def price(index: int, moved: tuple[int, int]) -> PricedPlan:
        slower = 1 + 0.01 * (abs(moved[0] - 1) + abs(moved[1]))
        needed = capacity + (1e6 if index else 0.0)
        seconds = base.seconds * slower * (0.5 if index else 1.0)
        return replace(base, seconds=seconds, peak_bytes=needed, fits=index == 0)

    others = [Start(index=index, text=f"does not {index}") for index in range(1, 5)]  # more than can all be tried
    starts = [Start(index=0, text="fits", name=BEST), *others]
    found: Refinement = refine(starts, price, trials=40, capacity_bytes=capacity, seed=1)
    fitting = [one for one in found.trials if one.missing_bytes == 0]
    assert len(fitting) < len(found.trials)
    assert sum(one.missing_bytes == 0 for one in found.trials[20:]) > 10
    assert found.best is not None
    assert found.best.fits
    assert found.best.seconds <= base.seconds * 1.01
    assert sum(found.importance.values()) == 0 or abs(sum(found.importance.values()) - 1) < 1e-9


def test_few_variations_are_all_tried_once_and_priced_together() -> None:
    base = searched(30).best
    assert base is not None
    told: list[tuple[int, tuple[int, int]]] = []
    asked: list[tuple[int, tuple[int, int]]] = []

    def price(index: int, moved: tuple[int, int]) -> PricedPlan:
        asked.append((index, moved))
        return replace(base, seconds=base.seconds * (1.5 + index - 0.1 * moved[0] + 0.01 * moved[1]))

    starts = [Start(index=0, text="first", name=BEST), Start(index=1, text="as it is", name="FSDP", is_varied=False)]
    found = refine(starts, price, trials=40, capacity_bytes=base.peak_bytes, seed=1, prefetch=told.extend)
    assert len(found.trials) == 10
    assert (
        sorted(told) == sorted(asked) == sorted([(1, (0, 0)), *((0, (a, b)) for a in (-1, 0, 1) for b in (-1, 0, 1))])
    )
    assert [one.source for one in found.trials[:3]] == [f"enqueued: {BEST}", "enqueued: FSDP", "enumerated"]
    assert found.best is not None
    assert found.best.seconds == min(one.value or 0.0 for one in found.trials) == base.seconds * (1.5 - 0.1 - 0.01)
