"""Priced = run: the cost model's figures of a plan against one step on gloo ranks (docs/priced_is_run.md).

Calls and bytes of every collective are equal on every rank and mesh dimension; bytes of parameters, gradients,
optimizer state and of what autograd keeps within one percent.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from priced_models import CASES, RANKS, SHORT, Case, planned_case
from step_traffic import Ledger, Sends, StageTraffic, run_stage, sends_of
from suites import thinned

from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.dry_run.memory import memory_of
from autopar.runtime.dry_run.rank_view import RankView, rank_view

TOLERANCE = 0.01


# the dry run of all in SHORT is compared with prices, and that of these with a step
RUN = (SHORT[3], *SHORT[6:9:2], *SHORT[11:14:2], SHORT[16], SHORT[20])


@pytest.mark.parametrize("one", thinned(CASES, keep=RUN), ids=lambda one: one.name)
def test_priced_is_run(one: Case, worlds: Callable[[int], Ranks]) -> None:
    program, plan = planned_case(one)
    known: dict[object, StageTraffic] = {}
    for rank, (counts, memory) in enumerate(worlds(RANKS).run("priced_ranks:measured_step", one, plan)):
        setting = rank_view(program, plan, rank)
        runs = runs_of(setting, known)
        assert counts == as_operators(sends_of(setting, runs)), f"rank {rank}"
        held = memory_of(setting, runs)
        predicted = {
            "parameters": held.parameter_bytes,
            "gradients": held.gradient_bytes,
            "optimizer": held.optimizer_bytes,
            "saved": held.saved_bytes,
        }
        assert memory == {name: pytest.approx(size, rel=TOLERANCE) for name, size in predicted.items()}, f"rank {rank}"


def as_operators(sends: Sends) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes by mesh dimension and operator of torch. Exchanges and shifts are all-to-alls there."""
    ledger = Ledger()
    for (mesh_dim, kind), traffic in sends.items():
        ledger.add(mesh_dim, "all_to_all" if kind in ("exchange", "shift") else kind, traffic)
    return {key: (traffic.calls, traffic.bytes) for key, traffic in ledger.take().items()}


def test_every_plan_is_in_the_document() -> None:
    text = (Path(__file__).parents[2] / "docs" / "priced_is_run.md").read_text()
    assert [one.name for one in CASES if f"| {one.name} |" not in text] == []


def runs_of(setting: RankView, known: dict[object, StageTraffic]) -> dict[int, StageTraffic]:
    """One micro-batch of each of a rank's stages; ranks with equal parts of all parameters do the same."""
    found = {}
    for stage in setting.own_stages:
        key = stage.index, tuple(setting.own_shape(name) for name in stage.parameters)
        if key not in known:
            known[key] = run_stage(setting, stage)
        found[stage.index] = known[key]
    return found
