"""Losses per micro-batch: every micro-batch by itself, for models whose samples depend on each other and for others."""

from typing import Any

import pytest
from suites import long

from autopar.commands.verify import verify
from autopar.runtime.distributed.launch import Ranks

ALONE: dict[str, Any] = {"accumulate": 3, "per_micro_batch": True}


@pytest.mark.parametrize(
    ("spec", "wish"),
    (
        long("residual", {"dp": 2, "zero": 2}),
        ("residual", {"tp": 2}),
        ("contrastive", {"dp": 2, "zero": 3}),
        long("contrastive", {"tp": 2}),
        ("experts", {"dp": 2, "zero": 3}),
        long("experts", {"tp": 2}),
        ("summed", {"dp": 2, "zero": 1}),
    ),
    ids=str,
)
def test_equal_to_one_device_that_does_the_same(spec: str, wish: dict[str, Any], two_ranks: Ranks) -> None:
    """The reference is compared with the unmodified model, one micro-batch after the other."""
    report = verify(f"integration_models:{spec}", world_size=2, degrees={**wish, **ALONE}, steps=2, ranks=two_ranks)
    errors = {q.name: (q.where, q.max_error) for q in report.quantities}
    assert report.passed, errors
    assert {"captured loss", "captured gradients"} < errors.keys()
    assert report.plan.degrees.per_micro_batch is True


@pytest.mark.parametrize("wish", (long({"tp": 1, "dp": 4, "zero": 2}), {"tp": 2, "dp": 2, "zero": 3}), ids=str)
def test_a_loss_that_could_be_summed(wish: dict[str, Any], four_ranks: Ranks) -> None:
    """Targets ignored in different numbers make it another loss; a short batch, where they could not count, is refused
    on all ranks, another length is not."""
    for errors, refusal in four_ranks.run("data_ranks:per_micro_batch", 4, {**wish, **ALONE}):
        assert max(errors.values()) < 1e-9, errors
        assert "every micro-batch has the same weight (per_micro_batch)" in refusal
