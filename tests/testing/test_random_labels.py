"""Random labels at every operator of a whole model against one device: the fastest way to a wrong rule."""

from functools import cache

import pytest
import tiny_models
from equivalence import Case, case_of, check_random
from suites import long

from autopar.ir.sharding import Mesh

MODELS = {"llama": tiny_models.llama, "gpt2": tiny_models.gpt2, "mlp": tiny_models.mlp}


@cache
def the_case(model: str, degree: int, batch: int = 4) -> Case:
    return case_of(MODELS[model](degree, batch=batch))


@pytest.mark.parametrize("seed", [0, long(1)])
@pytest.mark.parametrize("degree", [long(2), 3, long(4)])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_one_mesh_dimension(model: str, degree: int, seed: int) -> None:
    check_random(the_case(model, degree, 3 if degree == 3 else 4), Mesh.of(tp=degree), seed)


@pytest.mark.parametrize("model", ["llama", long("gpt2")])
def test_eight_ranks(model: str) -> None:
    check_random(the_case(model, 8), Mesh.of(tp=8), 0)


@pytest.mark.parametrize("seed", [0, long(1)])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_two_mesh_dimensions(model: str, seed: int) -> None:
    check_random(the_case(model, 4), Mesh.of(dp=2, tp=2), seed)


@pytest.mark.parametrize("mesh", [long(Mesh.of(tp=2, tq=2)), Mesh.of(tp=2, tq=3), long(Mesh.of(dp=2, tp=4))], ids=str)
@pytest.mark.parametrize("model", [long("llama"), "gpt2"])
def test_two_dimensions_that_both_split_activations(model: str, mesh: Mesh) -> None:
    check_random(the_case(model, 6 if 3 in mesh.degrees else 4), mesh, 0)


@pytest.mark.parametrize("seed", range(4))
def test_regathering_and_random_labels(seed: int) -> None:
    check_random(the_case("mlp", 2), Mesh.of(dp=2, tp=2), seed, regather=True)
    check_random(the_case("mlp", 2), Mesh.of(dp=2, tp=2), seed, fuse=True)


@pytest.mark.parametrize("seed", range(4))
def test_mean_losses(seed: int) -> None:
    check_random(the_case("mlp", 2), Mesh.of(tp=4), seed)
