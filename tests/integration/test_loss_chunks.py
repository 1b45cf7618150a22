"""Logits and loss in chunks of tokens on two gloo ranks: several optimizer steps against one device."""

from typing import Any

import pytest
from suites import thinned

from autopar.commands.verify import verify
from autopar.runtime.distributed.launch import Ranks

MODELS = ("llama3-8b", "gpt2", "gemma2-9b", "mistral-7b")
WISHES: dict[str, tuple[dict[str, Any], int]] = {  # and the sequences of a rank
    "tp 2": ({"tp": 2, "sequence_parallel": False}, 4),
    "tp 2, sequence": ({"tp": 2, "sequence_parallel": True}, 4),
    "dp 2, ZeRO 3": ({"dp": 2, "zero": 3}, 2),
    "pp 2": ({"pp": 2, "micro_batches": 2}, 4),
    "pp 2, backward in parts": ({"pp": 2, "micro_batches": 4, "schedule": "zbv-zero-bubble"}, 8),
    "recomputed": ({"tp": 2, "sequence_parallel": True, "recompute": "full"}, 4),
    "accumulate 2": ({"dp": 2, "zero": 2, "accumulate": 2}, 4),
    "one sequence": ({"tp": 2, "sequence_parallel": True, "micro_batch": 1, "accumulate": 2}, 2),
}
SHORT = [("gemma2-9b", "tp 2"), ("gpt2", "pp 2, backward in parts")]


@pytest.mark.parametrize(("spec", "wish"), thinned([(spec, wish) for spec in MODELS for wish in WISHES], keep=SHORT))
def test_equal_to_one_device(spec: str, wish: str, two_ranks: Ranks) -> None:
    degrees, batch = WISHES[wish]
    layers = 4 if "schedule" in degrees else 2
    found = verify(
        spec, world_size=2, degrees=degrees | {"loss_chunks": 3}, ranks=two_ranks, layers=layers, hidden=64,
        seq_len=16, batch=batch, steps=3,
    )  # fmt: skip
    assert found.plan.degrees.loss_chunks == 3
    assert not any("chunks" in note for note in found.plan.notes)
    assert found.passed, {q.name: q.scaled_error for q in found.quantities}
    exact = [q.scaled_error for q in found.quantities if not q.name.startswith("captured")]
    assert max(exact) <= 1e-9, found.quantities
