"""Cuts and recomputed blocks of every stage: the best cut, the fewest blocks, and prices that hold."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from search_cases import Case, machinery_with

from autopar.cost_model.pipeline.stages import Stages, seconds_of_stages, stages_at
from autopar.cost_model.pricing import layout_of
from autopar.ir.arrays import Floats
from autopar.ir.degrees import Degrees
from autopar.search.bounds.lower_bounds import Machinery
from autopar.search.driver.search import SearchState, search_degrees
from autopar.search.pricing import per_stage_recompute
from autopar.search.pricing.exact import AS_IT_IS, BY_STAGE, Cut, PricedPlan, priced, pricing_of
from autopar.search.pricing.per_stage_recompute import StageRecompute, fewest_blocks, live_micro_batches
from autopar.search.pricing.stage_partition import partition_with

CASE = Case(model="llama", cluster="4xh100", global_batch=16, tokens=4096)
STAGED = Degrees(pp=4, zero=0, micro_batch=1, micro_batches=16)
SCHEDULES: tuple[dict[str, Any], ...] = (
    {},
    {"schedule": "gpipe"},
    {"schedule": "interleaved-zero-bubble"},
    {"pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 3, "dp_shard": 2, "zero": 1, "micro_batches": 8},
    {"pp": 2, "schedule": "zbv-zero-bubble", "virtual_stages": 2, "dp_shard": 2, "zero": 3, "micro_batches": 8},
)


def machinery(degrees: Degrees, part: float, case: Case = CASE) -> Machinery:
    """With room for that part of what the plan holds beside state and reserve without recomputation."""
    roomy, works = case.on, case.works(1)
    most, least = (
        pricing_of(works, one, case.spec, roomy).memory(layout_of(works, one.degrees), every_rank=True).peak_bytes.max()
        for one in (
            priced(works, degrees, roomy),
            priced(works, degrees, pinned(roomy, recompute_blocks=1_000_000)),
        )
    )
    between = float(least + part * (most - least)) - roomy.machine.reserve_bytes
    return machinery_with(case.spec, between / (1 + roomy.machine.mechanisms.allocator_cache))


def pinned(on: Machinery, **words: Any) -> Machinery:
    return replace(on, **words)


# ---- cuts ----


@st.composite
def _partitions(draw: st.DrawFn) -> tuple[list[float], int, NDArray[np.float64]]:
    count = draw(st.integers(2, 7))
    parts = draw(st.integers(1, min(count, 4)))
    weights = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    more = draw(st.lists(st.integers(0, 12), min_size=parts * (count + 1) ** 2, max_size=parts * (count + 1) ** 2))
    beside = np.array(more, dtype=np.float64).reshape(parts, count + 1, count + 1)
    return [float(w) for w in weights], parts, np.where(beside > 10, np.inf, beside)


@settings(max_examples=200, deadline=None)
@given(_partitions())
def test_the_slowest_part_is_as_fast_as_it_can_be(given: tuple[list[float], int, NDArray[np.float64]]) -> None:
    weights, parts, more = given

    def slowest(cuts: tuple[int, ...]) -> float:
        bounds = pairwise((0, *cuts, len(weights)))
        return max(sum(weights[a:b]) + float(more[at, a, b]) for at, (a, b) in enumerate(bounds))

    found = partition_with(
        weights, parts, lambda at, a, b: more[at, a, b], len(weights), can_be_alone=[True] * len(weights)
    )
    best = min(slowest(cuts) for cuts in combinations(range(1, len(weights)), parts - 1))
    assert (found is None) == np.isinf(best)
    assert found is None or slowest(found) == best


# ---- the fewest blocks ----


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("wish", SCHEDULES, ids=str)
def test_one_block_less_of_any_rank_does_not_fit(wish: dict[str, Any], part: float) -> None:
    degrees = replace(STAGED, **wish)
    on = machinery(degrees, part)
    found = priced(CASE.works(1), degrees, on, cut=BY_STAGE)
    assert found.fits
    again = found.degrees.recompute_blocks
    if found.degrees.recompute == "none":
        return
    assert isinstance(again, tuple)
    stages = stages_at(CASE.works(1).calls, found.cuts, found.degrees)
    assert len(again) == degrees.num_stages
    assert all(0 <= count <= len(own) for count, own in zip(again, stages.repeated, strict=True))
    needed = _needed(found, on)
    assert np.all(needed <= on.capacity_bytes)
    for fewer, rank in _with_one_less(stages, again):
        less = replace(found, degrees=replace(found.degrees, recompute_blocks=fewer))
        assert _needed(less, on)[rank] > on.capacity_bytes


def _needed(one: PricedPlan, on: Machinery) -> NDArray[np.float64]:
    """Bytes of every rank, counted for the plan alone."""
    pricing = pricing_of(CASE.works(1), one, CASE.spec, on)
    return pricing.memory(layout_of(CASE.works(1), pricing.question.degrees), every_rank=True).peak_bytes


def _with_one_less(stages: Stages, again: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Counts with a block less in the stage of each rank that holds fewest micro-batches of those that recompute."""
    live = live_micro_batches(stages)
    for rank in range(stages.pp):
        mine = [s for s, own in enumerate(stages.ranks) if own == rank and again[s]]
        if mine:
            last = min(mine, key=lambda s: live[s])
            yield tuple(count - (s == last) for s, count in enumerate(again)), rank


