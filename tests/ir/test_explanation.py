"""Numbers and degrees in words, as plans and commands print them."""

from typing import Any

import pytest

from autopar.ir.explanation import recomputation_in_words, recomputation_of
from autopar.ir.sharding import common_cuts
from autopar.words.numbers import readable_bytes, readable_count, readable_rate, readable_seconds


@pytest.mark.parametrize(
    "function, words",
    (
        (readable_bytes, {37e9: "37 GB", 999.9e6: "1 GB", 12: "12 bytes"}),
        (readable_rate, {3308731.2: "3,308,731", 2.834: "2.83", 0.35: "0.35"}),
        (readable_count, {8.03e9: "8.03 billion", 233e3: "233 thousand", 999_999: "1 million", 12: "12"}),
        (readable_seconds, {3.7: "3.7 s", 0.0034: "3.4 ms", 1234.5: "1234 s"}),
    ),
)
def test_three_digits(function: Any, words: dict[float, str]) -> None:
    assert {number: function(number) for number in words} == words


@pytest.mark.parametrize(
    "blocks, pp, words",
    (
        (None, 4, "every block is recomputed"),
        (2, 1, "2 blocks are recomputed"),
        (1, 2, "every stage recomputes 1 block"),
        ([1, *[0] * 13, 1, 1, 1, *[0] * 15], 32, "4 of 32 stages recompute 1 block each"),
        ([3, 1, 0, 0], 4, "2 of 4 stages recompute 1 to 3 blocks each, 4 in all"),
        ([3, 1], 2, "all 2 stages recompute 1 to 3 blocks each, 4 in all"),
    ),
)
def test_recomputed_blocks(blocks: Any, pp: int, words: str) -> None:
    assert recomputation_in_words(blocks, pp) == words


@pytest.mark.parametrize(
    "degrees, words",
    (
        ({"recompute": "selective"}, "every block is recomputed selectively"),
        (
            {"recompute": "auto", "recompute_blocks": 1, "selective_blocks": 2, "pp": 4},
            "every stage recomputes 1 block; selectively, every stage recomputes 2 blocks",
        ),
        (
            {"recompute": "auto", "recompute_blocks": 1, "pp": 4},
            "every stage recomputes 1 block, and the other blocks selectively",
        ),
    ),
    ids=str,
)
def test_recomputation(degrees: dict[str, Any], words: str) -> None:
    assert recomputation_of(degrees) == words


def test_common_cuts() -> None:
    assert common_cuts([12, 8], [3, 4, 8]) == [3, 4, 8]
    assert common_cuts([3, 4], [4, 3]) is None
