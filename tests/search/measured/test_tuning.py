"""What a measured search does next, and what it learns: decisions follow from candidates and outcomes alone."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.measured.rounds import Spread
from autopar.search.measured.tuning import Candidate, Outcome, best_of, decide, known_after

DEGREES = (
    {"tp": 1},
    {"tp": 2},
    {"tp": 4},
    {"pp": 2},
    {"pp": 4},
    {"tp": 2, "pp": 2},
    {"zero": 3},
    {"recompute": "full"},
)


def plans(*seconds: float, **more: Any) -> list[Candidate]:
    """Candidates of these predicted seconds. Half of the time of every second one is links."""
    return [
        Candidate(
            degrees=DEGREES[at % len(DEGREES)],
            predicted_s=one,
            predicted_bytes=1e9 * (at + 1),
            terms={"compute": one / (1 + at % 2), "in_host": one - one / (1 + at % 2)},
            num_devices=4,
            **more,
        )
        for at, one in enumerate(seconds)
    ]


def took(seconds: float, **more: Any) -> Outcome:
    return Outcome(state="complete", seconds=Spread(median=seconds, low=seconds, high=seconds), **more)


def failed(reason: Any) -> Outcome:
    return Outcome(state="failed", reason=reason, message="planted")


def test_the_predicted_best_comes_first_and_measured_plans_never_again() -> None:
    every, outcomes, order = plans(1.0, 1.01, 1.02, 1.03), {}, []
    while (found := decide(every, outcomes, most=10)).next is not None:
        order.append(found.next)
        outcomes[found.next] = took(every[found.next].predicted_s)
    assert order[0] == 0 and sorted(order) == [0, 1, 2, 3]
    assert found.is_settled


def test_a_plan_that_is_far_behind_is_not_measured() -> None:
    found = decide(plans(1.0, 5.0), {0: took(1.0)}, most=10)
    assert found.next is None and found.is_settled and "hardly pay" in found.why


def test_the_number_of_trials_and_the_time_end_a_search_that_is_not_settled() -> None:
    every = plans(1.0, 1.01, 1.02)
    done = decide(every, {0: took(1.0)}, most=1)
    late = decide(every, {0: took(1.0)}, most=9, is_late=True)
    assert (done.next, done.is_settled, done.why) == (None, False, "1 trials are done")
    assert (late.next, late.is_settled) == (None, False) and "time" in late.why


def test_out_of_memory_rules_out_what_needs_as_much() -> None:
    every = plans(1.0, 1.01, 1.02)  # they need 1, 2 and 3 GB
    known = known_after(every, {1: failed("oom")})
    assert set(known.ruled_out) == {1, 2} and "ran out of memory" in known.ruled_out[2]
    assert decide(every, {1: failed("oom")}, most=9).next == 0
    nothing = decide(every, {0: failed("oom")}, most=9)
    assert nothing.next is None and best_of(every, {0: failed("oom")}) is None


@pytest.mark.parametrize("reason", ["error", "timeout", "killed"])
def test_another_failure_rules_out_its_plan_alone(reason: str) -> None:
    every = plans(1.0, 1.01, 1.02)
    assert set(known_after(every, {0: failed(reason)}).ruled_out) == {0}
    assert decide(every, {0: failed(reason)}, most=9).next == 1


def test_slow_links_are_learnt_and_change_the_order() -> None:
    """Plans 1 and 3 wait for links. One of them takes twice the time, plan 0 takes what was predicted."""
    every = plans(1.0, 1.01, 1.1, 1.05)
    known = known_after(every, {0: took(1.0), 1: took(2.0)})
    assert known.factors["in_host"] > 1.5 > 1.2 > known.factors["compute"] > 1
    assert known.belief.seconds[2] < known.belief.seconds[3]


def test_learning_brings_predictions_of_the_others_nearer() -> None:
    """Plan by plan is left out: computing takes 1.5 times and links 3 times as long as predicted."""
    every = plans(1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
    truth = [1.5 * one.terms["compute"] + 3 * one.terms["in_host"] for one in every]
    before, after = [], []
    for at, real in enumerate(truth):
        others = {i: took(truth[i]) for i in range(len(every)) if i != at}
        believed = float(known_after(every, others).belief.seconds[at])
        before.append(abs(np.log(every[at].predicted_s / real)))
        after.append(abs(np.log(believed / real)))
    assert np.median(after) < 0.4 * np.median(before)  # a correction is shrunk


def test_memory_is_an_objective_of_its_own() -> None:
    every = plans(1.0, 0.5, 2.0)
    assert decide(every, {}, most=9, objective="memory").next == 0  # it needs 1 GB
    done = decide(every, {0: took(1.0, peak_bytes=1.0e9)}, most=9, objective="memory")
    assert done.next is None and done.is_settled
    more = decide(every, {0: took(1.0, peak_bytes=2.5e9)}, most=9, objective="memory")
    assert more.next == 1
    outcomes = {0: took(1.0, peak_bytes=2.5e9), 1: took(1.5, peak_bytes=2.2e9)}
    assert best_of(every, outcomes, "memory") == 1 and best_of(every, outcomes) == 0


def test_a_plan_that_another_process_measures_is_left_to_it() -> None:
    every = plans(1.0, 1.01)
    assert decide(every, {}, most=9, taken=[0]).next == 1
    waiting = decide(every, {}, most=9, taken=[0, 1])
    assert waiting.next is None and not waiting.is_settled and "another process" in waiting.why


@settings(deadline=None, max_examples=60)
@given(seconds=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8), seed=st.integers(0, 100))
def test_decisions_do_not_depend_on_the_order_of_outcomes(seconds: list[float], seed: int) -> None:
    every, generator = plans(*seconds), random.Random(seed)
    at = generator.sample(range(len(every)), k=max(1, len(every) // 2))
    outcomes = {i: took(generator.uniform(0.5, 2)) for i in at}
    turned = {i: outcomes[i] for i in reversed(at)}
    assert decide(every, outcomes, most=99) == decide(every, turned, most=99)
    found = decide(every, outcomes, most=99)
    assert found.next not in outcomes
