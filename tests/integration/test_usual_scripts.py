"""What training scripts do besides the loop: adapters, averages, optimizers, several models, generation, padding."""

from typing import Any

import pytest
from suites import long, thinned
from usual_ranks import CASES

from autopar.runtime.distributed.launch import Ranks

TOLERANCE = 1e-9
KEPT = (
    "adapted",
    "grouped optimizer adafactor foreach",
    "grouped clip norm foreach",
    "reentrant",
    "optimizer sgd fused",
)
PLANS = ({"tp": 2, "dp": 2, "zero": 3}, long({"tp": 2, "dp": 2, "zero": 1}), long({"tp": 4}))


@pytest.mark.parametrize("name", thinned(CASES, keep=KEPT))
@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_equal_to_one_device(wish: dict[str, Any], name: str, four_ranks: Ranks) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    assert max(four_ranks.run("usual_ranks:run", name, wish, 4)) < TOLERANCE
