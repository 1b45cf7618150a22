"""Capture: from a module to one flat graph, with errors that name module and source line."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from one_layer import OneLayer
from torch import nn

from autopar.capture.export.export import capture_flat
from autopar.capture.loss_arguments import named_outputs
from autopar.capture.program import capture_program
from autopar.capture.request import Request
from autopar.errors import CaptureError
from autopar.testing import check_equivalence

X = {"x": torch.zeros(4, 6)}


@pytest.mark.parametrize(
    ("finish", "outputs"),
    [
        (lambda y: y.sum(), set()),
        (lambda y: (y.sum(), y), {"output_1"}),
        (lambda y: (y, y.sum()), {"output_0"}),
        (lambda y: {"loss": y.sum(), "y": y}, {"y"}),
        (lambda y: {"loss": y.sum(), "other": y.mean(), "none": None}, {"other"}),
    ],
)
def test_the_loss_is_found(finish: Any, outputs: set[str]) -> None:
    program = capture_program(OneLayer(finish), X)
    assert set(program.outputs) == outputs
    assert program.loss not in program.outputs.values()


@pytest.mark.parametrize("finish", [lambda y: y, lambda y: (y.sum(), y.mean()), lambda y: {"y": y}])
def test_a_model_without_a_loss_is_refused(finish: Any) -> None:
    with pytest.raises(CaptureError, match="no loss"):
        capture_program(OneLayer(finish), X)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_what_does_not_export_is_named() -> None:
    model = OneLayer(lambda y: y.sum())
    model.layer = nn.Sequential(nn.Linear(6, 6), Branches())
    with pytest.raises(CaptureError, match=r"layer\.1.*Branches.*test_export\.py:\d+"):
        capture_program(model, X)


def test_no_tensor_and_only_scalars_are_refused() -> None:
    with pytest.raises(CaptureError, match="example_inputs"):
        capture_program(OneLayer(lambda y: y.sum()), {})
    with pytest.raises(CaptureError, match="batch"):
        capture_program(OneLayer(lambda y: y.sum()), {"x": torch.zeros(())})


def test_the_model_is_left_as_it_was() -> None:
    model, inputs = tiny_models.llama(2)
    model.eval()
    model.config.use_cache = True  # type: ignore[union-attr]
    before = {n: p.clone() for n, p in model.named_parameters()}
    capture_program(model, inputs)
    assert model.config.use_cache is True  # type: ignore[union-attr]
    assert not any(m.training for m in model.modules())
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_positional_inputs_are_named_by_forward() -> None:
    model, inputs = tiny_models.mlp(2)
    assert list(Request.of(model, tuple(inputs.values())).named_inputs) == ["x", "target"]
    by_name, by_position = capture_program(model, inputs), capture_program(model, tuple(inputs.values()))
    assert by_name.fingerprint == by_position.fingerprint


def test_meta_and_cpu_give_the_same_program() -> None:
    model, inputs = tiny_models.gpt2(2)
    on_cpu = capture_program(model, inputs)
    model.to("meta").tie_weights()  # type: ignore[operator]  # `to` unties what it makes anew
    on_meta = capture_program(model, {n: t.to("meta") for n, t in inputs.items()})
    assert on_cpu.fingerprint == on_meta.fingerprint


def test_a_plain_model_on_meta_takes_inputs_on_cpu() -> None:
    """Its products would meet tensors of two devices; transformers models move their labels, plain ones do not."""
    model, inputs = tiny_models.mlp(2)
    on_cpu = capture_program(model, inputs)
    assert on_cpu.fingerprint == capture_program(model.to("meta"), inputs).fingerprint


def test_tied_parameters_are_one() -> None:
    model, inputs = tiny_models.gpt2(2)
    program = capture_program(model, inputs)
    assert "lm_head.weight" not in program.parameters
    assert program.parameters["transformer.wte.weight"].aliases == ("lm_head.weight",)
    assert sum("transformer.wte.weight" in c.arguments for c in program.calls) == 2


def test_a_batch_size_can_be_given() -> None:
    model, inputs = tiny_models.llama(2)
    program = capture_program(model, inputs, batch=12)
    assert {i.name: i.shape[0] for i in program.inputs} == {"input_ids": 12, "labels": 12}
    assert program.batch == 12


def test_outputs_by_name() -> None:
    scalar, matrix = torch.zeros(()), torch.zeros(2, 2)
    assert list(named_outputs((matrix, scalar))) == ["output_0", "loss"]
    assert list(named_outputs({"loss": scalar, "cache": object()})) == ["loss"]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"loss": x, "y": x.detach()}])
def test_a_loss_may_have_one_element_in_a_dimension(wrap: Callable[[torch.Tensor], Any]) -> None:
    """As `loss + torch.zeros(1)` has. Autograd takes it."""
    loss = named_outputs(wrap(torch.full((1,), 3.0)))["loss"]
    assert loss.shape == () and loss.item() == 3.0


def test_placeholders_know_what_they_are() -> None:
    model, inputs = tiny_models.mlp(2)
    flat = capture_flat(Request.of(model, inputs))
    assert ("parameter", "up.weight") in flat.placeholders.values()
    assert ("input", "target") in flat.placeholders.values()
    assert flat.outputs[0] == "loss" or "loss" in flat.outputs


class Speech(nn.Module):
    """Classes over time, and targets of unequal lengths behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        log_probs = self.classes(x).log_softmax(-1).transpose(0, 1)
        times = torch.full_like(lengths, x.shape[1])
        return nn.functional.ctc_loss(log_probs, targets, times, lengths)


@pytest.mark.parametrize("tp", [1, 2])
def test_ctc_with_tensors_of_lengths(tp: int) -> None:
    inputs = {"x": torch.randn(4, 9, 6), "targets": torch.randint(1, 5, (4, 3)), "lengths": torch.tensor([3, 1, 2, 3])}
    check_equivalence(Speech(), inputs, tp=tp, dp=2)


class WithoutDevice(nn.Module):
    """Makes its tensors without a device, as a model for the CPU may."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.layer = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        mask = torch.tril(torch.ones(length, length))
        scale = torch.tensor([1.0, 0.5]).repeat(4)
        hidden = (mask / mask.sum(-1, keepdim=True)) @ (x + self.places(torch.arange(length))) * scale
        return self.layer(hidden + torch.rand(8)).square().mean()


@pytest.mark.parametrize("length", (4, 6))
def test_on_meta_tensors_without_a_device_are_where_the_model_is(length: int) -> None:
    """A model that runs is captured again without its weights: for another length, or in eval mode."""
    inputs = {"x": torch.randn(2, length, 8)}
    captured = capture_program(WithoutDevice(), inputs)
    again = capture_program(WithoutDevice().to("meta"), inputs)
    assert again.fingerprint == captured.fingerprint
