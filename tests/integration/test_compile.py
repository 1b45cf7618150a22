"""Generated blocks go through `torch.compile` whole, collectives included."""

import pytest
import torch
from integration_models import Wanted, planned
from suites import long

from autopar.runtime.distributed.launch import Ranks


@pytest.mark.parametrize("recompute", ("none", "selective", long("full")))
def test_compiled_blocks_compute_the_same(two_ranks: Ranks, recompute: str) -> None:
    """With sequence parallelism, gathers that are repeated in backward, and the vocabulary-parallel loss."""
    wanted = Wanted(spec="llama3-8b", float64=True)
    _, plan = planned(wanted, 2, {"tp": 2, "sequence_parallel": True, "recompute": recompute})
    for plain, compiled, difference in two_ranks.run("integration_ranks:compiled_step", wanted, plan):
        torch.testing.assert_close(compiled, plain, rtol=1e-12, atol=0.0)
        assert difference < 1e-12
