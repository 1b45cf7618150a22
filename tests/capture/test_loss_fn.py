"""Models whose loss is outside: a function of (output, target)."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture.program import capture_program
from autopar.errors import CaptureError
from autopar.runtime.codegen.execute import run_reference


def model_and_batch() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double(), x, torch.tensor([0, 4, 1, 2])


LOSSES = {
    "module": nn.CrossEntropyLoss(),
    "weighted": nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0, dtype=torch.float64)),
    "function": F.cross_entropy,
    "own": lambda output, target: (output.softmax(-1)[:, 0] - target).abs().mean(),
}


@pytest.mark.parametrize("form", ["tuple", "mapping"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_that_of_the_output(loss: str, form: str) -> None:
    model, x, target = model_and_batch()
    inputs: Any = (x, target) if form == "tuple" else {"input": x, "target": target}
    program = capture_program(model, inputs, loss_fn=LOSSES[loss])
    assert [info.name for info in program.inputs] == ["input", "target"]
    assert program.outputs.keys() == {"output_0"}
    assert set(program.parameters) == {name for name, _ in model.named_parameters()}
    values = run_reference(program, dict(model.named_parameters()), {"input": x, "target": target}, {})
    assert torch.allclose(values[program.loss], LOSSES[loss](model(x), target), rtol=1e-13)


def test_a_mean_over_valid_targets_has_a_denominator() -> None:
    model, x, target = model_and_batch()
    program = capture_program(model, (x, target), loss_fn=nn.CrossEntropyLoss())
    assert program.denominators and program.mixes_batch is None


class WithTarget(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + target


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.scale * (output - target)).square().mean()


def test_what_cannot_be_is_refused() -> None:
    model, x, target = model_and_batch()
    cross_entropy = nn.CrossEntropyLoss()
    with pytest.raises(
        CaptureError, match=r"floating scalar tensor, it returned a torch.float64 tensor of shape \(4,\)"
    ):
        capture_program(model, (x, target), loss_fn=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(CaptureError, match=r"loss_fn needs a target after the model's inputs \['input'\]"):
        capture_program(model, (x,), loss_fn=cross_entropy)
    with pytest.raises(CaptureError, match=r"loss_fn needs a target: .*the key 'target'"):
        capture_program(model, {"input": x, "labels": target}, loss_fn=cross_entropy)
    with pytest.raises(CaptureError, match="loss_fn Learned has parameters"):
        capture_program(model, (x, x[:, :5]), loss_fn=Learned())
    with pytest.raises(CaptureError, match="has an input 'target' itself; pass example_inputs as a tuple"):
        capture_program(WithTarget().double(), {"x": x, "target": x}, loss_fn=F.mse_loss)
    with pytest.raises(CaptureError, match=r"returns no loss.*loss_fn"):
        capture_program(model, (x,))


def test_a_model_with_an_input_called_target() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    model = WithTarget().double()
    program = capture_program(model, (x, 2 * x, 3 * x), loss_fn=F.mse_loss)
    assert [info.name for info in program.inputs] == ["x", "target", "loss_target"]
    inputs = {"x": x, "target": 2 * x, "loss_target": 3 * x}
    loss = run_reference(program, dict(model.named_parameters()), inputs, {})[program.loss]
    assert torch.allclose(loss, F.mse_loss(model(x, 2 * x), 3 * x), rtol=1e-13)
