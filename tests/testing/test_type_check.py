"""The global type check accepts the labeller's plans at every size, and refuses wrong ones."""

from functools import cache

import pytest
import routed_models
import tiny_models
import torch
from equivalence import Case, case_of, labelled
from random_labels import random_labels
from suites import long
from type_check import check_generated, type_report

from autopar.capture.analysis import analyse
from autopar.capture.program import capture_program
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.lowering.local_graph import local_graph
from autopar.search.labels.solve import label

pytest.importorskip("spmd_types")
MODELS = {"llama": tiny_models.llama, "gpt2": tiny_models.gpt2}


@cache
def the_case(model: str) -> Case:
    return case_of(MODELS[model](4))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sp"])
@pytest.mark.parametrize("regather", [False, True], ids=["keep", "regather"])
@pytest.mark.parametrize("model", MODELS)
def test_labels_of_the_solver_are_accepted(model: str, regather: bool, sequence_parallel: bool) -> None:
    case, mesh = the_case(model), Mesh.of(dp=2, tp=4)
    labels = labelled(case, mesh, sequence_parallel, regather=regather)
    report = type_report(case.program, case.analysis(mesh), labels, mesh, regather=regather)
    if not regather:
        fused = [
            local_graph(case.analysis(mesh), block, i, labels[i], mesh, device="meta", fuse=True, join=False)
            for i, block in enumerate(case.program.blocks)
        ]
        assert check_generated(case.program, case.analysis(mesh), fused, mesh).passed
    assert report.passed, str(report)
    assert report.num_conversions >= 5
    assert report.num_operators > len(report.regions)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sp"])
def test_routing_to_experts_is_accepted(sequence_parallel: bool) -> None:
    case, mesh = case_of(routed_models.example("sort_and_inverse", more=routed_models.z_loss)), Mesh.of(dp=2, tp=2)
    report = type_report(case.program, case.analysis(mesh), labelled(case, mesh, sequence_parallel), mesh)
    assert report.passed, str(report)
    assert report.counts()["expert_product: rows sorted by each rank"] == 2


@pytest.mark.parametrize("mesh", [long(Mesh.of(tp=4)), Mesh.of(dp=2, tp=2), long(Mesh.of(tp=2, tq=2))], ids=str)
@pytest.mark.parametrize("seed", (0, long(1)))
@pytest.mark.parametrize("model", MODELS)
def test_random_labels_are_accepted(model: str, mesh: Mesh, seed: int) -> None:
    case = the_case(model)
    analysis = case.analysis(mesh)
    report = type_report(case.program, analysis, random_labels(case.program, analysis, mesh, seed), mesh)
    assert report.passed, str(report)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sp"])
@pytest.mark.parametrize(("dp", "tp"), [(128, 8), (64, 16)])
def test_llama_at_real_sizes_and_up_to_1024_ranks(dp: int, tp: int, sequence_parallel: bool) -> None:
    """Layers of a 70B Llama (four of its 80, which are all the same block) on meta."""
    program = big_llama(dp)
    degrees = Degrees(dp_shard=dp, tp=tp, sequence_parallel=sequence_parallel)
    analysis = analyse(program, degrees.mesh)
    labels = label(program, analysis, degrees, ClusterSpec.preset("8xh100")).blocks
    report = type_report(program, analysis, labels, degrees.mesh, regather=True)
    assert report.passed, str(report)
    assert report.mesh.size == dp * tp
    assert set(report.counts()) <= {
        "constant_pad_nd: view of a shard",
        "expand: view of a shard",
        "reshape: view of a shard",
        "slice: view of a shard",
        "vocab_parallel_cross_entropy_sum: rewritten for a split vocabulary or sequence",
        "vocab_parallel_embedding: rewritten for a split vocabulary or sequence",
    }


@cache
def big_llama(batch: int) -> Program:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=4,
        num_attention_heads=64,
        num_key_value_heads=16,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(2, 512, dtype=torch.long)
    return capture_program(model, {"input_ids": ids, "labels": ids.clone()}, batch=batch)


def test_the_report_says_what_was_taken_as_declared() -> None:
    case, mesh = the_case("gpt2"), Mesh.of(dp=1, tp=4)
    report = type_report(case.program, case.analysis(mesh), labelled(case, mesh, False), mesh)
    text = str(report)
    assert f"{len(report.regions)} regions taken as declared" in text
    assert sum(report.counts().values()) == len(report.regions)
    pieces = [r for r in report.regions if r.operator == "slice" and r.block.startswith("transformer")]
    assert len(pieces) == 3  # query, key and value of the packed projection
    assert "vocab_parallel_embedding" in text
