"""The blocks that ranks hold at once, against action lists and the cuts of equal blocks."""

import random
from itertools import pairwise

import numpy as np
import pytest

from autopar.cost_model.pipeline.simulator import most_held
from autopar.ir.schedules.registry import SCHEDULE_NAMES, SCHEDULES
from autopar.search.bounds.in_flight import Pipelines, held_by_full
from autopar.search.bounds.uniform_partition import even_cuts
from autopar.search.pricing.stage_partition import partition


def _held(schedule: str, pp: int, v: int, n: int, cuts: tuple[int, ...], blocks: int) -> list[float]:
    """The most blocks that every rank holds at once, of equal blocks between two ends, which hold nothing."""
    own = [min(b, blocks + 1) - max(a, 1) for a, b in pairwise((0, *cuts, blocks + 2))]
    return [float(np.max(rows @ np.maximum(own, 0.0))) for rows in most_held(schedule, pp, v, n)]


def _full(schedule: str, pp: int, v: int, n: int, blocks: int, first: float, last: float) -> tuple[float, list[float]]:
    """The bound of the full rank, and what every rank holds under the cuts that make the slowest stage fastest."""
    one = [np.array([float(x)]) for x in (blocks, pp * v, 1.0, first, last)]
    cuts = even_cuts(*one)
    columns = {name: np.array([float(x)]) for name, x in (("pp", pp), ("virtual", v), ("micro_batches", n))}
    runs = Pipelines(
        schedule=np.array([SCHEDULE_NAMES.index(schedule)]),
        first=cuts.first, last=cuts.last, most=cuts.most, least=cuts.least, **columns,
    )  # fmt: skip
    exact = partition([first, *[1.0] * blocks, last], pp * v)
    return float(held_by_full(runs, one[0])[0]), _held(schedule, pp, v, n, exact, blocks)


@pytest.mark.parametrize("seed", range(150))
def test_some_rank_holds_as_much(seed: int) -> None:
    draw = random.Random(seed)
    kind = SCHEDULES[draw.choice(SCHEDULE_NAMES)]
    pp = draw.choice((2, 3, 4, 8))
    v = kind.least_stages if kind.most_stages is not None else draw.choice((1, 2, 3))
    n = draw.choice((1, 2, pp - 1, pp, 2 * pp, 3 * pp)) or 1
    if kind.refusal(pp, n) is not None:
        n = 2 * pp
    bound, held = _full(kind.name, pp, v, n, draw.randint(pp * v, 5 * pp * v), draw.uniform(0, 2), draw.uniform(0, 3))
    assert bound <= max(held) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("schedule", "pp", "v", "n", "blocks"),
    [("zbv-zero-bubble", 4, 2, 16, 15), ("interleaved-1f1b", 4, 2, 16, 24), ("gpipe", 4, 1, 6, 14)],
)
def test_the_bound_is_near_the_fullest_rank(schedule: str, pp: int, v: int, n: int, blocks: int) -> None:
    bound, held = _full(schedule, pp, v, n, blocks, 0.1, 0.1)
    assert 0.7 * max(held) < bound <= max(held)
