"""Who sums the gradient of each parameter on each mesh dimension: exactly one, or nobody where nobody has to."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import tiny_models
from equivalence import Case, case_of, labelled
from gradient_check import gradient_table
from random_labels import random_labels

from autopar.errors import VerificationError
from autopar.ir.plan import BlockLabels
from autopar.ir.sharding import I, Mesh, R, S
from autopar.ir.storage import storage_of
from autopar.lowering import functions
from autopar.lowering.local_graph import LocalGraph, local_graph

MODELS = {"llama": tiny_models.llama, "gpt2": tiny_models.gpt2}
MESH = Mesh.of(dp=2, tp=2)


@cache
def the_case(model: str) -> Case:
    return case_of(MODELS[model](2))


def blocks(case: Case, labels: tuple[BlockLabels, ...], mesh: Mesh = MESH, **how: bool) -> list[LocalGraph]:
    analysis = case.analysis(mesh)
    return [local_graph(analysis, b, i, labels[i], mesh, **how) for i, b in enumerate(case.program.blocks)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("how", [{}, {"fuse": True}, {"regather": True}], ids=["apart", "keep", "regather"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sp"])
@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_summed_once(model: str, sequence_parallel: bool, how: dict[str, bool], zero: int) -> None:
    case = the_case(model)
    rows = gradient_table(case.program, blocks(case, labelled(case, MESH, sequence_parallel), **how), MESH, zero=zero)
    assert Counter((r.parameter, r.mesh_dim) for r in rows) == {
        (name, dim): 1 for name in case.program.parameters for dim in MESH.names
    }
    assert {r.summed_by for r in rows if r.mesh_dim == "dp"} == {"ZeRO" if zero else "deferred sum"}
    norms = {r.summed_by for r in rows if r.mesh_dim == "tp" and ("norm" in r.parameter or "ln_" in r.parameter)}
    assert norms == {"deferred sum" if sequence_parallel else "nobody"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_random_labels_and_what_is_deferred(model: str, seed: int) -> None:
    """The table agrees with what the runtime defers; on one mesh dimension an operator sums for every `I -> R`."""
    case = the_case(model)
    labels = random_labels(case.program, case.analysis(MESH), MESH, seed)
    rows = gradient_table(case.program, blocks(case, labels), MESH)
    for row in rows:
        dims = case.analysis(MESH).outer[row.parameter]
        types = tuple(row.stored if name == row.mesh_dim else I for name in MESH.names)
        deferred = storage_of(dims, types, MESH).deferred
        assert (row.summed_by == "deferred sum") == (row.mesh_dim in deferred)
        assert (row.stored.kind == "R") == (row.summed_by == "deferred sum")
        assert row.stored.kind == "I" or row.summed_by != "operator"


def test_a_sum_by_an_operator_is_named() -> None:
    case, mesh = the_case("llama"), Mesh.of(dp=1, tp=2)
    labels = labelled(case, mesh, True)
    whole = tuple(
        replace(b, ports={n: tuple(I if "norm" in n and t == R else t for t in ts) for n, ts in b.ports.items()})
        for b in labels
    )
    rows = gradient_table(case.program, blocks(case, whole, mesh), mesh)
    norm = next(r for r in rows if r.parameter == "model.norm.weight")
    assert (norm.summed_by, norm.stored) == ("operator", I)
    assert norm.reason == "invariant_to_replicate in backward"
    text = "model.norm.weight on tp: stored as I, summed by operator (invariant_to_replicate in backward)"
    assert text in {str(row) for row in rows}


def test_a_missing_sum_is_refused() -> None:
    """`I -> R` without its conversion: each rank's gradient is a part, and nobody sums the parts."""
    case, mesh = the_case("llama"), Mesh.of(dp=1, tp=2)
    labels = labelled(case, mesh, True)
    whole = tuple(
        replace(b, ports={n: tuple(I if "norm" in n and t == R else t for t in ts) for n, ts in b.ports.items()})
        for b in labels
    )
    generated = blocks(case, whole, mesh)
    graph = generated[-1].graph
    node = next(n for n in graph.nodes if n.target is functions.invariant_to_replicate and "norm" in str(n.args[0]))
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    with pytest.raises(VerificationError, match=r"norm\.weight on tp: stored as I, but a use returns .* partial"):
        gradient_table(case.program, generated, mesh)


def test_a_sum_too_many_is_refused() -> None:
    """ZeRO sums over `dp`: a parameter stored as invariant there would be counted once per rank."""
    case = the_case("gpt2")
    labels = random_labels(case.program, case.analysis(MESH), MESH, 0)
    with pytest.raises(VerificationError, match="ZeRO sums it again"):
        gradient_table(case.program, blocks(case, labels), MESH, zero=3)


def test_a_tied_parameter_has_one_storage() -> None:
    case = the_case("gpt2")
    generated = blocks(case, labelled(case, MESH))
    port = next(n for n, t in generated[-1].ports.items() if "wte" in n)
    moved = replace(generated[-1], ports={**generated[-1].ports, port: (S(1), S(0))})
    with pytest.raises(VerificationError, match="stored as"):
        gradient_table(case.program, [*generated[:-1], moved], MESH)
