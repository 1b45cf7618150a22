"""Planted errors: a graph with one thing wrong is refused by the type check or differs in one process. None passes."""

from dataclasses import replace
from functools import cache

import pytest
import tiny_models
import torch
from equivalence import TOLERANCE, Case, case_of, check, labelled, run, worst
from gradient_check import gradient_table
from planted import UNTYPED, Mutation, planted
from suites import long, thinned
from torch import fx
from type_check import check_generated

from autopar.errors import VerificationError
from autopar.ir.plan import BlockLabels
from autopar.ir.sharding import I, Mesh, R
from autopar.lowering import functions
from autopar.lowering.local_graph import LocalGraph, local_graph

# sizes at which a wrong dimension keeps every shape: batch, sequence and degrees divide each other
PLANS = {
    "llama tp=2 with sequence parallelism": ("llama", Mesh.of(dp=1, tp=2), True),
    "llama dp=2 tp=2": ("llama", Mesh.of(dp=2, tp=2), False),
    "gpt2 tp=2 with sequence parallelism": ("gpt2", Mesh.of(dp=1, tp=2), True),
}


@cache
def the_case(model: str) -> Case:
    return case_of({"llama": tiny_models.llama, "gpt2": tiny_models.gpt2}[model](2, batch=4, sequence=4))


@cache
def the_labels(model: str, mesh: Mesh, sequence_parallel: bool) -> tuple[BlockLabels, ...]:
    return labelled(the_case(model), mesh, sequence_parallel)


def generate_blocks(case: Case, labels: tuple[BlockLabels, ...], mesh: Mesh) -> list[LocalGraph]:
    analysis = case.analysis(mesh)
    return [local_graph(analysis, block, i, labels[i], mesh) for i, block in enumerate(case.program.blocks)]


def caught_by(
    case: Case, labels: tuple[BlockLabels, ...], mesh: Mesh, block: int, mutate: Mutation, typed: bool
) -> str:
    """Which check sees an error planted into a block, "" for none. `typed`: whether to ask the type check."""
    generated = generate_blocks(case, labels, mesh)
    copy = fx.Graph()
    copy.output(copy.graph_copy(generated[block].graph, {}))
    mutate(generated[block].graph)
    generated[block].graph.lint()
    if typed and not check_generated(case.program, case.analysis(mesh), generated, mesh).passed:
        return "types"
    error = worst(case, run(case, labels, mesh, generated=generated))
    return "one process" if error > 1e3 * TOLERANCE else ""


@pytest.mark.parametrize("plan", thinned(PLANS, keep=("llama dp=2 tp=2",)))
def test_every_planted_error_is_caught(plan: str) -> None:
    model, mesh, sequence_parallel = PLANS[plan]
    case, labels = the_case(model), the_labels(model, mesh, sequence_parallel)
    check(case, labels, mesh)
    found: dict[str, str] = {}
    for block, generated in enumerate(generate_blocks(case, labels, mesh)):
        for what, mutate in planted(generated):
            typed = not what.endswith(UNTYPED)
            found[f"{case.program.blocks[block].name}, {what}"] = caught_by(case, labels, mesh, block, mutate, typed)
    missed = [what for what, by in found.items() if not by]
    assert not missed, missed
    assert len(found) >= 10
    assert set(found.values()) == {"types", "one process"}


@pytest.mark.parametrize("model", [long("llama"), "gpt2"])
def test_one_process_alone_catches_every_dropped_or_doubled_sum(model: str) -> None:
    mesh = Mesh.of(dp=1, tp=2)
    case, labels = the_case(model), the_labels(model, mesh, False)
    missed = []
    for block, generated in enumerate(generate_blocks(case, labels, mesh)):
        for what, mutate in planted(generated):
            if what.endswith(("dropped", "doubled")) and not caught_by(case, labels, mesh, block, mutate, False):
                missed.append(what)
    assert not missed


def test_dropped_sums_of_norm_gradients_are_caught() -> None:
    """The loss stays exact: only gradients tell. A norm weight stored as invariant says that nobody has to sum."""
    mesh = Mesh.of(dp=1, tp=2)
    case, labels = the_case("llama"), the_labels("llama", mesh, True)
    generated = generate_blocks(case, labels, mesh)
    deferred = [r for r in gradient_table(case.program, generated, mesh) if r.summed_by == "deferred sum"]
    assert {r.parameter.split(".")[-2] for r in deferred} == {"input_layernorm", "post_attention_layernorm", "norm"}
    wrong = tuple(
        replace(b, ports={n: tuple(I if "norm" in n and t == R else t for t in ts) for n, ts in b.ports.items()})
        for b in labels
    )
    assert wrong != labels
    claimed = [replace(g, ports=w.ports) for g, w in zip(generated, wrong, strict=True)]
    outcome = run(case, wrong, mesh, generated=claimed)
    assert abs(float(outcome.loss - case.loss)) < TOLERANCE
    assert worst(case, outcome) > 1e-3
    with pytest.raises(VerificationError, match="layernorm"):
        gradient_table(case.program, claimed, mesh)


@pytest.mark.parametrize("pair", [("k_proj", "v_proj"), ("gate_proj", "up_proj")])
def test_swapped_weights_are_caught(pair: tuple[str, str]) -> None:
    """Weights of one shape and type: no type check can tell them apart."""
    mesh = Mesh.of(dp=1, tp=2)
    case, labels = the_case("llama"), the_labels("llama", mesh, True)
    generated = generate_blocks(case, labels, mesh)
    graph = next(g.graph for g in generated if any(pair[0] in n.name for n in g.graph.nodes))
    first, second = (next(n for n in graph.nodes if n.op == "placeholder" and name in n.name) for name in pair)
    users = {node: list(node.users) for node in (first, second)}
    for node, other in ((first, second), (second, first)):
        for user in users[node]:
            user.args = tuple(other if a is node else a for a in user.args)
    assert check_generated(case.program, case.analysis(mesh), generated, mesh).passed
    assert worst(case, run(case, labels, mesh, generated=generated)) > 1e-3


@pytest.mark.parametrize("which", ["divisor", "no sum"])
def test_wrong_mean_is_caught(which: str) -> None:
    """A mean over a split dimension whose divisor, or whose sum over ranks, is forgotten."""
    case = case_of(tiny_models.mlp(2))
    mesh = Mesh.of(dp=2, tp=1)
    labels = labelled(case, mesh)
    check(case, labels, mesh)
    generated = generate_blocks(case, labels, mesh)
    graph = generated[-1].graph
    wanted = torch.ops.aten.div.Tensor if which == "divisor" else functions.all_reduce_to_invariant
    node = next(n for n in reversed(list(graph.nodes)) if n.target is wanted)
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    assert worst(case, run(case, labels, mesh, generated=generated)) > 1e-3
