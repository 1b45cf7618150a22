"""Priced = run: what the cost model says of a plan against one step of it on gloo ranks.

Calls and bytes of every collective are equal on every rank and mesh dimension; bytes of parameters, gradients,
optimizer state and of what autograd keeps within one percent.
"""

from collections.abc import Callable

import pytest
from priced_models import CASES, RANKS, Case, planned_case

from autopar.cost_model.local_run import Setting, run_stage
from autopar.cost_model.rank_memory import memory_of
from autopar.cost_model.traffic import sends_of
from autopar.runtime.launch import Ranks
from autopar.trace.analysis import analyse

pytestmark = pytest.mark.timeout(120)
TOLERANCE = 0.01


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_priced_is_run(one: Case, worlds: Callable[[int], Ranks]) -> None:
    program, plan = planned_case(one)
    analysis = analyse(program, plan.mesh)
    found = worlds(RANKS).run("priced_ranks:measured_step", one, plan)
    for rank, (counts, memory) in enumerate(found):
        setting = Setting(program, analysis, plan, rank)
        runs = {stage.index: run_stage(setting, stage) for stage in setting.own_stages}
        sends = {key: (traffic.calls, traffic.bytes) for key, traffic in sends_of(setting, runs).items()}
        assert counts == sends, f"rank {rank}"
        held = memory_of(setting, runs)
        predicted = {
            "parameters": held.parameter_bytes,
            "gradients": held.gradient_bytes,
            "optimizer": held.optimizer_bytes,
            "saved": held.saved_bytes,
        }
        for name, size in memory.items():
            assert predicted[name] == pytest.approx(size, rel=TOLERANCE), (rank, name, memory, predicted)
