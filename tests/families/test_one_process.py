"""Every family on every mesh in one process, the solver's labels against one device in float64, gradients too."""

from functools import cache

import pytest

pytest.importorskip("transformers")

import zoo
from equivalence import Case, case_of, check, labelled

from autopar.ir.sharding import Mesh

BATCH = 4
MESHES = {
    "tp=2": (Mesh.of(tp=2), None),
    "tp=4": (Mesh.of(tp=4), None),
    "tp=2 dp=2 sequence": (Mesh.of(dp=2, tp=2), True),
    "dp=4": (Mesh.of(dp=4), None),
}


@cache
def the_case(family: str) -> Case:
    return case_of(zoo.FAMILIES[family](BATCH))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_equal_to_one_device(family: str, mesh: str) -> None:
    case = the_case(family)
    degrees, sequence_parallel = MESHES[mesh]
    sequence_parallel = sequence_parallel if case.program.sequence else None
    check(case, labelled(case, degrees, sequence_parallel), degrees)
