"""Expressions of plans that store gathered inputs, against the graph run on tensors without data."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("transformers")


from step_traffic import StageTraffic, run_stage

from autopar.capture.request import Request
from autopar.cost_model.work.block_work import evaluate
from autopar.cost_model.work.program_costs import program_works
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.models.load import resolve_model
from autopar.planning.fixed import capture_for, choose_labels, label_plan
from autopar.runtime.dry_run.rank_view import rank_view

CLUSTER = ClusterSpec.preset("4xh100")
PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama3-8b", {"tp": 4}),
    ("llama3-8b", {"tp": 2, "dp_shard": 2}),
    ("gpt2", {"tp": 2, "dp_shard": 2}),
    ("llama3-8b", {"tp": 4, "recompute": "full"}),
)


@cache
def labelled(model: str, wish: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    degrees = Degrees(micro_batch=2, sequence_parallel=True, **dict(wish))
    resolved = resolve_model(model, layers=3, hidden=64, seq_len=16, batch=2, dtype="float32")
    program = capture_for(Request.of(resolved.model, resolved.example_inputs), degrees)
    return program, choose_labels(program, CLUSTER, degrees)


def run(program: Any, plan: Plan) -> StageTraffic:
    setting = rank_view(program, plan, 0)
    return run_stage(setting, setting.own_stages[0])


def sent(found: StageTraffic) -> dict[tuple[str, str], tuple[int, int]]:
    every = {*found.forward, *found.backward}
    parts = {key: [part[key] for part in (found.forward, found.backward) if key in part] for key in every}
    return {key: (sum(one.calls for one in ones), sum(one.bytes for one in ones)) for key, ones in parts.items()}


@pytest.mark.parametrize(("model", "wish"), PLANS)
def test_what_it_changes_is_what_runs(model: str, wish: dict[str, Any]) -> None:
    program, (degrees, analysis, labels) = labelled(model, tuple(wish.items()))
    plan = label_plan(program, CLUSTER, degrees, model, labelled=(degrees, analysis, labels))
    kept_plan = label_plan(program, CLUSTER, degrees, model, labelled=(degrees, analysis, labels), regather=False)
    assert kept_plan == replace(plan, regather=False, summary=kept_plan.summary)
    again, kept = run(program, plan), run(program, kept_plan)
    priced = {how: priced_of(program, analysis, labels, degrees, how) for how in (True, False)}
    more = kept.saved_bytes - again.saved_bytes
    assert more == priced[False][0] - priced[True][0] > 0
    changed = {key: (sent(again)[key][0] - n, sent(again)[key][1] - size) for key, (n, size) in sent(kept).items()}
    calls, size = priced[True][1][0] - priced[False][1][0], priced[True][1][1] - priced[False][1][1]
    assert calls > 0
    assert changed.pop(("tp", "all_gather")) == (calls, size)
    assert set(changed.values()) == {(0, 0)}
    assert [t.count for b in kept_plan.summary.blocks for t in b.traffic] != [
        t.count for b in plan.summary.blocks for t in b.traffic
    ]


def priced_of(program: Any, analysis: Any, labels: Any, degrees: Degrees, regather: bool) -> tuple[float, Any]:
    """Saved bytes of a micro-batch on a rank, and calls and operand bytes of its all-gathers over tensor ranks."""
    works = program_works(program, analysis, labels.blocks, degrees.mesh, regather=regather)
    assert works.regathers is regather
    numbers = {"b": 2, "s": 16, "S": 16, "t": degrees.tp, "d": degrees.dp, **degrees.mesh.as_dict()}
    saved = calls = size = 0.0
    for role in works.calls:
        if role:
            found = evaluate(works.family.block(role, "tp"), numbers)
            gathers = [one for one in found.sent if (one.mesh_dim, one.collective) == ("tp", "all_gather")]
            saved += found.saved_eager_bytes if degrees.recompute == "none" or role in ("first", "last") else 0.0
            calls += len(gathers)
            size += sum(one.whole_bytes for one in gathers) / degrees.tp
    return saved, (calls, size)
