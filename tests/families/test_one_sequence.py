"""A step of one sequence over all ranks: written from a record of larger batches, against the unmodified model."""

from functools import cache
from itertools import product

import pytest
import torch
from suites import thinned

pytest.importorskip("transformers")

import zoo
from equivalence import Case, check, labelled
from floored_error import floored_error, rms

from autopar.capture import any_size
from autopar.capture.loss_arguments import named_outputs
from autopar.capture.request import Request
from autopar.ir.degrees import Degrees
from autopar.runtime.parameters.packed import join_packed
from autopar.runtime.verify.error_metrics import TOLERANCES
from autopar.runtime.verify.float64_program import promoted
from autopar.testing.equivalence import run_program

CAPTURED = 2
# batch norm has statistics of the batch, whose size is a number in the graph; the similarities of clip are of its pairs
FAMILIES = tuple(family for family in zoo.FAMILIES if family not in ("resnet", "clip"))
MESHES = {
    "one rank": Degrees(),
    "tp=2": Degrees(tp=2, sequence_parallel=False),
    "tp=2 sequence": Degrees(tp=2, sequence_parallel=True),
}
SHORT = {
    *product(("llama",), MESHES),
    *product(("mixtral", "gpt2", "gemma2", "t5"), ["tp=2 sequence"]),
}


@cache
def one_sequence(family: str) -> tuple[Case, torch.nn.Module]:
    """The first sequence on one device, by the program of a record that was captured at two."""
    model, inputs = zoo.FAMILIES[family](CAPTURED)
    captured = any_size.capture(Request.of(model, inputs))
    assert captured.has_one_sequence
    first = {name: value[:1] for name, value in inputs.items()}
    return run_program(promoted(captured.at(batch=1)), model, first), model


@pytest.mark.parametrize(("family", "mesh"), thinned(product(FAMILIES, MESHES), keep=SHORT))
def test_equal_to_one_device(family: str, mesh: str) -> None:
    (case, _), degrees = one_sequence(family), MESHES[mesh]
    wanted = degrees.sequence_parallel if case.program.sequence else None
    check(case, labelled(case, degrees.mesh, wanted), degrees.mesh)


@pytest.mark.parametrize("family", thinned(FAMILIES, keep=("llama", "mixtral", "gpt2")))
def test_the_program_is_the_model_at_one_sequence(family: str) -> None:
    case, model = one_sequence(family)
    model.zero_grad()
    loss = named_outputs(model(**case.inputs))["loss"]
    loss.backward()
    assert floored_error(case.loss, loss.detach(), 0.0) < TOLERANCES["float32"]
    scale = rms(case.gradients.values())
    gradients = join_packed(case.program, case.gradients)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert floored_error(parameter.grad, gradients[name], scale) < TOLERANCES["float32"], name