def test_a_rank_that_cannot_fit_recomputes_all() -> None:
    stages = stages_at(["first", *["layer:0"] * 6, "last"], (3, 5), Degrees(pp=3, micro_batches=4))
    wanted = fewest_blocks(stages, lambda again: np.array([5.0, 1.0 - again.full[1], 3.0 - 2 * again.full[2]]), 0.5)
    assert wanted.full == (2, 1, 2) == (len(stages.repeated[0]), 1, 2)
    assert wanted.selective == (0, 0, 0)


def test_blocks_are_recomputed_fully_only_where_selective_recomputation_is_not_enough() -> None:
    """A rank needs 8 bytes without recomputation; a selective block frees 1 of them, a full block 3."""
    stages = stages_at(["first", *["layer:0"] * 6, "last"], (3, 5), Degrees(pp=3, micro_batches=4))

    def needed(again: StageRecompute) -> Floats:
        return np.array([8.0 - full * 3 - part for full, part in zip(again.full, again.selective, strict=True)])

    every = {limit: fewest_blocks(stages, needed, limit, (0, 1, 2)) for limit in (8, 7, 6, 5, 4, 3, 2)}
    of_first = {limit: (found.full[0], found.selective[0]) for limit, found in every.items()}
    assert of_first == {8: (0, 0), 7: (0, 1), 6: (0, 2), 5: (1, 1), 4: (1, 1), 3: (2, 0), 2: (2, 0)}
    only = fewest_blocks(stages, needed, 5.0, (0, 1, 2), most_level=1)
    assert (only.full, only.selective) == ((0, 0, 0), (2, 2, 2))


