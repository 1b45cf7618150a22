"""The explanation of a plan agrees with the generated code."""

from dataclasses import replace
from typing import Any

import pytest
from suites import long

pytest.importorskip("transformers")

from listed_conversions import listed_conversions
from planned import make_plan

from autopar.capture.analysis import analyse
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.models.load import resolve_model
from autopar.planning.degrees import resolve_degrees
from autopar.report.explain import summarise

CLUSTER = ClusterSpec.preset("4xcpu")


def planned(name: str, **degrees: Any) -> tuple[Program, Plan]:
    model = resolve_model(name, layers=3, hidden=64, seq_len=32, batch=4)
    wish = resolve_degrees(degrees, 4, 4)
    return make_plan(model.model, CLUSTER, model.example_inputs, wish, name=name)


def counts(plan: Plan, block: str, mesh_dim: str) -> dict[tuple[str, str], int]:
    assert plan.summary is not None
    found = next(b for b in plan.summary.blocks if b.name.startswith(block))
    return {(t.when, t.collective): t.count for t in found.traffic if t.mesh_dim == mesh_dim}


@pytest.mark.parametrize(("name", "block"), [("llama3-8b", "model.layers"), long("gpt2", "transformer.h")])
def test_decoder_block_has_megatrons_collectives(name: str, block: str) -> None:
    _, plain = planned(name, tp=4, sequence_parallel=False)
    assert counts(plain, block, "tp") == {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}
    _, split = planned(name, tp=4, sequence_parallel=True)
    assert counts(split, block, "tp") == {
        ("forward", "all_gather"): 2,
        ("forward", "reduce_scatter"): 2,
        ("backward", "all_gather"): 4,  # two of them gather again what the forward pass did not keep
        ("backward", "reduce_scatter"): 2,
    }


@pytest.mark.parametrize("degrees", [{"tp": 4}, {"tp": 2, "dp": 2}, {"dp": 4}])
@pytest.mark.parametrize("name", [long("llama3-8b"), "gpt2"])
def test_bytes_equal_those_of_the_cost_model(name: str, degrees: dict[str, int]) -> None:
    program, plan = planned(name, **degrees)
    plan = replace(plan, regather=False, summary=None)
    analysis = analyse(program, plan.mesh)
    listed = listed_conversions(program, analysis, plan.blocks, plan.mesh)
    for index, block in enumerate(summarise(program, analysis, plan, CLUSTER).blocks):
        if block.name in ("denominator", "epilogue"):  # a loss with collectives of its own, outputs that are dropped
            continue
        ours = sum(t.sent_bytes for t in block.traffic)
        assert ours == pytest.approx(sum(c.bytes for c in listed if c.block == index)), block.name


def test_explain_with_and_without_summary() -> None:
    program, plan = planned("llama3-8b", tp=2, dp=2)
    bare = replace(plan, summary=None)
    found = summarise(program, analyse(program, plan.mesh), bare, CLUSTER)
    assert replace(bare, summary=found).explain() == plan.explain()
    assert "no summary" in bare.explain()
    assert Plan.from_dict(bare.to_dict()) == bare
    assert all(block.name in plan.explain() for block in plan.blocks)


def test_parameters_are_listed_once_each() -> None:
    program, plan = planned("gpt2", tp=2, dp=2)
    assert plan.summary is not None
    assert sum(p.num_copies for p in plan.summary.parameters) == len(program.parameters)
    packed = next(p for p in plan.summary.parameters if "c_attn.weight" in p.name)
    assert packed.split["tp"] == "dimension 1, its second factor, in 2"
    assert packed.split["dp"] == "sharded over 2 (ZeRO-3)"
