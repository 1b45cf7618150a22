"""Indices outside of their table: every rank raises what one device raises, and a batch that one device runs is run."""

from typing import Any

import pytest
from index_ranks import Case, Outcome
from lookup_models import ITEMS, PLACES, TAGS, WORDS
from suites import long

from autopar.runtime.distributed.launch import Ranks

Outcomes = list[Outcome]


def run(ranks: Ranks, wish: dict[str, Any], name: str, cases: list[Case], *, splits: bool = False) -> Outcomes:
    """The outcomes of all cases, the same on every rank and as on one device. `splits` expects split rows."""
    every = ranks.run("index_ranks:outcomes", ranks.world_size, wish, name, cases)
    found, is_split = every[0]
    assert all(rank == (found, is_split) for rank in every)
    assert is_split or not splits
    for case, outcome in zip(cases, found, strict=True):
        assert bool(outcome.message) == outcome.is_refused_by_one_device, (case, outcome)
        assert outcome.difference < 1e-9, (case, outcome)
    return found


TOKEN = Case(name="tokens", place=(1, 2), value=WORDS)
PACKED = [
    Case(name="tokens", place=(0, 0), value=3),
    TOKEN,
    Case(name="tokens", place=(1, 2), value=-1),
    Case(name="positions", place=(3, 7), value=PLACES),
    Case(name="labels", place=(2, 5), value=WORDS + 7),
    Case(name="labels", place=(2, 5), value=-1),
    Case(name="labels", place=(2, 0), value=WORDS + 7),  # no operator reads the first label
    Case(name="tokens", place=(0, 0), value=3),
]


def test_a_split_vocabulary_refuses_what_one_device_refuses(two_ranks: Ranks) -> None:
    found = run(two_ranks, {"tp": 2}, "packed documents", PACKED, splits=True)
    assert [outcome.message.removeprefix("RuntimeInputError: ").partition(";")[0] for outcome in found] == [
        "",
        "input 'tokens': ranks 0, 1 got the index 24, but wte:embedding:0 reads 0 to 23 (rows of wte.weight)",
        "input 'tokens': ranks 0, 1 got the index -1, but wte:embedding:0 reads 0 to 23 (rows of wte.weight)",
        "input 'positions': ranks 0, 1 got the index 20, but wpe:embedding:0 reads 0 to 19 (rows of wpe.weight)",
        "input 'labels': ranks 0, 1 got the index 31, but cross_entropy_loss:0 reads 0 to 23 (classes) and ignores -1",
        "",
        "",
        "",
    ]
    assert [outcome.num_checks for outcome in found] == [1, 1, 1, 1, 1, 0, 1, 0]  # the first, and unsure ones


@pytest.mark.parametrize(
    "wish",
    (
        {"tp": 1, "dp": 2, "zero": 2},
        long({"tp": 1, "dp": 2, "zero": 3, "accumulate": 2}),
    ),
    ids=str,
)
def test_the_bad_batch_of_one_rank_is_refused_by_all(wish: dict[str, Any], two_ranks: Ranks) -> None:
    cases = [
        TOKEN,
        Case(name="labels", place=(2, 5), value=WORDS, dp=1),
        Case(name="labels", place=(2, 0), value=99, dp=1),
    ]
    first, second, third = run(two_ranks, wish, "packed documents", cases)
    assert "'tokens': rank 0 got the index 24" in first.message
    assert "'labels': rank 1 got the index 24" in second.message
    assert third.num_checks == 1


@pytest.mark.parametrize("method", ("forward_backward", "evaluate", "eval mode"))
def test_stages_that_do_not_read_an_input_refuse_it_too(method: str, two_ranks: Ranks) -> None:
    cases = [
        Case(name="labels", place=(0, 0), value=WORDS, method=method),
        Case(name="tokens", place=(1, 2), value=WORDS, method=method),
        Case(name="labels", place=(1, 2), value=WORDS, method=method),
        Case(name="labels", place=(1, 2), value=0, method=method),
    ]
    wish = (
        {"tp": 1, "pp": 2, "dp": 1, "micro_batches": 2} if method == "forward_backward" else {"tp": 1, "pp": 2, "dp": 1}
    )
    found = run(two_ranks, wish, "packed documents", cases)
    assert all("ranks 0, 1 got the index 24" in outcome.message for outcome in found[1:3])


