"""Every family cut into 2 to 8 stages: no call is lost or doubled, every stage has its inputs, results are equal."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from suites import thinned

pytest.importorskip("transformers")

import torch
import zoo
from equivalence import Case, case_of
from torch import fx

from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.program import Block
from autopar.ir.stages import Stage, ancestors, main_calls, separates, stages_of
from autopar.planning.machine import machinery_of
from autopar.runtime.codegen.execute import captured_modules, constant_values, graph_module
from autopar.search.pricing.recomputed_values import values_to_recompute
from autopar.search.pricing.stage_partition import partition


@cache
def the_case(family: str) -> Case:
    return case_of(zoo.FAMILIES[family](4))


def even_cuts(case: Case, parts: int) -> tuple[int, ...]:
    calls = [case.program.calls[i] for i in main_calls(case.program)]
    trained = [any(a in case.program.parameters for a in call.arguments) for call in calls]
    return partition([1.0] * len(calls), parts, can_be_alone=trained)


def some_results(block: Block, kept: Sequence[str]) -> fx.GraphModule:
    """A block's graph for some of its outputs."""
    graph, copies = fx.Graph(), {}
    needed = {node.name for node in ancestors(block, kept)}
    for node in block.graph.nodes:
        if node.op == "placeholder" or node.name in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    by_name = {node.name: copy for node, copy in copies.items()}
    graph.output(tuple(by_name[name] for name in block.outputs if name in kept))
    return graph_module(graph, "Some")


def run_in_stages(case: Case, stages: Sequence[Stage]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """One stage after the other on one device, each with nothing but what it has and receives."""
    program, modules = case.program, captured_modules(case.program)
    parameters = {n: p.detach().clone() for n, p in case.parameters.items()}
    for name, parameter in parameters.items():
        parameter.requires_grad_(program.parameters[name].requires_grad)
    constants = constant_values(program.constants, case.buffers, "cpu")
    base: dict[str, Any] = {**constants, **case.inputs, **{n: case.buffers[n] for n in program.updates}}
    for call in program.calls:
        if call.phase == "denominator":
            out = modules[call.block](*[base[a] if isinstance(a, str) else a for a in call.arguments])
            base.update(zip(call.results, out, strict=True))
    message: dict[str, Any] = {}
    every: dict[str, Any] = {}
    for stage in stages:
        assert tuple(message) == stage.receives
        scope = {**base, **{n: parameters[n] for n in stage.parameters}, **message}
        for i in sorted((*stage.again, *stage.calls)):
            call = program.calls[i]
            if i in stage.again:
                block = program.blocks[call.block]
                kept = [o for o, r in zip(block.outputs, call.results, strict=True) if r in stage.again[i]]
                given = [scope.get(a) if isinstance(a, str) else a for a in call.arguments]
                scope.update(zip(stage.again[i], some_results(block, kept)(*given), strict=True))
            else:
                given = [scope[a] if isinstance(a, str) else a for a in call.arguments]
                scope.update(zip(call.results, modules[call.block](*given), strict=True))
        message = {name: scope[name] for name in stage.sends}
        every |= scope
    every[program.loss].backward()
    return every, {n: p.grad for n, p in parameters.items() if p.grad is not None}


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.allclose(v, wanted[n], rtol=1e-12, atol=1e-12) for n, v in found.items()
    )


@pytest.mark.parametrize("family", thinned(zoo.FAMILIES, keep=("gpt2", "t5", "clip", "mixtral", "resnet")))
def test_nothing_is_lost_in_the_cut(family: str) -> None:
    case = the_case(family)
    program, most = case.program, 1
    for parts in range(2, 9):
        try:
            cuts = even_cuts(case, parts)
        except PlanError:
            break  # fewer blocks with parameters than stages
        most = parts
        degrees = Degrees(pp=parts, dp_shard=1, micro_batches=2)
        machine = machinery_of(ClusterSpec.preset(f"{parts}xcpu"), None, "fp32").machine
        recomputed = values_to_recompute(program, case.analysis(degrees.mesh), cuts, degrees, machine)
        for chosen in {(), recomputed}:
            stages = stages_of(program, cuts, chosen)
            assert [i for stage in stages for i in stage.calls] == main_calls(program)
            values, gradients = run_in_stages(case, stages)
            torch.testing.assert_close(values[program.loss].detach(), case.loss, rtol=1e-12, atol=1e-12)
            assert same(gradients, case.gradients)
    assert most >= 2


def test_cuts_and_values_that_cannot_be_are_refused() -> None:
    program = the_case("t5").program
    with pytest.raises(PlanError, match="empty stage"):
        stages_of(program, (2, 2))
    stages = stages_of(program, even_cuts(the_case("t5"), 3))
    weights = next(r for c in program.calls if c.phase == "main" for r in c.results)
    with pytest.raises(PlanError, match=r"neither an input nor a constant|not made by any call"):
        stages_of(program, even_cuts(the_case("t5"), 3), (stages[2].receives[0], weights))


def test_stages_whose_backward_pass_separates() -> None:
    """Llama's do where nothing is computed again; T5's do not where a table of positions, used by every layer, is not
    made of what was received."""
    case = the_case("llama")
    assert all(separates(case.program, stage, ()) for stage in stages_of(case.program, even_cuts(case, 4)))
    stages = stages_of(case.program, even_cuts(case, 4))
    recomputed = stages[1].calls[:1]
    assert [separates(case.program, stage, recomputed) for stage in stages] == [True, False, True, True]
    case = the_case("t5")
    found = [separates(case.program, stage, ()) for stage in stages_of(case.program, even_cuts(case, 4))]
    assert found[0] and not all(found)
