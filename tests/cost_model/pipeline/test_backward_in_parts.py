"""A backward pass in parts sends the same as a whole one, each collective once. With recomputation it is whole."""

from dataclasses import replace
from typing import Any

import pytest
from suites import long

pytest.importorskip("transformers")

from step_traffic import run_stage

from autopar.capture.request import Request
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.models.load import resolve_model
from autopar.planning.fixed import capture_for, label_plan
from autopar.runtime.dry_run.rank_view import rank_view

CLUSTER = ClusterSpec.preset("4xh100")


def recomputing(plan: Plan) -> Plan:
    return replace(plan, degrees=replace(plan.degrees, recompute="full"))


@pytest.mark.parametrize("regather", (True, False))
@pytest.mark.parametrize(
    ("model", "wish"),
    (
        long("llama3-8b", {"schedule": "interleaved-zero-bubble"}),
        ("gpt2", {"schedule": "zbv-zero-bubble", "virtual_stages": 2, "micro_batches": 4}),
        ("llama3-8b", {"schedule": "dualpipev", "virtual_stages": 2, "micro_batches": 4}),
    ),
)
def test_sends_once(model: str, wish: dict[str, Any], regather: bool) -> None:
    degrees = Degrees(**{"pp": 2, "tp": 2, "micro_batches": 2, "micro_batch": 2, "sequence_parallel": True, **wish})
    resolved = resolve_model(model, layers=6, hidden=64, seq_len=16, batch=2, dtype="float32")
    program = capture_for(Request.of(resolved.model, resolved.example_inputs), degrees)
    plan = replace(label_plan(program, CLUSTER, degrees, model), regather=regather)
    setting = rank_view(program, plan, 2)  # of the last pipeline rank
    in_parts = [stage for stage in setting.own_stages if setting.splits_backward(stage)]
    assert in_parts
    for stage in in_parts:
        assert not rank_view(program, recomputing(plan), 2).splits_backward(stage)
        run = run_stage(setting, stage)
        assert run.backward
        assert run.backward_in_parts == run.backward
