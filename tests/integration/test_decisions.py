"""Models whose branches and sizes depend on a batch: a new decision is captured, a known one runs, checks raise."""

from typing import Any

import pytest
from deciding_models import of_lengths, patches, tokens_and_padding, tokens_and_variance
from suites import long

from autopar.runtime.distributed.launch import Ranks

PADDING = [
    tokens_and_padding(padded=(1, 3)),
    tokens_and_padding(padded=(0, 2), seed=1),
    tokens_and_padding(padded=(), seed=2),
    tokens_and_padding(padded=(1, 2), seed=3),
    tokens_and_padding(padded=(), seed=4),
]
PATCHES = [
    patches(3, 3, 3, 3),
    patches(3, 2, 3, 4, seed=1),  # as many, on other ranks
    patches(1, 4, 0, 2, seed=2),
    patches(seed=3),  # nothing is hidden
    patches(2, 2, 2, 1, seed=4),  # 7, as two batches before
    patches(seed=5),
]
LENGTHS = [of_lengths(9, 3, 9, 2), of_lengths(1, 3, 4, 9), of_lengths(9, 3, 10, 2), of_lengths(5, 3, 9, 2)]


def run(
    ranks: Ranks,
    wish: dict[str, Any],
    kind: str,
    batches: Any,
    method: str = "forward_backward",
    specialise: bool = True,
) -> tuple[list[str], list[str]]:
    """The messages of all batches, the same on every rank, and rank 0's log. Losses and gradients are one device's."""
    every = ranks.run("decision_ranks:outcomes", ranks.world_size, wish, kind, batches, method, specialise)
    assert all([text for text, _, _ in found] == [text for text, _, _ in every[0]] for found in every)
    assert all(error < 1e-10 for found in every for _, error, _ in found), every
    return [text for text, _, _ in every[0]], [line for _, _, line in every[0]]


@pytest.mark.parametrize(
    ("wish", "method"),
    (
        ({"tp": 2}, "forward_backward"),
        long({"tp": 1, "dp": 2, "zero": 2}, "forward_backward"),
        long({"tp": 1, "pp": 2, "micro_batches": 1}, "forward_backward"),
        ({"tp": 1, "pp": 2, "micro_batches": 2}, "forward_backward"),
        long({"tp": 1, "dp": 2, "zero": 3}, "evaluate"),
        ({"tp": 2}, "eval mode"),
    ),
    ids=str,
)
def test_a_new_decision_is_captured_and_a_known_one_runs(wish: dict[str, Any], method: str, two_ranks: Ranks) -> None:
    texts, lines = run(two_ranks, wish, "padding", PADDING, method)
    assert not any(texts) and not any((lines[1], *lines[3:]))
    assert "captured the model in" in lines[2] and "because" in lines[2]
    assert "`if padding.any():` read True of input 'padding' during capture, ranks 0, 1 now read False" in lines[2]


def test_padding_on_one_rank_is_padding_of_the_batch(two_ranks: Ranks) -> None:
    texts, lines = run(two_ranks, {"tp": 1, "dp": 2}, "padding", [PADDING[0], tokens_and_padding(padded=(1,), seed=1)])
    assert not any(texts) and not any(lines)


@pytest.mark.parametrize(
    "wish",
    (
        {"tp": 2},
        long({"tp": 1, "dp": 2, "zero": 2}),
        long({"tp": 1, "dp": 2, "zero": 3}),
        {"tp": 1, "pp": 2, "micro_batches": 1},
    ),
    ids=str,
)
def test_sizes_of_masks_change(wish: dict[str, Any], two_ranks: Ranks) -> None:
    texts, lines = run(two_ranks, wish, "patches", PATCHES)
    assert not any(texts)
    assert [bool(line) for line in lines] == [False, False, True, True, False, False]


@pytest.mark.parametrize("wish", (long({"tp": 2}), {"tp": 1, "dp": 2, "zero": 1}), ids=str)
def test_a_number_is_compared_with_the_whole_batch(wish: dict[str, Any], two_ranks: Ranks) -> None:
    """The longest sequence may be on any rank."""
    texts, lines = run(two_ranks, wish, "lengths", LENGTHS)
    assert not any(texts) and [bool(line) for line in lines] == [False, False, True, False]
    assert "read 9 of input 'lengths' during capture, ranks 0, 1 now read 10" in lines[2]


@pytest.mark.parametrize("wish", (long({"tp": 2, "accumulate": 2}), {"tp": 1, "pp": 2, "micro_batches": 2}), ids=str)
@pytest.mark.parametrize("kind", ("padding", "lengths"))
def test_micro_batches_decide_together(wish: dict[str, Any], kind: str, two_ranks: Ranks) -> None:
    """The second micro-batch alone is padded, or the shorter: both take the branch of the whole step."""
    every = {
        "padding": [PADDING[0], *(tokens_and_padding(padded=one, seed=5) for one in ((), (2,), (0,)))],
        "lengths": [
            LENGTHS[0],
            *(of_lengths(*n) for n in ((4, 3, 9, 2), (8, 3, 1, 8), (2, 7, 1, 4), (7, 1, 2, 3))),
        ],
    }
    texts, lines = run(two_ranks, wish, kind, every[kind])
    assert not any(texts)
    new = {"padding": [1], "lengths": [2, 3]}[kind]
    assert [k for k, line in enumerate(lines) if line] == new


def test_micro_batches_must_decide_alike_if_no_extreme_joins_them(two_ranks: Ranks) -> None:
    batches = [of_lengths(10, 3, 9, 10), of_lengths(9, 3, 4, 10), of_lengths(8, 3, 1, 9), of_lengths(10, 3, 10, 1)]
    (first, second, third, fourth), _ = run(two_ranks, {"tp": 2, "accumulate": 2}, "full", batches)
    assert (first, third, fourth) == ("", "", "")
    assert "now read False" in second and "use micro_batches × accumulate = 1" in second


def test_a_check_raises_its_own_error_on_all_ranks(two_ranks: Ranks) -> None:
    """Without specialise. An input that the example did not have is captured like another shape."""
    good, wide = tokens_and_variance(), tokens_and_variance(place=3, seed=2)
    batches = [
        good,
        tokens_and_variance(word=22),
        tokens_and_variance(variance=9.5),
        tokens_and_variance(variance=-0.5),
        tokens_and_variance(seed=1),
        wide,
        tokens_and_variance(place=12),
        good,
        tokens_and_variance(place=4, seed=3),
    ]
    for wish in ({"tp": 2}, {"tp": 1, "dp": 2}):
        texts, lines = run(two_ranks, wish, "checks", batches, specialise=False)
        assert [bool(text) for text in texts] == [False, True, True, True, False, False, True, False, False]
        for text, own in zip(
            texts[1:4], ("tokens must be below 20", "the variance is too large", "negative"), strict=True
        ):
            assert own in text and "the model refuses these inputs: module 'Checked'" in text, text
        assert "too many places" in texts[6]
        assert [bool(line) for line in lines] == [False] * 5 + [True] + [False] * 3
