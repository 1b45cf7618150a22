"""The median of rounds and its interval."""

from math import inf

import numpy as np
import pytest

from autopar.search.measured.rounds import median_interval, rank_of_interval


def test_the_interval_has_the_median_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    for count in (6, 10, 15):
        found = [median_interval(generator.exponential(size=count).tolist()) for _ in range(2000)]
        inside = np.mean([one.low <= np.log(2) <= one.high for one in found])
        assert 0.94 < inside < 1


def test_few_rounds_have_no_interval() -> None:
    assert [rank_of_interval(count) for count in (1, 5, 6, 8, 9, 12)] == [None, None, 0, 0, 1, 2]
    assert (median_interval([1.0, 2.0, 3.0]).low, median_interval([1.0, 2.0, 3.0]).high) == (0.0, inf)


def test_a_spread_scales() -> None:
    found = median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).times(10.0)
    assert (found.median, found.low, found.high) == pytest.approx((35.0, 10.0, 60.0))
