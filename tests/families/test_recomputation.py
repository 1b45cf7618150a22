"""Selective, full and mixed recomputation over real ranks: five families that differ in kind, against one device."""

from itertools import product
from types import ModuleType

import pytest
from suites import thinned

pytest.importorskip("transformers")

FAMILIES = ("llama", "gpt2", "mixtral", "t5", "convnext")
PLANS = (
    "selective",
    "full",
    "1 block full, 1 selective",
    "selective, tp=2, sequence",
    "selective, tp=2 × dp=2, ZeRO 1",
    "selective, tp=2 × dp=2, ZeRO 2",
    "selective, tp=2 × dp=2, ZeRO 3",
    "full, tp=2 × dp=2, ZeRO 3",
    "selective, pp=2 × tp=2",
    "selective, pp=2, interleaved-zero-bubble",
    "stages of their own, pp=2 × dp=2, ZeRO 3",
    "selective, 4 chunks of the loss, tp=2",
)
SHORT = {
    ("llama", "selective, tp=2 × dp=2, ZeRO 3"),
    ("gpt2", "stages of their own, pp=2 × dp=2, ZeRO 3"),
    ("convnext", "selective, tp=2 × dp=2, ZeRO 1"),
    ("llama", "selective, 4 chunks of the loss, tp=2"),
}


@pytest.mark.parametrize(("family", "plan"), thinned(product(FAMILIES, PLANS), keep=SHORT))
def test_equal_to_one_device(tool: ModuleType, open_worlds: object, family: str, plan: str) -> None:
    table = tool.tables()["recomputation"]
    spec = table.spec(f"zoo:{family}", table.plans[plan])
    assert tool.worst_error(spec, table.plans[plan], open_worlds, table.check) <= tool.TOLERANCE


def test_every_plan_is_compared(tool: ModuleType) -> None:
    assert (tuple(tool.RECOMPUTATIONS), tool.RECOMPUTED_FAMILIES) == (PLANS, FAMILIES)
