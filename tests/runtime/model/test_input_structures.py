"""Batches in the structure that the model takes: nested, dataclasses, with inputs that are no tensors."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from input_models import Logits, OfDataclass, Unknown, WithFlags, built, cases, loss_on_one_device, tensors

from autopar.api import parallelize
from autopar.capture.any_size import capture
from autopar.capture.program import capture_program
from autopar.capture.request import Request
from autopar.errors import CaptureError, InputError, RuntimeInputError
from autopar.runtime.model.inputs import read_batch, rows_of_rank
from autopar.testing import check_equivalence


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """`parallelize` makes a world of one rank, which would keep other checks from theirs."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", cases())
def test_every_structure_trains_as_on_one_device(name: str) -> None:
    kind, inputs, loss_fn = cases()[name]
    check_equivalence(built(kind), inputs, tp=2, dp=2, loss_fn=loss_fn)
    parallel = parallelize(built(kind), "1xcpu", example_inputs=inputs, plan={"dp": 1}, loss_fn=loss_fn)
    for seed in range(2):
        _, batch, _ = cases(seed=seed)[name]
        expected = loss_on_one_device(built(kind), batch, loss_fn).detach()
        torch.testing.assert_close(parallel.forward_backward(batch), expected)
        torch.testing.assert_close(parallel.evaluate(batch)["loss"], expected)
        found = parallel(**batch) if isinstance(batch, dict) else parallel(*batch)
        torch.testing.assert_close(found.detach().as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("name", cases())
def test_the_rows_of_a_rank_keep_the_structure(name: str) -> None:
    kind, inputs, loss_fn = cases(rows=8)[name]
    program = capture_program(built(kind), inputs, loss_fn=loss_fn)
    parts = [rows_of_rank(program, inputs, index, 2) for index in range(2)]
    assert all(type(part) is type(inputs) for part in parts)
    whole = read_batch(program, inputs, 8, any_shape=False)
    assert not whole.problems
    read = [read_batch(program, part, 4, any_shape=True) for part in parts]
    for input_name, tensor in whole.tensors.items():
        assert torch.equal(torch.cat([part.tensors[input_name] for part in read]), tensor)


def test_inputs_have_their_path_as_name() -> None:
    kind, inputs, _ = cases()["nested"]
    program = capture_program(built(kind), inputs)
    assert [info.name for info in program.inputs] == ["batch.image.x", "batch.offsets.0", "batch.target"]
    assert program.fixed == {"batch.offsets.1": "'unused'"}


@pytest.mark.parametrize(
    ("changed", "named"),
    (
        ({"scale": 3.0}, "input 'scale' is no tensor, so it is a constant of the captured model: 2.0 during capture"),
        ({"mode": "mean"}, "'sum' during capture, now 'mean'"),
        ({"more": 1}, "unknown input 'more'"),
    ),
)
def test_a_constant_that_changes_is_refused(changed: dict[str, Any], named: str) -> None:
    _, inputs, _ = cases()["flags"]
    parallel = parallelize(built(WithFlags), "1xcpu", example_inputs=inputs, plan={"dp": 1})
    with pytest.raises(RuntimeInputError) as caught:
        parallel.forward_backward(inputs | changed)
    assert named in str(caught.value)
    without = {name: value for name, value in inputs.items() if name != "scale"}
    with pytest.raises(RuntimeInputError, match=r"input 'scale' is missing; it was 2\.0 during capture"):
        parallel.forward_backward(without)
    parallel.forward_backward(inputs)


def test_an_optional_input_may_come_and_go() -> None:
    _, inputs, _ = cases()["flags"]
    model, mask = built(WithFlags), {"mask": torch.rand(len(inputs["x"]), 1, dtype=torch.float64)}
    without = {name: value for name, value in inputs.items() if name != "mask"}
    for example in (inputs, inputs | mask):
        parallel = parallelize(copy.deepcopy(model), "1xcpu", example_inputs=example, plan={"dp": 1})
        for batch in (inputs, inputs | mask, without, {"mask": None} | without, mask | without):
            torch.testing.assert_close(parallel.forward_backward(batch), model(**batch), rtol=1e-12, atol=0.0)
    with pytest.raises(RuntimeInputError, match="unknown input 'masks'; did you mean 'mask'"):
        parallel.forward_backward(inputs | {"masks": mask["mask"]})


def test_a_constant_in_a_tuple_that_changes_is_refused() -> None:
    _, inputs, _ = cases()["flags in a tuple"]
    parallel = parallelize(built(WithFlags), "1xcpu", example_inputs=inputs, plan={"dp": 1})
    with pytest.raises(RuntimeInputError, match="input 'scale' is no tensor"):
        parallel.forward_backward((*inputs[:2], 3.0, *inputs[3:]))


def test_a_dataclass_that_torch_does_not_know_is_named() -> None:
    x, y, _ = tensors()
    with pytest.raises(InputError, match=r"call torch\.export\.register_dataclass\(Unknown\) once"):
        capture_program(built(OfDataclass), {"sample": Unknown(x, y)})


def test_a_missing_argument_of_the_loss_is_named() -> None:
    x, y, _ = tensors()
    _, _, weighted = cases()["three arguments"]
    with pytest.raises(CaptureError, match="loss_fn needs 'weight'"):
        capture_program(built(Logits), {"x": x, "target": y}, loss_fn=weighted)


def test_several_losses_without_a_sum_name_the_sum() -> None:
    kind, inputs, _ = cases()["several losses"]
    with pytest.raises(CaptureError, match=r"loss_fn=lambda output: sum\(output\.values\(\)\)"):
        capture_program(built(kind), inputs)


def test_constants_are_in_the_program_of_every_size() -> None:
    kind, inputs, _ = cases()["flags"]
    captured = capture(Request.of(built(kind), inputs))
    assert captured.at(batch=8).fixed == {"scale": "2.0", "mask": "None", "mode": "'sum'"}
