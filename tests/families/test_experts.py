"""Expert parallelism in one process: every mixture equals one device under every way of dispatch."""

from functools import cache
from itertools import product

import pytest
from suites import long, thinned

pytest.importorskip("transformers")

import mixtures
from equivalence import Case, case_of, check, labelled

from autopar.errors import PlanError
from autopar.ir.degrees import DISPATCHES
from autopar.ir.plan import BlockLabels
from autopar.ir.sharding import Mesh
from autopar.lowering.experts import kept_choice, route_to_experts
from autopar.lowering.local_graph import local_graph
from autopar.rules.variants import BY_EXPERT

MESHES = {
    "ep=2": Mesh.of(ep=2),
    "ep=4": Mesh.of(ep=4),
    "dp=2 ep=2": Mesh.of(dp=2, ep=2),
    "ep=2 tp=2": Mesh.of(ep=2, tp=2),
    "ep=2 cp=2": Mesh.of(ep=2, cp=2),
}
WAYS = ("exchange", "gather", None)
SHORT = [("mixtral", "dp=2 ep=2", "exchange"), ("gpt_oss", "ep=2 tp=2", "gather"), ("llama4_text", "ep=4", None)]


@cache
def the_case(family: str) -> Case:
    return case_of(mixtures.example(family))


@pytest.mark.parametrize(("family", "mesh", "dispatch"), thinned(product(mixtures.FAMILIES, MESHES, WAYS), keep=SHORT))
def test_equal_to_one_device(family: str, mesh: str, dispatch: str | None) -> None:
    case, degrees = the_case(family), MESHES[mesh]
    labels = labelled(case, degrees, dispatch=dispatch)
    assert split_experts(labels, degrees)
    check(case, labels, degrees)


@pytest.mark.parametrize("routing", (mixtures.EMPTY, mixtures.ONE))
@pytest.mark.parametrize("dispatch", ("exchange", long("gather")))
def test_ranks_without_a_row(routing: str, dispatch: str) -> None:
    case, mesh = case_of(mixtures.routed("mixtral", routing)), Mesh.of(dp=2, ep=2)
    check(case, labelled(case, mesh, dispatch=dispatch), mesh)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_way_of_dispatch_is_that_of_all_operators(dispatch: str) -> None:
    mesh = Mesh.of(ep=2)
    labels = labelled(the_case("mixtral"), mesh, dispatch=dispatch)
    by_key = {key: label[0] for block in labels for key, label in block.labels.items() if ".experts" in key}
    rows = {key.rpartition(":")[0].rpartition(":")[2]: label for key, label in by_key.items()}
    assert rows["expert_product"].endswith(BY_EXPERT) == (dispatch != "whole")
    assert rows["expert_rows"].endswith(BY_EXPERT) == (dispatch == "gather")
    assert bool(split_experts(labels, mesh)) == (dispatch != "whole")


def test_experts_that_the_degree_does_not_divide_are_refused() -> None:
    mesh = Mesh.of(ep=3)
    case = case_of(mixtures.example("mixtral", batch=6))
    with pytest.raises(PlanError, match=r"8 experts are not divisible by ep=3.*nearest legal degrees 2 and 4"):
        labelled(case, mesh)


def test_every_route_starts_from_kept_choices() -> None:
    case, mesh, routes = the_case("mixtral"), Mesh.of(ep=2), 0
    labels, analysis = labelled(case, mesh, dispatch="exchange"), case.analysis(mesh)
    for index, block in enumerate(case.program.blocks):
        for node in local_graph(analysis, block, index, labels[index], mesh).graph.nodes:
            if node.target is route_to_experts:
                routes += 1
                assert node.args[1].target is kept_choice
    assert routes


def split_experts(labels: tuple[BlockLabels, ...], mesh: Mesh) -> list[str]:
    """The parameters that expert ranks split."""
    at = mesh.names.index("ep")
    every = [(port, types) for block in labels for port, types in block.ports.items() if "expert" in port]
    return [port for port, types in every if types[at].kind == "S"]
