"""Plans with products of eight bits on gloo ranks: as near to float32 as one device (docs/precision.md)."""

from typing import Any

import pytest
from suites import thinned

from autopar.commands.verify import verify

pytest.importorskip("torchao")
pytest.importorskip("transformers")

PLANS: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"tp": 2, "dp": 2, "zero": 3, "recompute": "selective"},
    {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 2},
    {"dp": 2, "zero": 0, "accumulate": 2},
    {"tp": 4, "sequence_parallel": True, "loss_chunks": 2},
)
CASES = [
    (model, precision, wish) for model in ("llama3-8b", "gpt2") for precision in ("fp8", "mxfp8") for wish in PLANS
]
SHORT = [CASES[0], CASES[7]]


@pytest.mark.parametrize(("model", "precision", "wish"), thinned(CASES, keep=SHORT), ids=str)
def test_ranks_are_as_near_to_float32_as_one_device(
    model: str, precision: str, wish: dict[str, Any], worlds: Any
) -> None:
    size = wish.get("tp", 1) * wish.get("dp", 1) * wish.get("pp", 1)
    degrees = {**wish, "precision": precision}
    report = verify(model, world_size=size, degrees=degrees, layers=2, hidden=128, seq_len=32, ranks=worlds(size))
    assert report.passed, report.quantities
    assert any("linear" in key for block in report.plan.blocks for key in block.labels)
