"""Models captured with ``specialise=True`` on ranks: a batch that decides otherwise is refused by all ranks at once."""

from typing import Any

import pytest
from deciding_models import of_lengths, tokens_and_padding
from suites import long

from autopar.runtime.distributed.launch import Ranks

pytestmark = pytest.mark.timeout(150)

PADDING = [
    tokens_and_padding(padded=(1, 3)),
    tokens_and_padding(padded=(1,), seed=1),  # padding on one of two data-parallel ranks is padding of the batch
    tokens_and_padding(padded=(), seed=2),
    tokens_and_padding(padded=(2,), seed=3),
]


def run(ranks: Ranks, wish: dict[str, Any], kind: str, batches: Any, method: str = "forward_backward") -> list[str]:
    """The messages of all batches, the same on every rank. Losses of the others are one device's."""
    every = ranks.run("decision_ranks:outcomes", ranks.world_size, wish, kind, batches, method)
    assert all([text for text, _ in found] == [text for text, _ in every[0]] for found in every)
    assert all(difference < 1e-12 for found in every for _, difference in found)
    return [text for text, _ in every[0]]


@pytest.mark.parametrize(
    ("wish", "method"),
    (
        ({"tp": 2}, "forward_backward"),
        ({"tp": 1, "dp": 2, "zero": 2}, "forward_backward"),
        ({"tp": 1, "pp": 2, "micro_batches": 1}, "forward_backward"),
        long({"tp": 1, "dp": 2, "zero": 3}, "evaluate"),
        ({"tp": 2}, "eval mode"),
    ),
    ids=str,
)
def test_a_batch_that_decides_otherwise_is_refused(wish: dict[str, Any], method: str, two_ranks: Ranks) -> None:
    first, second, third, fourth = run(two_ranks, wish, "padding", PADDING, method)
    assert (first, second, fourth) == ("", "", "")
    assert "`if padding.any():` read True of input 'padding' during capture, ranks 0, 1 now read False" in third
    assert third.startswith("RuntimeInputError") and "deciding_models.py:" in third


def test_a_number_is_compared_with_the_whole_batch(two_ranks: Ranks) -> None:
    """The longest sequence may be on any rank."""
    batches = [of_lengths(9, 3, 9, 2), of_lengths(1, 3, 4, 9), of_lengths(9, 3, 10, 2), of_lengths(5, 3, 9, 2)]
    first, second, third, fourth = run(two_ranks, {"tp": 1, "dp": 2, "zero": 1}, "lengths", batches)
    assert (first, second, fourth) == ("", "", "")
    assert "read 9 of input 'lengths' during capture, ranks 0, 1 now read 10" in third
