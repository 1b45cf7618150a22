"""Studies that are kept: they go on where they stopped, are shared, answer one question, and run no code."""

import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
import study_worker
from optuna.distributions import IntDistribution
from optuna.storages.journal import JournalFileBackend
from study_worker import QUESTION, STARTS, refined
from suites import long

from autopar.errors import InputError
from autopar.search.driver.study import CANDIDATES, CUTS, NAME, next_trial, study_place

TEXTS = [one.text for one in STARTS]
PLACES = ("plan.log", "plan.journal", "plan.db", "sqlite:///{}/plan.sqlite")


def at(folder: Path, name: str) -> str:
    return name.format(folder) if "://" in name else str(folder / name)


@pytest.mark.parametrize("name", (long("plan.log"), "sqlite:///{}/plan.sqlite"))
def test_a_search_goes_on_where_it_stopped(tmp_path: Path, name: str) -> None:
    where = at(tmp_path, name)
    first: list[str] = []
    half = refined(where, 6, 0, first)
    assert {one.source for one in half.trials} == {"enqueued: FSDP", "sampled", "enumerated"}
    assert len(set(first)) == len(first) == 6
    again: list[str] = []
    same = refined(where, 6, 0, again)
    assert len(again) <= 1  # the best, for its price
    assert [one.number for one in same.trials] == [one.number for one in half.trials]
    assert {one.source for one in same.trials} == {"resumed"}
    more: list[str] = []
    whole = refined(where, 8, 0, more)
    assert whole.trials[: len(half.trials)] == same.trials
    assert not set(first) & set(more[:2])
    assert whole.best is not None
    assert half.best is not None
    assert whole.best.seconds <= half.best.seconds


@pytest.mark.parametrize("name", ("plan.log", "plan.db"))
def test_no_two_processes_get_the_same_trial(tmp_path: Path, name: str) -> None:
    place, space, count = study_place(tmp_path / name, QUESTION), {"x": IntDistribution(0, 99)}, 30
    for x in range(count):
        place.opened(TEXTS)[0].enqueue_trial({"x": x})
    with ThreadPoolExecutor(3) as pool:  # with a connection each
        opened = [place.opened(TEXTS)[0] for _ in range(3)]
        taken = pool.map(lambda k: next_trial(opened[k % 3], space, place).params["x"], range(count))
    assert sorted(taken) == list(range(count))


@pytest.mark.parametrize("name", ("plan.log", long("plan.db")))
def test_two_processes_share_one(tmp_path: Path, name: str) -> None:
    where, trials = str(tmp_path / name), 16
    command = [sys.executable, study_worker.__file__, where, str(trials)]
    both = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for seed in (0, 0)
    ]
    printed = [one.communicate()[0].split("\n") for one in both]
    assert [one.returncode for one in both] == [0, 0]
    bests = {line for lines in printed for line in lines if line.startswith("best")}
    priced = [line for lines in printed for line in lines if line and not line.startswith("best")]
    told = study_place(where, QUESTION).opened(TEXTS, CUTS)[0].trials
    assert all(one.state.name == "COMPLETE" for one in told)
    assert [one.number for one in told] == list(range(len(told)))
    different = {str(one.params) for one in told}
    assert trials <= len(different) <= trials + 1  # both may begin the last one; a repeated one is followed by another
    for own in ([line for line in lines if line in priced] for lines in printed):
        assert len(own) <= len(set(own)) + 1  # nothing twice but the best
    assert len(priced) <= len(different) + trials // 2  # what both began at once: samplers like the same ones
    assert min(len(lines) for lines in printed) > 2  # a price of each, the best and the end: neither did all
    known = sorted(float(line.split()[1]) for line in bests)
    after = refined(where, trials, 0, []).best
    assert after is not None
    assert known[0] == pytest.approx(after.seconds)  # one that ends before the other's last trial may have another


def test_a_study_of_another_question_is_refused(tmp_path: Path) -> None:
    where = str(tmp_path / "plan.log")
    refined(where, 3, 0, [])
    with pytest.raises(InputError, match="is of another search") as caught:
        study_place(where, {**QUESTION, "global_batch": 16, "sequence": 4}).opened(TEXTS)
    assert "global_batch: the study was made with 8; got 16" in str(caught.value)
    assert "sequence" in str(caught.value)
    assert "name a new file" in str(caught.value)
    assert "model" not in str(caught.value).split(":", 1)[1]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("plan.pkl", "a journal"),
        ("redis://localhost/0", "pickled"),
        ("nowhere/plan.log", "no folder"),
        ("notadatabase://x/y", "cannot be used"),
    ],
)
def test_what_is_no_study_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        study_place(where, QUESTION).opened(TEXTS)


class _Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("name", ("plan.log", "plan.db"))
def test_hostile_files_run_nothing(tmp_path: Path, name: str) -> None:
    made = tmp_path / "made"
    where = tmp_path / name
    where.write_bytes(pickle.dumps(_Payload(made)) + b"\n")
    with pytest.raises(InputError, match="cannot be used"):
        study_place(str(where), QUESTION).opened(TEXTS)
    assert not made.exists()


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    where = tmp_path / "plan.log"
    before = refined(str(where), 5, 0, []).trials
    whole = where.read_bytes()
    where.write_bytes(whole + b'{"op_code": 4, "worker')
    assert len(refined(str(where), 5, 0, []).trials) == len(before)
    assert where.read_bytes() == whole


def test_a_trial_of_a_process_that_died_does_not_count(tmp_path: Path) -> None:
    where = tmp_path / "plan.log"
    refined(str(where), 5, 0, [])
    study = study_place(str(where), QUESTION).opened(TEXTS, CUTS)[0]
    study.ask()
    lines = where.read_text().splitlines()
    last = json.loads(lines[-1])
    last["datetime_start"] = "2020-01-01T00:00:00.000000+00:00"
    where.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    priced: list[str] = []
    found = refined(str(where), 8, 0, priced)
    assert len({str(one.params) for one in found.trials}) == 8


@pytest.mark.parametrize("name", PLACES)
def test_a_dashboard_can_read_it(tmp_path: Path, name: str) -> None:
    """optuna-dashboard opens storages by Optuna's own classes, shows attributes as JSON and cuts them at 1,024."""
    where = at(tmp_path, name)
    refined(where, 6, 0, [])
    if name.endswith((".log", ".journal")):
        storage: optuna.storages.BaseStorage = optuna.storages.JournalStorage(JournalFileBackend(where))
    else:
        storage = optuna.storages.RDBStorage(where if "://" in where else f"sqlite:///{where}")
    study = optuna.load_study(study_name=NAME, storage=storage)
    assert json.loads(json.dumps(study.user_attrs)) == {**QUESTION, CANDIDATES: TEXTS}
    study = optuna.load_study(study_name=CUTS, storage=storage)
    assert study.best_trial.constraints["missing_bytes"] <= 0
    for one in study.trials:
        assert isinstance(one.value, float)
        assert len(json.dumps(one.user_attrs)) < 1024
        assert set(one.params) == {"candidate", "out_of_first", "out_of_last"}
