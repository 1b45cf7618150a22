"""The record of a search in its study: every exact price, the best bound of every other combination, each once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import Any

import optuna
import pytest
from optuna.importance import get_param_importances
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from search_cases import Case
from searched_models import BATCH, model, tokens
from suites import long

import autopar
from autopar.errors import InputError
from autopar.search.driver import recorded
from autopar.search.driver.recorded import COMBINATION, record
from autopar.search.driver.search import SearchState, search_degrees
from autopar.search.driver.study import CUTS, NAME, StudyPlace, study_place
from autopar.search.pricing.batch import Together
from autopar.search.pricing.exact import AS_IT_IS
from autopar.search.space.dimensions import DIMENSIONS, WORDS

CASE = Case(model="llama", cluster="8xh100", global_batch=16, tokens=4096, memory_bytes=1e9)
QUESTION = {"model": "llama", "global_batch": 16}


@cache
def searched(memory_bytes: float = CASE.memory_bytes) -> SearchState:
    case = Case(model="llama", cluster="8xh100", global_batch=16, tokens=4096, memory_bytes=memory_bytes)
    return search_degrees(case.works, case.spec, case.constraints, case.on, most_exact=400)


def place_of(where: Path) -> StudyPlace:
    return study_place(where, QUESTION)


def trials_in(where: Path, name: str = NAME) -> list[FrozenTrial]:
    """The trials as Optuna reads them without autopar."""
    return alone(where, name).trials


def alone(where: Path, name: str = NAME) -> optuna.Study:
    if where.suffix == ".db":
        return optuna.load_study(study_name=name, storage=f"sqlite:///{where}")
    return optuna.load_study(study_name=name, storage=optuna.storages.JournalStorage(JournalFileBackend(str(where))))


def combination_of(one: FrozenTrial) -> tuple[Any, ...]:
    return tuple(one.params[word] for word in COMBINATION)


def values_by_combination(found: SearchState) -> dict[tuple[int, ...], list[float]]:
    """The exact values of the fitting candidates of every combination, and none if no candidate fits."""
    c = found.candidates
    together = Together(c, {split: CASE.works(*split) for split in c.splits()}, found.goal)
    together.price([(index, AS_IT_IS) for index in range(len(c))])
    values: dict[tuple[int, ...], list[float]] = {}
    for index in range(len(c)):
        one = together.priced(index)
        mine = values.setdefault(tuple(int(getattr(c, word)[index]) for word in COMBINATION), [])
        mine += [found.goal.value(one)] if one.fits else []
    return values


def of(source: str, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    return [one for one in trials if one.user_attrs["source"] == source]


@pytest.mark.parametrize("name", ("plan.log", long("plan.db")))
def test_every_price_is_a_trial(tmp_path: Path, name: str) -> None:
    found, where = searched(), tmp_path / name
    record(found, place_of(where))
    told = of("priced", trials_in(where))
    others = [one for (i, cut), one in found.together.found.items() if cut == AS_IT_IS and i not in found.exact]
    prices = [*found.exact.values(), *others]
    assert len(prices) > 10
    assert [one.number for one in told] == list(range(len(prices)))
    for trial, one in zip(told, prices, strict=True):
        degrees = {each.word: each.value_of(one.degrees) for each in DIMENSIONS}
        assert trial.params == degrees | {"recompute": one.degrees.recompute}
        assert trial.state == TrialState.COMPLETE
        assert trial.value == found.goal.value(one)
        assert trial.constraints == {"missing_bytes": one.peak_bytes - CASE.on.capacity_bytes}
        about = {key: trial.user_attrs[key] for key in ("step_s", "peak_bytes", "fits")}
        assert about == {"step_s": one.seconds, "peak_bytes": one.peak_bytes, "fits": one.fits}


def test_bounds_are_below_every_price_of_their_combination(tmp_path: Path) -> None:
    found, where = searched(), tmp_path / "plan.log"
    record(found, place_of(where))
    trials, values = trials_in(where), values_by_combination(found)
    bounds, prices = of("bound", trials), of("priced", trials)
    assert {one.state for one in bounds} == {TrialState.PRUNED}
    assert all(one.user_attrs["bound"] is True for one in bounds)
    assert len(bounds) == len({combination_of(one) for one in bounds}) > 10
    assert not {combination_of(one) for one in bounds} & {combination_of(one) for one in prices}
    assert {combination_of(one) for one in trials} == set(values)
    for one in bounds:
        least = min(values[combination_of(one)], default=float("inf"))
        assert one.intermediate_values.get(0, float("inf")) <= least * (1 + 1e-9)
        assert one.user_attrs["fits"] == (0 in one.intermediate_values)
    for one in prices:
        least = min(values[combination_of(one)], default=float("inf"))
        assert one.user_attrs["best_bound"] <= least * (1 + 1e-9)
    best = min(value for one in values.values() for value in one)
    told = [one.intermediate_values[0] for one in bounds if one.intermediate_values]
    assert min(told) >= best * (1 - 1e-9)  # the proof: what was not priced is not better


@pytest.mark.parametrize("name", ("plan.log", long("plan.db")))
def test_optuna_reads_how_much_each_degree_decides(tmp_path: Path, name: str) -> None:
    found, where = searched(), tmp_path / name
    told = record(found, place_of(where))
    study = alone(where)
    shares = get_param_importances(study)
    assert {"tp", "pp", "dp", "zero", "micro_batch", "schedule"} <= set(shares) == {*WORDS, "recompute"}
    assert shares == pytest.approx(dict(told)) and sum(shares.values()) == pytest.approx(1)
    assert found.proof.best is not None
    assert study.best_value == found.proof.best.value
    assert study.user_attrs["left_out"] == {"priced": 0, "bound": 0}


@pytest.mark.parametrize("name", ("plan.log", long("plan.db")))
def test_a_second_search_adds_nothing(tmp_path: Path, name: str) -> None:
    found, where = searched(), tmp_path / name
    first = record(found, place_of(where))
    trials = trials_in(where)
    content = where.read_bytes()
    assert record(found, place_of(where)) == first
    assert trials_in(where) == trials
    assert where.read_bytes() == content
    assert [one.name for one in tmp_path.iterdir()] == [name]  # no lock is left


@pytest.mark.parametrize("name", ("plan.log", long("plan.db"), long("sqlite:///{}/plan.db")))
def test_two_at_once_write_each_trial_once(tmp_path: Path, name: str) -> None:
    found, both = searched(), Barrier(2)
    where = name.format(tmp_path) if "://" in name else str(tmp_path / name)

    def write() -> None:
        place = study_place(where, QUESTION)
        both.wait()
        record(found, place)

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(write) for _ in range(2)]:
            one.result()
    record(found, place_of(tmp_path / "alone.log"))
    told = [str((one.state, one.params)) for one in trials_in(tmp_path / name.rsplit("/", maxsplit=1)[-1])]
    assert len(told) == len(set(told))
    assert told == [str((one.state, one.params)) for one in trials_in(tmp_path / "alone.log")]


def test_a_study_stays_small_and_counts_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = searched()
    record(found, place_of(tmp_path / "all.log"))
    every = trials_in(tmp_path / "all.log")
    prices, bounds = of("priced", every), of("bound", every)
    for most in (8, len(prices) + 3):
        where = tmp_path / f"{most}.log"
        monkeypatch.setattr(recorded, "MOST_TRIALS", most)
        record(found, place_of(where))
        kept = trials_in(where)
        assert len(kept) == most
        left_out = {"priced": max(0, len(prices) - most), "bound": len(bounds) - max(0, most - len(prices))}
        assert alone(where).user_attrs["left_out"] == left_out
        assert found.proof.best is not None
        assert alone(where).best_value == found.proof.best.value
        assert {one.value for one in kept} <= {one.value for one in every}
    told = [one.intermediate_values[0] for one in of("bound", kept)]
    assert told == sorted(one.intermediate_values[0] for one in bounds if one.intermediate_values)[:3]


def test_few_prices_decide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_TRIALS", recorded.FEWEST - 1)
    assert record(searched(), place_of(tmp_path / "plan.log")) == {}


def test_what_cannot_fit_has_no_bound(tmp_path: Path) -> None:
    where = tmp_path / "plan.log"
    assert record(searched(1e3), place_of(where)) == {}
    told = trials_in(where)
    assert told and {one.user_attrs["source"] for one in told} == {"bound"}
    assert not any(one.user_attrs["fits"] or one.intermediate_values for one in told)


def test_another_search_is_refused(tmp_path: Path) -> None:
    where = tmp_path / "plan.log"
    record(searched(), place_of(where))
    content = where.read_bytes()
    with pytest.raises(InputError, match="global_batch: the study was made with 16; got 8"):
        record(searched(), study_place(where, {**QUESTION, "global_batch": 8}))
    assert where.read_bytes() == content


def test_a_plan_with_a_study_has_importances_of_degrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: Any = {"example_inputs": tokens(), "global_batch": BATCH, "fix": {"pp": 2}, "trials": 6}
    without = autopar.plan(model(), "8xh100", **asked)
    assert set(without.importance) <= {"candidate", "out_of_first", "out_of_last"}
    assert not list(tmp_path.iterdir())
    where = tmp_path / "plan.log"
    found = autopar.plan(model(), "8xh100", **asked, study=where)
    assert {"tp", "pp", "dp", "zero"} <= set(found.importance)
    assert found.importance == pytest.approx(get_param_importances(alone(where)))
    assert len(of("priced", trials_in(where))) >= found.counted.priced
    assert [one.params for one in found.trials] == [one.params for one in trials_in(where, CUTS)]
    content = len(trials_in(where))
    again = autopar.plan(model(), "8xh100", **asked, study=where)
    assert len(trials_in(where)) == content
    assert again.importance == found.importance
