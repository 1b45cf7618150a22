"""The Optuna study of a measured search: outcomes come back, processes share it, and lost trials are tried again."""

import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import pytest

from autopar.search.driver.study import StudyPlace, study_place
from autopar.search.measured.rounds import Spread
from autopar.search.measured.study import OWNER, Owner, TrialStudy, outcome_from, outcome_to_dict, params_of
from autopar.search.measured.tuning import Candidate, Outcome

PLANS = [
    Candidate(
        degrees={"tp": tp, "zero": zero, "schedule": schedule, "cuts": [1, 2]},
        predicted_s=1.0 + tp,
        predicted_bytes=1e9,
        terms={"compute": 1.0 + tp},
        num_devices=4,
    )
    for tp, zero, schedule in ((1, 3, "1f1b"), (2, 0, "gpipe"), (4, 1, "1f1b"))
]
DONE = Outcome(state="complete", seconds=Spread(median=2.0, low=1.5, high=2.5), peak_bytes=3e9, steps=10)
SLOWER = Outcome(state="pruned", seconds=Spread(median=3.0, low=2.5, high=3.5), steps=6)
OOM = Outcome(state="failed", reason="oom", message="CUDA out of memory")


def place(folder: Path, name: str = "tune.log") -> StudyPlace:
    return study_place(folder / name, {"model": "m"})


def study(where: StudyPlace | None, plans: Any = PLANS) -> TrialStudy:
    return TrialStudy(plans, where, objective="time", tokens=100)


def finish(of: TrialStudy, at: int, outcome: Outcome) -> int:
    claim = of.claim(at, within_s=60)
    assert claim is not None and claim.candidate == at
    of.finish(claim, outcome)
    return claim.number


@pytest.mark.parametrize("name", ["tune.log", "tune.db"])
def test_a_later_process_sees_outcomes_and_candidates(name: str, tmp_path: Path) -> None:
    first = study(place(tmp_path, name))
    numbers = {at: finish(first, at, outcome) for at, outcome in enumerate((DONE, SLOWER, OOM))}
    later = study(place(tmp_path, name), [])
    assert list(later.candidates) == PLANS
    assert later.outcomes() == {0: DONE, 1: SLOWER, 2: OOM}
    assert later.numbers() == numbers
    states = [one.state.name for one in later.study.get_trials()]
    assert states == ["COMPLETE", "PRUNED", "FAIL"]


def test_optuna_has_values_parameters_and_the_constraint(tmp_path: Path) -> None:
    kept = study(place(tmp_path))
    finish(kept, 2, OOM)
    finish(kept, 0, DONE)
    failed, done = kept.study.get_trials()
    assert (done.value, done.params) == (2.0, {"tp": 1, "zero": 3, "schedule": "1f1b", "cuts": "[1, 2]"})
    assert done.user_attrs["tokens_per_s"] == 50
    assert "CUDA out of memory" in failed.user_attrs["outcome"]["message"]
    assert kept.study.best_trial.number == done.number
    assert (failed.constraints, done.constraints) == ({"memory": 1.0}, {"memory": -1.0})


def test_two_processes_never_get_the_same_plan(tmp_path: Path) -> None:
    one, other = study(place(tmp_path)), study(place(tmp_path))
    claim = one.claim(0, within_s=60)
    assert claim is not None
    assert other.taken() == (0,)
    assert other.claim(0, within_s=60) is None  # it is being measured
    second = other.claim(1, within_s=60)
    assert second is not None and second.candidate == 1
    one.finish(claim, DONE)
    other.finish(second, SLOWER)
    assert one.outcomes() == other.outcomes() == {0: DONE, 1: SLOWER}
    assert one.taken() == ()


def test_a_plan_that_another_process_has_queued_is_taken_from_the_queue(tmp_path: Path) -> None:
    one, other = study(place(tmp_path)), study(place(tmp_path))
    one.study.enqueue_trial({"tp": 2, "zero": 0, "schedule": "gpipe", "cuts": "[1, 2]"}, user_attrs=about(1))
    claim = other.claim(0, within_s=60)
    assert claim is not None and claim.candidate == 1
    mine = one.claim(1, within_s=60)  # takes plan 0, which is waiting
    assert mine is not None and mine.candidate == 0


def about(at: int) -> dict[str, Any]:
    return {"degrees": json.dumps(dict(PLANS[at].degrees), sort_keys=True)}


def test_a_plan_that_another_process_takes_at_this_moment_is_taken(tmp_path: Path) -> None:
    """The other process has its trial, and has not written its name into it yet."""
    other, kept = study(place(tmp_path)), study(place(tmp_path))
    other.study.enqueue_trial(params_of(PLANS[0].degrees), user_attrs=about(0))
    number = other.study.ask(other.space()).number
    assert kept.taken() == (0,) and kept.claim(0, within_s=60) is None
    now = time.time()
    with mock.patch.object(time, "time", lambda: now + 60):  # it died before it wrote
        claim = kept.claim(0, within_s=60)
    assert claim is not None and claim.number > number


def test_a_trial_whose_process_is_gone_is_tried_again(tmp_path: Path) -> None:
    kept = study(place(tmp_path))
    claim = kept.claim(0, within_s=60)
    assert claim is not None
    gone = Owner(host=os.uname().nodename, pid=2**22 - 1, until=time.time() + 60)
    kept._claimed[claim.number].set_user_attr(OWNER, {"host": gone.host, "pid": gone.pid, "until": gone.until})
    assert not gone.is_alive
    later = study(place(tmp_path))
    assert later.taken() == () and later.outcomes() == {}
    assert finish(later, 0, DONE) > claim.number
    assert later.outcomes() == {0: DONE}


def test_another_hosts_trial_is_given_up_after_its_deadline() -> None:
    assert Owner(host="elsewhere", pid=1, until=time.time() + 60).is_alive
    assert not Owner(host="elsewhere", pid=1, until=time.time() - 60).is_alive


def test_an_interrupted_trial_is_no_answer(tmp_path: Path) -> None:
    kept = study(place(tmp_path))
    finish(kept, 0, Outcome(state="failed", reason="interrupted", message="SIGINT"))
    assert kept.outcomes() == {}
    finish(kept, 0, DONE)
    assert kept.outcomes() == {0: DONE}


def test_a_study_in_memory_needs_no_place() -> None:
    kept = study(None)
    finish(kept, 1, DONE)
    assert kept.outcomes() == {1: DONE}


def test_outcomes_are_plain_data() -> None:
    few = Outcome(state="complete", seconds=Spread(median=1.0, low=0.0, high=float("inf")))
    for one in (DONE, SLOWER, OOM, few):
        assert outcome_from(outcome_to_dict(one)) == one
    optuna.logging.set_verbosity(optuna.logging.WARNING)
