"""Functions with a backward pass of their own: traced if it is the derivative of the forward pass, else refused."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.capture.program import capture_program
from autopar.errors import CaptureError


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -grad


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x / scale).round() * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Swish(torch.autograd.Function):
    """Saves its input only, as the packages of image models do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


class Applies(nn.Module):
    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.layer, self.functions = nn.Linear(4, 4), functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for function in self.functions:
            x = function(x)
        return x.square().mean()


BATCH = (torch.randn(2, 4),)


@pytest.mark.parametrize("function", [Reversed.apply, lambda x: Rounded.apply(x, 0.5)], ids=["reversed", "rounded"])
def test_another_gradient_is_refused_by_name(function: Any) -> None:
    with pytest.raises(CaptureError, match=r"backward pass of .*(Reversed|Rounded) .* would be lost"):
        capture_program(Applies(Swish.apply, function), BATCH)


def test_a_derivative_is_traced() -> None:
    assert capture_program(Applies(Swish.apply), BATCH).parameters


def test_reentrant_checkpoints_keep_their_gradients() -> None:
    program = capture_program(Applies(lambda x: checkpoint(torch.tanh, x, use_reentrant=True)), BATCH)
    target = "aten.tanh.default"
    found = [n for block in program.blocks for n in block.graph.nodes if str(n.target) == target]
    assert [n.meta["info"].differentiable for n in found] == [True]
