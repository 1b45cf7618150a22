"""Plans that store gathered inputs, on four gloo ranks, against one device in float64. One plan is a search's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from suites import thinned

import autopar
from autopar.commands.verify import Job, decide_plan, verify
from autopar.ir.plan import Plan
from autopar.models.load import resolve_model
from autopar.runtime.distributed.launch import Ranks

SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "seq_len": 16}
QUANTITIES = {"loss", "gradients", "clip norm", "parameters after AdamW"}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama3-8b", {"tp": 4}),
    ("gpt2", {"tp": 2, "dp": 2, "zero": 3, "accumulate": 2}),
    ("llama3-8b", {"tp": 2, "dp": 2, "zero": 1, "recompute": "full"}),
    ("llama3-8b", {"pp": 2, "tp": 2, "micro_batches": 2}),
    ("gpt2", {"pp": 2, "tp": 2, "micro_batches": 2, "schedule": "interleaved-zero-bubble"}),
)


def check(spec: str, plan: Plan, path: Path, ranks: Ranks, batch: int) -> None:
    assert not plan.regather
    plan.save(path)
    report = verify(spec, world_size=4, plan=str(path), batch=batch, steps=2, ranks=ranks, **SIZES)
    found = {one.name: one.max_error for one in report.quantities}
    assert report.passed and found.keys() >= QUANTITIES
    assert max(found[name] for name in QUANTITIES) <= 1e-9, found


@pytest.mark.parametrize(("spec", "wish"), thinned(CASES, keep=CASES[4:]))
def test_equals_the_single_device(spec: str, wish: dict[str, Any], tmp_path: Path, four_ranks: Ranks) -> None:
    job = Job(spec=spec, batch=4, dtype="float64", steps=2, seed=0, **SIZES)
    *_, plan = decide_plan(job, 4, wish | {"sequence_parallel": True}, None, lambda _: None)
    check(spec, replace(plan, regather=False), tmp_path / "plan.json", four_ranks, 4)


def test_a_plan_of_a_search(tmp_path: Path, four_ranks: Ranks) -> None:
    """On CPUs nothing is hidden, so that a second gather costs most."""
    made = resolve_model("llama3-8b", batch=1, dtype="float32", **SIZES)
    fix = {"tp": 2, "pp": 1, "sequence_parallel": True}
    found = autopar.plan(made.model, "4xcpu", example_inputs=made.example_inputs, global_batch=8, fix=fix)
    assert found.plan is not None
    degrees = found.plan.degrees
    check("llama3-8b", found.plan, tmp_path / "plan.json", four_ranks, (degrees.micro_batch or 0) * degrees.accumulate)
