"""`verify` of steps and micro-batches of one sequence, on two gloo ranks."""

from typing import Any

import pytest
from suites import thinned

from autopar.commands.verify import verify
from autopar.runtime.distributed.launch import Ranks

MODELS = ("llama3-8b", "mixtral-8x7b", "gpt2", "mistral-7b", "gemma2-9b")
WISHES: dict[str, Any] = {
    "tp 2": {"tp": 2, "sequence_parallel": False},
    "tp 2, sequence, 3 micro-batches": {"tp": 2, "sequence_parallel": True, "accumulate": 3},
    "pp 2, 3 micro-batches": {"pp": 2, "micro_batches": 3},
    "pp 2, recomputed": {"pp": 2, "micro_batches": 2, "recompute": "full"},
}


@pytest.mark.parametrize(
    ("spec", "wish"),
    thinned(
        [(spec, wish) for spec in MODELS for wish in WISHES],
        keep=[("mixtral-8x7b", "pp 2, 3 micro-batches")],
    ),
)
def test_equal_to_one_device(spec: str, wish: str, two_ranks: Ranks) -> None:
    degrees = WISHES[wish]
    count = degrees.get("accumulate", 1) * degrees.get("micro_batches", 1)
    found = verify(
        spec, world_size=2, degrees=degrees, ranks=two_ranks, layers=2, hidden=64, seq_len=16, batch=count, steps=2
    )
    assert found.plan.degrees.micro_batch == 1 and found.plan.batch == 1
    assert found.passed, {q.name: q.scaled_error for q in found.quantities}
    exact = [q.scaled_error for q in found.quantities if not q.name.startswith("captured")]
    assert max(exact) <= 1e-9, found.quantities
