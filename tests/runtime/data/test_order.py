"""Orders are permutations, equal on every machine, and as random as they should be."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.data.order import SampleOrder

NUMBERS = st.integers(0, 2**63 - 1)


@given(length=st.integers(1, 3000), seed=NUMBERS, epoch=st.integers(0, 10**6), shuffle=st.booleans())
def test_an_order_has_every_sample_once(length: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = SampleOrder(length=length, seed=seed, epoch=epoch, shuffle=shuffle)
    every = order.at(range(length)).tolist()
    assert sorted(every) == list(range(length))
    assert [order.at([place]).item() for place in range(0, length, 97)] == every[::97]
    assert shuffle or every == list(range(length))


def test_orders_are_equal_on_every_machine() -> None:
    """These numbers never change: a position that was saved years ago is a position in this order."""
    assert SampleOrder(length=10, seed=0, epoch=0).at(range(10)).tolist() == [8, 0, 6, 1, 4, 2, 3, 7, 9, 5]
    far = SampleOrder(length=10**12, seed=7, epoch=3).at([0, 1, 10**12 - 1])
    assert far.tolist() == [
        852827587948,
        12485625466,
        817221442850,
    ]


def test_every_permutation_is_about_as_frequent() -> None:
    """240 seeds over the 24 permutations of 4 samples: χ² with 23 degrees of freedom is below 49.7 in 99.9 %."""
    found = Counter(tuple(SampleOrder(length=4, seed=s, epoch=0).at(range(4)).tolist()) for s in range(240))
    assert len(found) == 24
    assert sum((count - 10) ** 2 / 10 for count in found.values()) < 49.7


def test_every_place_is_about_as_frequent() -> None:
    """1,000 epochs of 50 samples: χ² with 49² degrees of freedom is below 2,619 in 99.9 %."""
    counts = np.zeros((50, 50))
    for epoch in range(1000):
        counts[np.arange(50), SampleOrder(length=50, seed=1, epoch=epoch).at(range(50))] += 1
    assert float(((counts - 20) ** 2 / 20).sum()) < 2619


@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}])
def test_seed_and_epoch_decide(other: dict[str, int]) -> None:
    first = SampleOrder(length=1000, seed=0, epoch=0).at(range(1000))
    second = SampleOrder(length=1000, **{"seed": 0, "epoch": 0, **other}).at(range(1000))
    assert int((first == second).sum()) < 12  # one in expectation
