"""Data of every kind: short and empty batches, other shapes, eval mode, ranks that do not agree, odd parameters."""

from typing import Any

import pytest
from data_models import rows, tokens
from suites import long, thinned

from autopar.capture.analysis import analyse
from autopar.capture.program import capture_program
from autopar.capture.targets import ignored_targets
from autopar.runtime.distributed.launch import Ranks

TOLERANCE = 1e-9
WISH: dict[str, Any] = {"tp": 2, "dp": 2, "zero": 3}


def worst(found: list[dict[str, float]]) -> float:
    return max(max(rank.values()) for rank in found)


@pytest.mark.parametrize(
    "wish",
    (
        long({**WISH, "zero": 0}),
        long({**WISH, "zero": 1, "accumulate": 2}),
        {**WISH, "zero": 2, "accumulate": 2, "sequence_parallel": True},
        long(WISH),
        {"tp": 1, "dp": 4, "zero": 3},
    ),
    ids=str,
)
def test_three_steps_of_two_optimizer_groups(wish: dict[str, Any], four_ranks: Ranks) -> None:
    """A full batch, a short one, one that is empty on some ranks; frozen, unused and empty parameters."""
    dp = wish["dp"]
    steps = [((4,) * dp, 8), ((3, 1, 4, 4)[:dp], 8), ((2, 0, 1, 0)[:dp], 8)]
    assert worst(four_ranks.run("data_ranks:training", 4, wish, 4, steps)) < TOLERANCE


def test_short_batches_whose_places_have_weights(four_ranks: Ranks) -> None:
    steps = [((4, 4), 8), ((3, 1), 8), ((2, 0), 8)]
    assert worst(four_ranks.run("data_ranks:training_weighted", 4, {**WISH, "accumulate": 2}, steps)) < TOLERANCE


@pytest.mark.parametrize("zero", thinned(range(4), keep=(3,)))
def test_tied_parameters_without_tensor_parallelism(zero: int, two_ranks: Ranks) -> None:
    """Beside frozen, unused, scalar and empty ones, and with two optimizer groups."""
    wish = {"tp": 1, "dp": 2, "zero": zero, "accumulate": 2}
    assert worst(two_ranks.run("data_ranks:training_tied", 2, wish)) < TOLERANCE


@pytest.mark.parametrize("zero", thinned(range(4), keep=(2,)))
def test_tied_parameters_with_tensor_parallelism(zero: int, four_ranks: Ranks) -> None:
    assert worst(four_ranks.run("data_ranks:training_tied", 4, {**WISH, "zero": zero})) < TOLERANCE


@pytest.mark.parametrize("sequence_parallel", (None, long(True)))
def test_other_lengths_and_numbers_of_sequences(sequence_parallel: bool | None, four_ranks: Ranks) -> None:
    steps = [((4, 4), 8), ((4, 4), 12), ((2, 4), 4), ((6, 6), 8), ((4, 4), 8), ((3, 4), 12)]
    steps += [] if sequence_parallel else [((4, 4), 7)]
    wish = {**WISH, "accumulate": 2, "sequence_parallel": sequence_parallel}
    assert worst(four_ranks.run("data_ranks:training", 4, wish, 4, steps)) < TOLERANCE


def test_each_shape_is_captured_once_and_announced(two_ranks: Ranks) -> None:
    (lines, warned), others = two_ranks.run("data_ranks:announced", 2, {"tp": 2}, [8, 12, 8, 4, 12, 4])
    assert [line.partition(" in ")[2].rpartition(" in ")[0] for line in lines] == [
        f"training mode for micro-batches of input_ids (2, {length}), labels (2, {length})" for length in (12, 4)
    ]
    assert warned == [] and others == ([], [])


def test_old_shapes_are_forgotten(two_ranks: Ranks) -> None:
    """With room for two shapes the least recently used goes, with one warning, and is captured again later."""
    lengths = [8, 12, 4, 12, 6, 4, 8]  # 8 is the plan's
    lines, warned = two_ranks.run("data_ranks:announced", 2, {"tp": 2}, lengths, 2)[0]
    assert [line.partition("(2, ")[2].partition(")")[0] for line in lines] == ["12", "4", "6", "4"]
    assert len(warned) == 1 and "pad batches to a few lengths" in warned[0]


def test_short_batches_without_a_mask(four_ranks: Ranks) -> None:
    found = four_ranks.run("data_ranks:not_masked", 4, {**WISH, "accumulate": 2})
    assert all(rank == found[0] for rank in found)
    assert "3 to 4 sequences" in found[0]["unequal"] and "drop this batch" in found[0]["unequal"]
    assert "at most 4, or the same multiple of 2" in found[0]["too many"]
    assert "3 sequences" in found[0]["odd"] and "the loss cannot ignore samples" in found[0]["odd"]
    assert found[0]["equal"] == ""


def test_the_mask_is_found_on_the_graph() -> None:
    for masked, expected in ((True, {"labels": -100}), (False, None)):
        program = capture_program(tokens(masked=masked), rows(4, 8, 0))
        assert ignored_targets(program, analyse(program)) == expected


def test_ranks_that_do_not_agree(four_ranks: Ranks) -> None:
    """Every rank is told the same and none hangs; the next batch that fits runs."""
    found = four_ranks.run("data_ranks:refusals", 4, {**WISH, "sequence_parallel": True})
    assert all(rank[name] == found[0][name] for rank in found for name in found[0] if name != "unfit")
    expected = {
        "other data": ("'labels'", "ranks 1, 3 got other data than", "differ only in tp"),
        "rows swapped": ("'input_ids'", "differ only in tp"),
        "other length": ("'input_ids'", "ranks 2, 3 got another shape than ranks 0, 1"),
        "mode": ("rank 0 in forward_backward", "ranks 1, 2, 3 in evaluate"),
        "cannot be split": ("sequence length 9 is not divisible by tp=2",),
        "eval": ("ranks 0, 1, 3 in training mode", "rank 2 in eval mode"),
    }
    for name, parts in expected.items():
        assert all(part in found[0][name] for part in parts), found[0][name]
    assert "'labels': dtype torch.int32" in found[1]["unfit"]
    assert all("the batch of rank 1 does not fit" in found[rank]["unfit"] for rank in (0, 2, 3))


def test_as_many_batches_as_every_rank_has(four_ranks: Ranks) -> None:
    assert four_ranks.run("data_ranks:iterated", 4, WISH, [3, 3, 3, 3]) == [(3, "")] * 4
    found = four_ranks.run("data_ranks:iterated", 4, WISH, [3, 3, 2, 2])
    assert all(rank == found[0] for rank in found)
    seen, message = found[0]
    assert seen == 2 and "ranks 2, 3 ran out of data after 2 batches, ranks 0, 1 did not" in message


@pytest.mark.parametrize("wish", (long(WISH), {**WISH, "zero": 0, "sequence_parallel": True}), ids=str)
def test_eval_mode_is_that_of_the_unmodified_model(wish: dict[str, Any], four_ranks: Ranks) -> None:
    """Dropout is off, a layer that training skips runs, and so does what depends on the mode; training goes on."""
    assert worst(four_ranks.run("data_ranks:evaluations", 4, wish)) < TOLERANCE


@pytest.mark.parametrize("wish", (long({**WISH, "zero": 0}), {**WISH, "accumulate": 2}), ids=str)
def test_recomputation_draws_the_same_numbers(wish: dict[str, Any], four_ranks: Ranks) -> None:
    assert max(four_ranks.run("data_ranks:recomputed", 4, wish)) == 0.0
