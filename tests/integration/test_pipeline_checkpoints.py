"""State saved under one plan loads bit-equal under another, pipelines and tied weights included."""

from pathlib import Path
from typing import Any

import pytest
from integration_models import Wanted, planned

from autopar.ir.plan import Plan
from autopar.runtime.distributed.launch import Ranks

GLOBAL_BATCH = 8
PLANS: dict[str, dict[str, Any]] = {
    "tp × dp": {"tp": 2, "dp": 2, "zero": 3},
    "pp × dp": {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 2},
    "pp × tp": {"pp": 2, "tp": 2, "micro_batches": 2},
    "pp in a v": {"pp": 2, "dp": 2, "zero": 3, "schedule": "zbv-zero-bubble", "micro_batches": 4},
    "pp in dp": {"pp": 2, "dp": 2, "zero": 3, "micro_batches": 2, "order": "dp-pp-tp"},
    "four stages": {"pp": 4, "micro_batches": 2},
}


def with_plan(name: str) -> tuple[Wanted, Plan]:
    wish = PLANS[name]
    wanted = Wanted(spec="gpt2", layers=4, float64=True, batch=GLOBAL_BATCH // wish.get("dp", 1))
    return wanted, planned(wanted, 4, wish)[1]


@pytest.mark.long
@pytest.mark.parametrize("saving", PLANS)
def test_loads_bit_equal_under_another_plan(saving: str, four_ranks: Ranks, tmp_path: Path) -> None:
    names = list(PLANS)
    at = names.index(saving)
    loading = [names[(at + step) % len(names)] for step in (1, 2)]
    arguments = (with_plan(saving), [with_plan(name) for name in loading], str(tmp_path / "saved"))
    for found in four_ranks.run("pipeline_ranks:saved_and_loaded", *arguments):
        assert found == [[], []], dict(zip(loading, found, strict=True))
