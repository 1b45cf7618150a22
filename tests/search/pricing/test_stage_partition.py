"""The best partition of calls into pipeline stages, against all partitions."""

import random
from itertools import combinations, pairwise

import pytest

from autopar.errors import PlanError
from autopar.search.pricing.stage_partition import partition


def sums(weights: list[float], cuts: tuple[int, ...]) -> list[float]:
    return [sum(weights[a:b]) for a, b in pairwise((0, *cuts, len(weights)))]


@pytest.mark.parametrize("seed", range(60))
def test_the_best_partition(seed: int) -> None:
    """Against all partitions: the largest sum is least, and the others as even as that allows."""
    draw = random.Random(seed)
    weights = [float(draw.choice((0, 1, 1, 2, 3, 9))) for _ in range(draw.randint(2, 9))]
    anchors = [draw.random() < 0.8 for _ in weights]
    parts = draw.randint(1, len(weights))
    legal = [
        (max(found), sum(s * s for s in found))
        for cuts in combinations(range(1, len(weights)), parts - 1)
        if all(any(anchors[a:b]) for a, b in pairwise((0, *cuts, len(weights))))
        for found in [sums(weights, cuts)]
    ]
    if not legal:
        with pytest.raises(PlanError, match="cannot be cut"):
            partition(weights, parts, can_be_alone=anchors)
        return
    cuts = partition(weights, parts, can_be_alone=anchors)
    assert all(any(anchors[a:b]) for a, b in pairwise((0, *cuts, len(weights))))
    found = sums(weights, cuts)
    assert max(found) == pytest.approx(min(legal)[0])
    assert len(found) == parts


def test_large_vocabularies_make_uneven_stages() -> None:
    """A projection as heavy as three layers: the last of four stages has one layer, as its work is that of four."""
    weights = [0.1, *[1.0] * 12, 3.0]
    assert sums(weights, partition(weights, 4)) == pytest.approx([3.1, 4.0, 4.0, 4.0])


@pytest.mark.parametrize(("blocks", "parts"), [(34, 16), (30, 8)])
def test_rounding_decides_no_cut(blocks: int, parts: int) -> None:
    """Equal layers have many even partitions. Processors round differently, and choose the same one."""
    draw = random.Random(0)
    weights = [0.3, *[0.1] * blocks, 0.4]
    cuts = partition(weights, parts)
    for _ in range(20):
        assert partition([w * (1 + draw.choice((-2e-16, 0, 2e-16))) for w in weights], parts) == cuts