def test_other_shapes_and_modes(two_ranks: Ranks) -> None:
    """A batch of a new shape is checked after its capture. Eval mode has a program of its own."""
    cases = [
        Case(name="positions", place=(3, 9), value=PLACES, length=10),
        Case(name="labels", place=(3, 0), value=-7, length=10),
        Case(name="labels", place=(3, 9), value=-7, length=10),
        Case(name="tokens", place=(0, 1), value=WORDS, method="evaluate"),
        Case(name="tokens", place=(0, 1), value=WORDS, method="eval mode"),
        Case(name="tokens", place=(0, 1), value=WORDS, method="eval mode", length=10),
        Case(name="tokens", place=(0, 1), value=0, method="eval mode", length=10),
    ]
    found = run(two_ranks, {"tp": 2}, "packed documents", cases, splits=True)
    assert [bool(outcome.message) for outcome in found] == [True, False, True, True, True, True, False]


def test_what_a_mask_hides_may_be_anything(four_ranks: Ranks) -> None:
    """Tags and words in masked places are never read. A mask of large numbers counts places that do not exist."""
    cases = [
        Case(name="tags", place=(0, 7), value=999),
        Case(name="words", place=(0, 7), value=-999, dp=1),
        Case(name="tags", place=(0, 0), value=TAGS, dp=1),
        Case(name="words", place=(1, 0), value=WORDS),
        Case(name="mask", place=(1, 0), value=PLACES + 1, dp=1),
    ]
    wish = {"tp": 2, "dp": 2, "zero": 1, "sequence_parallel": True}
    found = run(four_ranks, wish, "tagger", cases, splits=True)
    assert [outcome.message for outcome in found[:2]] == ["", ""]
    assert "inputs 'mask', 'tags': ranks 2, 3 got the index 6" in found[2].message
    assert "inputs 'mask', 'words': ranks 0, 1 got the index 24" in found[3].message
    assert "input 'mask': ranks 2, 3 got the index 21, but places:embedding:0 reads 0 to 19" in found[4].message


def test_indices_that_are_computed(two_ranks: Ranks) -> None:
    cases = [
        Case(name="history", place=(0, 2), value=-1),
        Case(name="history", place=(0, 2), value=-2),
        Case(name="history", place=(0, 2), value=ITEMS),
        Case(name="minute", place=(3,), value=100_000),
        Case(name="country", place=(3,), value=3),
        Case(name="device", place=(1,), value=-100),
        Case(name="item", place=(1,), value=-1),
    ]
    found = run(two_ranks, {"tp": 2}, "recommender", cases)
    assert [outcome.message.removeprefix("RuntimeInputError: ").partition(",")[0] for outcome in found[1:3]] == [
        "input 'history': ranks 0",
        "input 'history': ranks 0",
    ]
    assert "inputs 'country', 'device': ranks 0, 1 got the index" in found[4].message
    assert "buckets:embedding:0 reads 0 to 5 (rows of buckets.weight)" in found[4].message


def test_rows_that_only_fill_a_batch_are_not_compared(four_ranks: Ranks) -> None:
    """Filling rows have ignored labels, for which the table has no row. An empty batch is filled with legal numbers."""
    cases = [
        Case(name="tokens", place=(0, 0), value=3, sequences=0, dp=1),
        Case(name="tokens", place=(0, 0), value=3, sequences=1, dp=1),
        Case(name="tokens", place=(0, 0), value=0, sequences=1, dp=1),
        Case(name="labels", place=(0, 0), value=-100, sequences=3),
        Case(name="tokens", place=(0, 0), value=3),
    ]
    found = run(four_ranks, {"tp": 2, "dp": 2, "zero": 0}, "corrected", cases, splits=True)
    assert [bool(outcome.message) for outcome in found] == [False, False, True, True, False]
    assert "'tokens': ranks 2, 3 got the index -1" in found[2].message
