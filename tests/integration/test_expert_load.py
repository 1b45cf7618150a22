"""`ParallelModel.expert_load` counts what the router of the unmodified model chooses, under every plan."""

from typing import Any

import pytest
from suites import long

from autopar.runtime.distributed.launch import Ranks

PLANS = (
    long({"tp": 2, "dp": 2, "zero": 3}),
    long({"pp": 2, "dp": 2, "micro_batches": 2}),
    long({"tp": 4}),
    long({"tp": 2, "dp": 2, "sequence_parallel": True}),
    long({"dp": 4}),
    long({"dp": 4, "ep": 2, "dispatch": "exchange"}),
    {"pp": 2, "dp": 2, "ep": 2, "dispatch": "exchange", "micro_batches": 2},
    long({"dp": 2, "tp": 2, "ep": 2, "dispatch": "gather"}),
)


@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_the_load_is_that_of_the_model(wish: dict[str, Any], four_ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    for counted, expected in four_ranks.run("expert_ranks:loads", wish, 4):
        assert counted == expected


def test_a_model_without_experts_has_no_load(two_ranks: Ranks) -> None:
    for message in two_ranks.run("expert_ranks:load_without_experts", 2):
        assert "no block of this model sorts tokens by expert" in message
