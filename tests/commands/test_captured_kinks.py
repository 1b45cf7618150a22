"""The unmodified model beside its captured program: dtypes may differ at a kink, and only there."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture.program import capture_program
from autopar.commands.unmodified import against_module
from autopar.ir.degrees import Degrees
from autopar.models.load import ResolvedModel
from autopar.runtime.verify.reference import Case, reference_steps
from autopar.runtime.verify.verify import in_dtype


class AtAKink(nn.Module):
    """The input of ReLU is 0 in float32 and 5e-17 in float64, whatever the last bits of the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(6))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tenth = torch.ones_like(x) * 0.1
        return (torch.relu(self.offset + (tenth * 3 - 0.3)) + self.layer(x).square()).mean()


@pytest.mark.parametrize("planted", [1.0, 1.5], ids=["right", "a wrong gradient"])
def test_other_gradients_at_a_kink_are_no_difference(planted: float) -> None:
    torch.manual_seed(0)
    model, x = AtAKink(), torch.randn(4, 6)
    program = in_dtype(capture_program(model, {"x": x}), "float64")
    source = dict(model.named_parameters()).__getitem__
    captured = reference_steps(Case(program, source, [{"x": x.double()}], Degrees()))
    assert captured.gradients["offset"].norm() > 0
    model(x).backward()
    assert model.offset.grad is not None and model.offset.grad.norm() == 0
    model.zero_grad()
    own = {name: value * (planted if name == "layer.bias" else 1.0) for name, value in captured.gradients.items()}
    resolved = ResolvedModel(name="kink", kind="factory", model=model, example_inputs={"x": x})
    case = Case(program, source, [{"x": x}], Degrees())
    quantities, notes = against_module(resolved, case, replace(captured, gradients=own))
    assert all(quantity.passed for quantity in quantities) == (planted == 1.0)
    assert any("in float64" in note for note in notes)
