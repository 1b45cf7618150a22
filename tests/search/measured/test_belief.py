"""What measured plans say of the others, and when measuring ends."""

from collections.abc import Mapping
from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from autopar.search.measured.belief import (
    ALIKE,
    COMMON,
    OWN,
    Belief,
    belief,
    chances,
    expected_gains,
    worth_measuring,
)

seconds = st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6)


def degrees(count: int) -> NDArray[np.float64]:
    """Plans that are the less alike the farther their numbers are apart."""
    return np.array([[2.0**n, 8.0] for n in range(count)])


def after(predicted: list[float], measured: Mapping[int, float]) -> Belief:
    return belief(predicted, degrees(len(predicted)), measured)


@given(seconds)
def test_without_a_measurement_it_is_the_prediction(predicted: list[float]) -> None:
    found = after(predicted, {})
    assert found.seconds == pytest.approx(predicted)
    assert found.deviation == pytest.approx(np.sqrt(COMMON**2 + ALIKE**2 + OWN**2))
    assert found.best_s == np.inf and worth_measuring(found)


def test_one_measurement_by_hand() -> None:
    """A plan of the same degrees follows by what both share, of all that the measured error may be."""
    shared = COMMON**2 + ALIKE**2
    part = shared / (shared + OWN**2)
    found = belief([1.0, 2.0], np.array([[4.0, 2.0], [4.0, 2.0]]), {0: 1.5})
    assert found.seconds == pytest.approx([1.5, 2 * exp(part * log(1.5))])
    assert found.deviation == pytest.approx([0.0, np.sqrt(shared + OWN**2 - part * shared)])
    assert found.is_measured.tolist() == [True, False]


@given(seconds, st.floats(0.5, 2.0))
def test_plans_of_similar_degrees_follow_more(predicted: list[float], ratio: float) -> None:
    found = after(predicted, {0: ratio * predicted[0]})
    moved = np.abs(np.log(found.seconds / predicted))[1:]
    assert np.all(np.diff(moved) <= 1e-12)
    assert np.all(moved <= abs(log(ratio)) + 1e-12)


@given(seconds, st.data())
def test_more_is_known_after_each_measurement(predicted: list[float], data: st.DataObject) -> None:
    measured: dict[int, float] = {}
    before = after(predicted, measured).deviation
    for at in data.draw(st.permutations(range(len(predicted)))):
        measured[at] = predicted[at] * data.draw(st.floats(0.5, 2.0))
        found = after(predicted, measured)
        assert np.all(found.deviation <= before + 1e-9)
        assert found.best_s == pytest.approx(min(measured.values()))
        before = found.deviation
    assert not worth_measuring(found)
    assert not np.any(chances(found)) and not np.any(expected_gains(found))


@given(seconds)
def test_the_order_of_measurements_does_not_count(predicted: list[float]) -> None:
    measured = {at: 1.1 * predicted[at] for at in range(len(predicted) - 1)}
    found, again = after(predicted, measured), after(predicted, dict(reversed(measured.items())))
    assert found.mean == pytest.approx(again.mean) and found.deviation == pytest.approx(again.deviation)


def test_a_common_factor_keeps_the_order_and_the_chances() -> None:
    """All plans take twice as long as predicted: what is left to gain is as if none did."""
    predicted = [1.0, 1.05, 1.2, 1.6]
    usual, slow = (after(predicted, {0: factor * predicted[0]}) for factor in (1.0, 2.0))
    assert np.argmin(usual.mean[1:]) == np.argmin(slow.mean[1:]) == 0
    assert chances(usual)[1] < chances(slow)[1]  # a part of the factor may be of the measured plan alone


def test_a_plan_that_is_predicted_far_slower_is_not_worth_a_measurement() -> None:
    assert not worth_measuring(after([1.0, 3.0], {0: 1.0}))
    assert worth_measuring(after([1.0, 1.05], {0: 1.0}))
    unlike = np.array([[1.0, 8.0], [256.0, 1.0]])  # what is slow about the first may not be of the second
    assert worth_measuring(belief([1.0, 3.0], unlike, {0: 4.0}))
    assert not worth_measuring(belief([1.0, 3.0], degrees(2), {0: 4.0}))


def test_the_expected_gain_is_the_mean_of_draws() -> None:
    found = after([1.0, 1.02, 1.3], {0: 1.0})
    draws = np.random.default_rng(0).normal(found.mean, found.deviation, (400_000, 3))
    saved = np.maximum(0.0, 1 - np.exp(draws) / found.best_s).mean(axis=0)
    assert expected_gains(found)[1:] == pytest.approx(saved[1:], abs=2e-3)
    faster = (np.exp(draws) < 0.98 * found.best_s).mean(axis=0)
    assert chances(found)[1:] == pytest.approx(faster[1:], abs=5e-3)