@pytest.mark.parametrize("wish", SCHEDULES, ids=str)
def test_micro_batches_in_flight_of_a_step_too_long_to_replay(
    wish: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    degrees = replace(STAGED, **wish)
    stages = stages_at(CASE.works(1).calls, tuple(range(1, degrees.num_stages)), degrees)
    replayed = live_micro_batches(stages)
    monkeypatch.setattr(per_stage_recompute, "MOST_ACTIONS", 0)
    live = live_micro_batches(stages)
    assert live.shape == replayed.shape == (degrees.num_stages,)
    ranks = np.array(stages.ranks)
    assert np.bincount(ranks, live) == pytest.approx(np.bincount(ranks, replayed))


# ---- prices ----


@pytest.mark.parametrize("wish", SCHEDULES, ids=str)
def test_all_blocks_of_every_stage_are_all_blocks(wish: dict[str, Any]) -> None:
    degrees, works = replace(STAGED, **wish), CASE.works(1)
    whole = priced(works, degrees, pinned(CASE.on, recompute_blocks=1_000_000))
    none = priced(works, degrees, pinned(CASE.on, recompute_blocks=0))
    every = tuple(len(own) for own in stages_at(works.calls, whole.cuts, degrees).repeated)
    for one, counts in ((whole, every), (none, (0,) * len(every))):
        same = priced(works, degrees, pinned(CASE.on, recompute_blocks=counts, cuts=one.cuts))
        assert same.seconds == pytest.approx(one.seconds, rel=1e-12)
        assert same.peak_bytes == pytest.approx(one.peak_bytes, rel=1e-12)
        for name, part in one.step.parts.items():
            assert float(np.max(same.step.parts[name])) == pytest.approx(float(np.max(part)), rel=1e-9, abs=1e-12), name


def test_parts_add_up() -> None:
    on = machinery(STAGED, 0.3)
    found = priced(CASE.works(1), STAGED, on, cut=BY_STAGE)
    assert isinstance(found.degrees.recompute_blocks, tuple)
    assert sum(float(np.max(part)) for part in found.step.parts.values()) == pytest.approx(found.seconds, rel=1e-12)
    assert sum(float(np.max(part)) for part in found.memory.parts.values()) == pytest.approx(
        float(found.memory.peak_bytes.max())
    )


@pytest.mark.parametrize("part", [0.2, 0.5])
def test_fewer_blocks_recompute_and_the_step_is_faster(part: float) -> None:
    on = machinery(STAGED, part)
    even, own = (priced(CASE.works(1), STAGED, on, cut=cut) for cut in (AS_IT_IS, BY_STAGE))
    again = own.degrees.recompute_blocks
    assert isinstance(again, tuple) and even.degrees.recompute == "full"
    of_even = stages_at(CASE.works(1).calls, even.cuts, even.degrees).repeated
    most = even.degrees.recompute_blocks
    assert sum(again) < sum(len(own) if most is None else min(len(own), int(most)) for own in of_even)
    assert own.seconds < even.seconds


@pytest.mark.parametrize("again", [(0, 1, 0, 2), (2, 0, 0, 0), (0, 0, 0, 0), None])
def test_stages_that_recompute_have_whole_backward_passes(again: tuple[int, ...] | None) -> None:
    """Nothing is left for the weights' part, but in the first stage, whose backward pass is one part anyway."""
    degrees = replace(STAGED, schedule="interleaved-zero-bubble", recompute="full", recompute_blocks=again)
    stages = stages_at(CASE.works(1).calls, (2, 4, 6), degrees)
    seconds = {role: (1.0, 2.0, 0.75) for roles in stages.roles for role in roles}
    _, _, weight, _ = seconds_of_stages(stages, seconds)
    recompute = [False, *(again is None or count > 0 for count in (again or (0,) * 4)[1:])]
    assert (weight > 0).tolist() == [not one for one in recompute]
    whole = replace(stages, schedule="1f1b")
    assert np.all(seconds_of_stages(whole, seconds)[2] > 0)  # nothing asks for it there


# ---- the search ----


def search(on: Machinery, case: Case = CASE, **fix: Any) -> SearchState:
    return search_degrees(case.works, case.spec, case.constraints.narrowed(fix), on, most_exact=400, trials=80)


def test_the_search_finds_the_best_of_all_stages_and_cuts() -> None:
    """Every cut of every candidate with any numbers of recomputed blocks, for two stages of a rank each."""
    fix = {"pp": 2, "dp_shard": 2, "virtual_stages": 1, "tp": 1, "schedule": "1f1b", "zero": 1}
    on = machinery(Degrees(pp=2, dp_shard=2, zero=1, micro_batch=1, micro_batches=8), 0.7)
    found = search(on, **fix)
    best = found.best
    assert best is not None and best.degrees.recompute == "full"
    assert isinstance(best.degrees.recompute_blocks, tuple)
    assert found.proof.best is not None and best.seconds < found.proof.best.value
    works = CASE.works(1)
    least = np.inf
    for index in range(len(found.candidates)):
        degrees = found.candidates.degrees(index)
        for cut in range(1, len(works.calls)):
            stages = stages_at(works.calls, (cut,), degrees)
            if not all(stages.roles):
                continue
            for first in range(len(stages.repeated[0]) + 1):
                for last in range(len(stages.repeated[1]) + 1):
                    one = priced(works, degrees, pinned(on, recompute_blocks=(first, last), cuts=(cut,)))
                    least = min(least, one.seconds if one.fits else np.inf)
    assert best.seconds == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("part", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("pp", [2, 4])
def test_no_candidate_that_recomputes_is_better_with_stages_of_its_own(pp: int, part: float) -> None:
    """Also where the bound of its memory says that it recomputes nothing."""
    degrees = Degrees(pp=pp, dp_shard=4 // pp, zero=1, micro_batch=1, micro_batches=4 * pp)
    on = machinery(degrees, part)
    found = search(on, pp=pp, tp=1)
    assert found.best is not None
    recomputing = [i for i, one in found.exact.items() if one.degrees.recompute != "none" and one.degrees.pp > 1]
    for index in recomputing:
        own = priced(CASE.works(1), found.candidates.degrees(index), on, cut=BY_STAGE)
        assert not own.fits or found.best.seconds <= own.seconds * (1 + 1e-9)


def test_what_fits_only_with_stages_of_its_own() -> None:
    """Less than all blocks of the first stage hold is enough where the first stage has fewer.

    There are few words. Else logits need more room than a recomputed block, and the last stage may recompute all.
    """
    fix = {"pp": 2, "dp_shard": 2, "virtual_stages": 1, "tp": 1, "schedule": "1f1b", "zero": 1, "micro_batch": 2}
    case = replace(CASE, vocabulary=16)
    on = machinery(Degrees(pp=2, dp_shard=2, zero=1, micro_batch=1, micro_batches=8), 0.3, case)
    found = search(on, case, **fix)
    assert found.proof.best is None
    assert found.best is not None and found.best.fits
    assert found.best is found.refined.best and found.index_of_best is None


def test_moved_cuts_recompute_by_stage_too() -> None:
    on = machinery(STAGED, 0.3)
    found = priced(CASE.works(1), STAGED, on, cut=Cut(out_of_first=1, by_stage=True))
    assert found.fits
    assert found.cuts[0] <= priced(CASE.works(1), STAGED, on, cut=BY_STAGE).cuts[0]
