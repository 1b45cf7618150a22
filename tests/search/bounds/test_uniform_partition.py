"""Cuts in closed form against the dynamic programme over the same weights."""

import random
from itertools import pairwise

import numpy as np
import pytest

from autopar.search.bounds.uniform_partition import even_cuts
from autopar.search.pricing.stage_partition import partition


@pytest.mark.parametrize("seed", range(200))
def test_the_slowest_stage_is_that_of_the_best_partition(seed: int) -> None:
    draw = random.Random(seed)
    blocks, block = draw.randint(2, 40), draw.uniform(0.5, 2)
    stages = draw.randint(1, blocks + 2)
    first, last = draw.uniform(0, 3), draw.uniform(0, 5)
    weights = [first, *[block] * blocks, last]
    cuts = partition(weights, stages)
    largest = max(sum(weights[a:b]) for a, b in pairwise((0, *cuts, len(weights))))
    found = even_cuts(*(np.array([float(n)]) for n in (blocks, stages, block, first, last)))
    assert found.largest[0] == pytest.approx(largest)
    assert found.first[0] + found.last[0] <= blocks * (2 if stages == 1 else 1)
    middle = blocks - found.first[0] - found.last[0]
    if stages > 2:
        assert found.least[0] * (stages - 2) <= middle <= found.most[0] * (stages - 2)


def test_more_stages_than_blocks_cannot_be() -> None:
    found = even_cuts(*(np.array([float(n)]) for n in (4, 8, 1.0, 0.1, 2.0)))
    assert np.isinf(found.largest[0])
