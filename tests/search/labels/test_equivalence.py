"""Labelled programs compute the same as one device, forward and backward, in float64."""

from functools import cache

import pytest
import tiny_models
from equivalence import Case, case_of, check
from listed_conversions import listed_conversions
from suites import long, thinned
from torch import fx

from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.sharding import Mesh
from autopar.lowering.functions import conversion_of
from autopar.lowering.local_graph import local_graph
from autopar.search.labels.result import Labelling
from autopar.search.labels.solve import label

MODELS = {"llama": tiny_models.llama, "gpt2": tiny_models.gpt2, "mlp": tiny_models.mlp}
MESHES = [
    (Mesh.of(tp=2), 2), (Mesh.of(tp=3), 3), (Mesh.of(dp=2, tp=2), 2), (Mesh.of(dp=4, tp=1), 2),
    (Mesh.of(tp=2, tq=2), 4), (Mesh.of(dp=2, tp=2, tq=2), 4),
]  # fmt: skip


@cache
def the_case(model: str, degree: int) -> Case:
    return case_of(MODELS[model](degree))


def labels_of(case: Case, mesh: Mesh, sequence: bool | None) -> Labelling:
    degrees, cluster = Degrees(sequence_parallel=sequence), ClusterSpec.preset("8xcpu")
    return label(case.program, case.analysis(mesh), degrees, cluster, mesh=mesh)


@pytest.mark.parametrize("sequence", [None, long(False)])
@pytest.mark.parametrize(("mesh", "degree"), thinned(MESHES, keep=(MESHES[1], MESHES[2], MESHES[4])), ids=str)
@pytest.mark.parametrize("model", list(MODELS))
def test_equal_to_one_device(model: str, mesh: Mesh, degree: int, sequence: bool | None) -> None:
    case = the_case(model, degree)
    check(case, labels_of(case, mesh, sequence).blocks, mesh, regather=sequence is None)


@pytest.mark.parametrize("mesh", [Mesh.of(dp=2, tp=2), Mesh.of(tp=2, tq=2)], ids=str)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_listed_conversions_are_those_of_the_generated_code(model: str, mesh: Mesh) -> None:
    case = the_case(model, 4)
    found = labels_of(case, mesh, None)
    listed = listed_conversions(case.program, case.analysis(mesh), found.blocks, mesh)
    for index, block in enumerate(case.program.blocks):
        code = local_graph(case.analysis(mesh), block, index, found.blocks[index], mesh).graph
        assert sum(c.block == index for c in listed) == len(conversion_calls(code))


def conversion_calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if conversion_of(n.target) is not None]
