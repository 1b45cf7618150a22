"""One-process equivalence with the solver's labels: all ranks here, float64, every gradient compared."""

from functools import cache

import pytest
import tiny_models
import torch
from equivalence import Case, case_of, check, labelled, run
from suites import long

from autopar._torch import private
from autopar.ir.sharding import Mesh

MODELS = {"llama": tiny_models.llama, "gpt2": tiny_models.gpt2}


@cache
def the_case(model: str, degree: int, batch: int = 4) -> Case:
    return case_of(MODELS[model](degree, batch=batch))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sp"])
@pytest.mark.parametrize("tp", [long(2), 3, long(4), long(8)])
@pytest.mark.parametrize("model", MODELS)
def test_tensor_parallel(model: str, tp: int, sequence_parallel: bool) -> None:
    case, mesh = the_case(model, tp), Mesh.of(dp=1, tp=tp)
    check(case, labelled(case, mesh, sequence_parallel), mesh)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sp"])
@pytest.mark.parametrize("mesh", [Mesh.of(dp=2, tp=2), long(Mesh.of(dp=2, tp=4))], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_with_data_parallel(model: str, mesh: Mesh, sequence_parallel: bool) -> None:
    case = the_case(model, 4)
    check(case, labelled(case, mesh, sequence_parallel), mesh)


@pytest.mark.parametrize("mesh", [long(Mesh.of(dp=4, tp=1)), Mesh.of(dp=3, tp=2)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_data_parallel_with_other_batches(model: str, mesh: Mesh) -> None:
    case = the_case(model, 2, batch=6 if mesh.degrees[0] == 3 else 4)
    check(case, labelled(case, mesh), mesh)


@pytest.mark.parametrize("sequence_parallel", [long(False), True], ids=["plain", "sp"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", ["regather", "fuse"])
def test_fused_gathers(model: str, sequence_parallel: bool, how: str) -> None:
    case, mesh = the_case(model, 4), Mesh.of(dp=2, tp=2)
    regather = how == "regather"
    labels = labelled(case, mesh, sequence_parallel, regather=regather)
    check(case, labels, mesh, regather=regather, fuse=True)


def test_a_finished_run_leaves_no_process_group() -> None:
    case, mesh = the_case("gpt2", 2), Mesh.of(dp=1, tp=2)
    run(case, labelled(case, mesh), mesh)
    assert not torch.distributed.is_initialized()
    assert not private.in_one_process()


def test_outputs_are_made_whole() -> None:
    case, mesh = the_case("gpt2", 2), Mesh.of(dp=2, tp=2)
    outcome = run(case, labelled(case, mesh), mesh)
    assert outcome.outputs.keys() == case.outputs.keys() == {"logits"}
    assert outcome.outputs["logits"].shape == case.outputs["logits"].shape
