"""Generated blocks go through `torch.compile` whole, collectives included."""

import pytest
import torch
from integration_models import Wanted, planned
from suites import long

from autopar.runtime.distributed.launch import Ranks


@pytest.mark.parametrize(("recompute", "chunks"), (("none", 1), long("none", 4), long("full", 1), long("selective", 4)))
def test_compiled_blocks_compute_the_same(two_ranks: Ranks, recompute: str, chunks: int) -> None:
    """Without a graph break: gathers that backward repeats, and the vocabulary-parallel loss, also in chunks."""
    wanted = Wanted(spec="llama3-8b", float64=True)
    _, plan = planned(wanted, 2, {"tp": 2, "sequence_parallel": True, "recompute": recompute, "loss_chunks": chunks})
    for plain, compiled, difference in two_ranks.run("integration_ranks:compiled_step", wanted, plan):
        torch.testing.assert_close(compiled, plain, rtol=1e-12, atol=0.0)
        assert difference < 1e-12
