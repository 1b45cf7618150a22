"""Logits and loss in chunks of tokens: every family that has a region, in one process against one device in float64."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from suites import thinned

pytest.importorskip("transformers")

import zoo
from equivalence import Case, case_of, labelled

from autopar.ir.degrees import Degrees
from autopar.lowering.loss_chunks import loss_in_chunks
from autopar.lowering.loss_region import why_whole
from autopar.testing.equivalence import TOLERANCE, compare_runs
from autopar.testing.one_process import generate_all, run_in_one_process

BATCH = 4
WITHOUT = ("clip", "mlp")  # a loss of similarities, and a mean square
IMAGES = ("vit", "resnet", "convnext", "mixer")  # labels for few classes convert the logits before the loss
FAMILIES = tuple(family for family in zoo.FAMILIES if family not in (*WITHOUT, *IMAGES))
MESHES = {
    "one rank": Degrees(),
    "tp=2": Degrees(tp=2, sequence_parallel=False),
    "tp=2 sequence": Degrees(tp=2, sequence_parallel=True),
    "tp=4 sequence": Degrees(tp=4, sequence_parallel=True),
    "tp=2 dp=2 sequence": Degrees(tp=2, dp_shard=2, sequence_parallel=True),
    "dp=4": Degrees(dp_shard=4),
}
CHUNKS = (3, 4)  # of 64 tokens: parts of unequal and of equal size
SHORT = {*product(("llama",), MESHES), *product(("gemma2", "gpt2", "t5"), ["tp=2 dp=2 sequence"])}


@cache
def the_case(family: str) -> Case:
    return case_of(zoo.FAMILIES[family](BATCH))


@pytest.mark.parametrize(("family", "mesh"), thinned(product(FAMILIES, MESHES), keep=SHORT))
def test_equal_to_one_device(family: str, mesh: str) -> None:
    case, degrees = the_case(family), MESHES[mesh]
    labels = labelled(case, degrees.mesh, degrees.sequence_parallel)
    analysis = case.analysis(degrees.mesh)
    assert why_whole(case.program, analysis, labels, degrees.mesh) is None
    for chunks in CHUNKS:
        given = case.program, analysis, labels, degrees.mesh
        blocks = generate_all(*given, outputs=False, fuse=True, regather=chunks == 3, loss_chunks=chunks)
        assert sum(node.target is loss_in_chunks for block in blocks for node in block.graph.nodes) == 1
        found = run_in_one_process(*given, case.parameters, case.inputs, case.buffers, generated=blocks, outputs=False)
        error = compare_runs(replace(case, outputs={}), found, degrees.mesh).worst_error
        assert error < TOLERANCE, (chunks, error)


@pytest.mark.parametrize("family", WITHOUT)
def test_families_without_a_region(family: str) -> None:
    case, degrees = the_case(family), MESHES["tp=2 sequence"]
    labels = labelled(case, degrees.mesh, True if case.program.sequence else None)
    assert why_whole(case.program, case.analysis(degrees.mesh), labels, degrees.mesh) is not None
