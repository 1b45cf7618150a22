"""`ParallelModel.expert_load` counts what the router of the unmodified model chooses, under every plan."""

from typing import Any

import pytest
import torch
from suites import long

import autopar
from autopar.errors import RuntimeInputError
from autopar.runtime.distributed.launch import Ranks

pytestmark = pytest.mark.timeout(150)
PLANS = (
    {"tp": 2, "dp": 2, "zero": 3},
    {"pp": 2, "dp": 2, "micro_batches": 2},
    long({"tp": 4}),
    long({"tp": 2, "dp": 2, "sequence_parallel": True}),
    long({"dp": 4}),
)


@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_the_load_is_that_of_the_model(wish: dict[str, Any], four_ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    for counted, expected in four_ranks.run("expert_ranks:loads", wish, 4):
        assert counted == expected


def test_a_model_without_experts_has_no_load() -> None:
    batch = (torch.randn(4, 8), torch.arange(4))
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))
    loss_fn = torch.nn.functional.cross_entropy
    parallel = autopar.parallelize(model, "1xcpu", example_inputs=batch, loss_fn=loss_fn)
    with pytest.raises(RuntimeInputError, match="no block of this model sorts tokens by expert"):
        parallel.expert_load(batch)
