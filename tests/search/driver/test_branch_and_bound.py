"""Best first: the best plan is found with few prices, and its proof is true."""

import random

import numpy as np
import pytest

from autopar.search.driver.branch_and_bound import Exact, best_first


def case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds, classes and true prices: within a class the price is the bound and what the class adds."""
    draw = np.random.default_rng(seed)
    size = int(draw.integers(1, 60))
    bounds, classes = draw.uniform(1, 2, size), draw.integers(0, 8, size)
    prices = bounds + draw.uniform(0, 1, 8)[classes] * draw.integers(0, 2)
    bounds[draw.uniform(size=size) < 0.2] = np.inf
    return bounds, classes, np.where(np.isfinite(bounds), prices, np.inf)


@pytest.mark.parametrize("seed", range(100))
def test_the_best_is_found_and_proven(seed: int) -> None:
    bounds, classes, prices = case(seed)
    asked: list[int] = []

    def price(index: int) -> float:
        asked.append(index)
        return float(prices[index])

    first = random.Random(seed).sample(range(len(bounds)), k=min(3, len(bounds)))
    found = best_first(bounds, classes, price, first=first, most=1000)
    assert found.is_proven
    assert found.gap == 0
    assert len(set(asked)) == len(asked)
    if np.isfinite(prices).any():
        assert found.best is not None
        assert found.best.value == prices.min()
    else:
        assert found.best is None


@pytest.mark.parametrize("seed", range(50))
def test_a_gap_is_never_smaller_than_it_is(seed: int) -> None:
    bounds, classes, prices = case(seed)
    found = best_first(bounds, classes, lambda index: float(prices[index]), most=2)
    if found.best is not None:
        assert found.best.value * (1 - found.gap) <= prices.min() * (1 + 1e-9)


def test_what_does_not_fit_after_all_is_no_proof() -> None:
    bounds, prices = np.array([1.0, 2.0, 3.0]), [np.inf, 2.5, 3.0]
    found = best_first(bounds, np.arange(3), lambda index: prices[index], most=10)
    assert [one.index for one in found.priced] == [0, 1]
    assert found.best is not None
    assert found.best.value == 2.5


def test_a_budget_ends_it() -> None:
    bounds = np.linspace(1, 2, 10)
    found = best_first(bounds, np.arange(10), lambda index: 5.0, most=3)
    assert len(found.priced) == 3
    assert not found.is_proven
    assert found.gap == pytest.approx(1 - bounds[3] / 5.0)


def test_out_of_time_there_is_still_a_plan() -> None:
    bounds, prices = np.array([1.0, 2.0, 3.0]), [np.inf, 2.5, 3.0]
    found = best_first(bounds, np.arange(3), lambda index: prices[index], most=10, should_continue=lambda: False)
    assert [one.index for one in found.priced] == [0, 1]
    assert found.best is not None
    assert not np.isfinite(found.priced[0].value)


def test_out_of_time_all_first_ones_are_compared() -> None:
    bounds, prices = np.array([1.0, 2.0, 3.0]), [4.0, 2.5, 3.0]
    first = {"first": (0, 1), "most": 10, "should_continue": lambda: False}
    found = best_first(bounds, np.arange(3), lambda index: prices[index], **first)  # type: ignore[arg-type]
    assert found.best == Exact(index=1, value=2.5)


def test_only_what_is_shared_holds_for_a_class() -> None:
    """The first of a class recomputes where the second does not: the second's bound must not rise by that."""
    bounds, prices = np.array([1.0, 1.1, 1.9]), [2.5, 1.2, 1.95]

    def found(shared: float) -> Exact | None:
        def added(index: int, alike: np.ndarray) -> np.ndarray:
            return np.full(len(alike), shared * (prices[index] - bounds[index]))

        return best_first(bounds, np.array([0, 0, 1]), prices.__getitem__, most=10, added=added).best

    assert found(0.0) == Exact(index=1, value=1.2)
    assert found(1.0) == Exact(index=2, value=1.95)
