"""Intervals of predictions: wider the less is known, and true of published runs."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from autopar.cost_model import interval
from autopar.cost_model.interval import (
    FIGURES,
    FILLED,
    PLAN_ORDER,
    SITUATIONS,
    Situation,
    chance_of_fitting,
    interval_of,
    likely_slower,
    usable_bytes,
)
from autopar.cost_model.published.estimate import estimate_rows
from autopar.cost_model.published.row import RowEstimate, read_rows
from autopar.cost_model.published.validation import compared_rows, measures
from autopar.errors import InputError

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.csv"


def widths(figure: str, *situations: Situation) -> list[float]:
    found = [interval_of(1.0, figure, one) for one in situations]  # type: ignore[arg-type]
    assert all(one.low <= 1.0 <= one.high for one in found)
    return [one.high / one.low for one in found]


def test_the_less_is_known_the_wider() -> None:
    known, guessed = Situation(), Situation(is_engine_known=False)
    default = Situation(is_device_known=False)
    both = Situation(is_engine_known=False, is_device_known=False)
    for order in ((known, guessed, both), (known, default, both)):
        assert all(a < b for a, b in pairwise(widths("time", *order)))
    assert widths("time", known) < widths("time", Situation(has_experts=True))
    assert all(a <= b for a, b in pairwise(widths("memory", known, guessed)))


def test_it_scales_with_the_value() -> None:
    one, thousand = (interval_of(value, "time", Situation()) for value in (1.0, 1000.0))
    assert thousand == pytest.approx((1000 * one.low, 1000 * one.high))
    assert one.holds(1.0)
    assert not one.holds(2 * one.high)


@pytest.mark.parametrize("figure", FIGURES)
def test_most_published_runs_are_inside(figure: str) -> None:
    """The shipped constants know these runs, so that more than four of five are inside their step times."""
    rows = [row for row in read_rows(DATA) if row.tier == "core"]
    found = measures(compared_rows(rows, estimate_rows))
    inside, count = {
        "time": (found.time_inside, found.step_time.n),
        "memory": (found.memory_inside, found.memory.n),
    }[figure]
    assert 0.75 * count <= inside < count


def test_a_framework_of_another_name_is_inside_the_interval_of_a_guess() -> None:
    """Four runs of DeepSpeed gather whole weights over one port of a host, which no other framework does."""
    rows = [row.without_result() for row in read_rows(DATA)]
    known, guessed = estimate_rows(rows), estimate_rows([replace(row, engine=None) for row in rows])
    outside = {
        row.framework
        for row, a, b in zip(rows, known, guessed, strict=True)
        if isinstance(a, RowEstimate) and isinstance(b, RowEstimate) and not b.interval_s.holds(a.seconds)
    }
    inside = [row for row in rows if row.framework not in outside]
    assert len(inside) > 0.9 * len(rows)
    assert outside <= {"DeepSpeed", "InternEvo"}


def test_two_plans_are_told_apart_by_less_than_their_intervals() -> None:
    """The errors of two plans for the same work are alike, and cancel."""
    (apart,) = widths("time", Situation())
    assert 0 < likely_slower() < apart - 1


def test_the_shipped_bounds_are_of_every_situation() -> None:
    for figure, names in {**dict.fromkeys(FIGURES, SITUATIONS), PLAN_ORDER: (PLAN_ORDER,)}.items():
        bounds = interval._bounds()[figure]
        assert set(bounds) == set(names)
        assert all(low <= 0 <= high for low, high in bounds.values())


def test_a_malformed_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    interval._bounds.cache_clear()
    monkeypatch.setattr(interval, "read_yaml", lambda path: ({"time": {}}, []))
    with pytest.raises(InputError, match="must have exactly time, memory, order"):
        interval_of(1.0, "time", Situation())
    interval._bounds.cache_clear()


@pytest.mark.parametrize("chance", [0.5, 0.75, 0.9, 0.99])
@pytest.mark.parametrize("situation", [Situation(), Situation(is_engine_known=False), Situation(has_experts=True)])
def test_a_plan_that_fills_what_is_usable_fits_with_the_chance(chance: float, situation: Situation) -> None:
    peak = usable_bytes(80e9, chance, situation)
    assert chance_of_fitting(peak, 80e9, interval_of(peak, "memory", situation)) == pytest.approx(chance)
    assert peak < FILLED * 80e9 * 1.2


@pytest.mark.parametrize("peak", [10e9, 60e9, 79e9, 200e9])
def test_more_memory_never_makes_a_plan_fit_less(peak: float) -> None:
    chances = [chance_of_fitting(peak, gb * 1e9, interval_of(peak, "memory", Situation())) for gb in range(8, 300, 4)]
    assert chances == sorted(chances) and 0 <= chances[0] <= chances[-1] <= 1
    usable = [usable_bytes(gb * 1e9) for gb in range(8, 300, 4)]
    assert usable == sorted(usable)
