"""A linear layer before an operator under test, and its captured program beside autograd's results."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.capture.program import capture_program
from autopar.ir.program import Program
from autopar.runtime.codegen.execute import run_reference
from autopar.runtime.parameters.packed import join_packed, packed_source

Body = Callable[[torch.Tensor], torch.Tensor]


class OneLayer(nn.Module):
    """A linear layer whose output a function turns into what the model returns."""

    def __init__(self, finish: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.finish = finish

    def forward(self, x: torch.Tensor) -> Any:
        return self.finish(self.layer(x))


def squared(body: Body) -> OneLayer:
    """A layer, a function of its output, and the sum of squares as the loss."""
    return OneLayer(lambda y: body(y).square().sum())


def checked_program(model: nn.Module, x: torch.Tensor) -> Program:
    """The captured program of a float64 model, whose loss and gradients were found equal to autograd's."""
    program = capture_program(model, {"x": x})
    source = packed_source(program, dict(model.named_parameters()).__getitem__)
    parameters = {n: source(n).detach().clone().requires_grad_() for n in program.parameters}
    loss = run_reference(program, parameters, {"x": x}, {})[program.loss]
    loss.backward()
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0.0)
    gradients = join_packed(program, {n: p.grad for n, p in parameters.items() if p.grad is not None})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-11, atol=1e-13)
    return program
