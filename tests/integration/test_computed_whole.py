"""Operators that no degree divides are computed whole, and classifiers with a vocabulary: equal to one device."""

import json
from pathlib import Path

import colour_models
import pytest
from equivalence import case_of, check, labelled
from suites import long
from tiny_models import randomise

from autopar.capture.analysis import analyse
from autopar.capture.program import capture_program
from autopar.commands.verify import verify
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Degrees
from autopar.ir.sharding import Mesh
from autopar.models.load import resolve_model
from autopar.runtime.distributed.launch import Ranks
from autopar.search.labels.solve import label

MODELS = {"resnet": colour_models.colour_resnet, "lenet": colour_models.colour_lenet}


@pytest.mark.parametrize("mesh", [long(Mesh.of(dp=1, tp=2)), Mesh.of(dp=1, tp=4), Mesh.of(dp=2, tp=2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_three_channels_are_equal_to_one_device(name: str, mesh: Mesh) -> None:
    model, inputs = MODELS[name]()
    inputs["x"] = inputs["x"].double()
    case = case_of((randomise(model.double()), inputs))
    check(case, labelled(case, mesh), mesh)


def test_a_convolution_of_three_channels_is_split_by_its_outputs() -> None:
    program = capture_program(*colour_models.colour_resnet())
    found = label(program, analyse(program), Degrees(tp=4), ClusterSpec.preset("8xh100"))
    stem = next(block.labels for block in found.blocks if "conv1_weight" in block.ports)
    assert stem["conv1:conv2d:0"] == ("I", "o.0")
    assert found.added_work == 0


def test_an_operator_that_is_whole_is_noted_with_its_price() -> None:
    program = capture_program(*colour_models.colour_resnet())
    found = label(program, analyse(program), Degrees(tp=5), ClusterSpec.preset("8xh100"))
    assert any("is computed whole on every rank, because 5 does not divide" in note for note in found.notes)
    assert found.added_work > 0


def test_a_plain_sequence_of_layers_is_split_along_its_widths() -> None:
    program = capture_program(*colour_models.colour_lenet())
    found = label(program, analyse(program), Degrees(tp=4), ClusterSpec.preset("8xh100"))
    split = {key for block in found.blocks for key, (_, label) in block.labels.items() if "." in label}
    assert {"conv1:conv2d:0", "conv2:conv2d:0", "fc1:linear:0"} <= split


@pytest.mark.parametrize("factory", ["colour_resnet", long("colour_lenet"), long("text_classifier")])
def test_on_gloo_ranks(factory: str, four_ranks: Ranks) -> None:
    report = verify(
        f"colour_models:{factory}", world_size=4, degrees={"tp": 2, "dp": 2, "zero": 2}, ranks=four_ranks, steps=2
    )
    assert report.passed, report


def test_heads_that_no_degree_divides(four_ranks: Ranks, tmp_path: Path) -> None:
    """Three heads over four ranks."""
    config = dict(resolve_model("gpt2", layers=2, hidden=64).config or {}) | {"n_head": 3, "n_embd": 48}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    report = verify(str(path), world_size=4, degrees={"tp": 4}, seq_len=16, batch=2, steps=2, ranks=four_ranks)
    assert report.passed, report
    assert any("4 does not divide 3 heads; nearest legal degree 3" in note for note in report.plan.notes)
