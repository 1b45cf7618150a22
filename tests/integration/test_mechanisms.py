"""Mechanisms of other people's models on gloo ranks: loss and gradients of the unmodified module on the whole batch."""

from typing import Any

import pytest
from suites import long

from autopar.runtime.distributed.launch import Ranks

pytestmark = pytest.mark.timeout(120)
TOLERANCE = 1e-9
ACCUMULATED, PIPELINE = {"dp": 2, "accumulate": 2}, {"pp": 2, "micro_batches": 2}
SPLIT = {"tp": 2, "accumulate": 2}
MICRO_BATCHES = [
    ("padded_on_the_right", PIPELINE),
    ("padded_on_the_left", ACCUMULATED),
    ("packed_positions", PIPELINE),
    ("packed_positions", ACCUMULATED),
    long("padded_on_the_right", ACCUMULATED),
    long("padded_on_the_left", PIPELINE),
    long("packed_positions", SPLIT),
    ("last_token_of_each_row", ACCUMULATED),
    long("last_token_of_each_row", PIPELINE),
    ("tokens_by_row_and_number", PIPELINE),
    ("tokens_by_row_and_number", SPLIT),
    ("best_tokens_of_each_row", PIPELINE),
]


@pytest.mark.parametrize(("name", "wish"), MICRO_BATCHES, ids=str)
def test_rows_by_their_own_number_in_micro_batches(name: str, wish: dict[str, Any], two_ranks: Ranks) -> None:
    assert max(two_ranks.run("mechanism_ranks:worst_error", 2, name, wish)) < TOLERANCE
