"""Functions with a backward pass of their own: the captured program has the gradients that they give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_layer import checked_program
from suites import thinned
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from autopar.capture.program import capture_program
from autopar.errors import CaptureError
from autopar.testing.checks import check_equivalence


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -ctx.scale * grad, None


STRENGTH = torch.tensor(0.7, dtype=torch.float64)  # no operator of the trace makes it


class Rounded(torch.autograd.Function):
    """A learned step size: a straight-through gradient inside of the range, and a sum for the step."""

    @staticmethod
    def forward(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return (x / step).round().clamp(-4, 3) * step

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, step = ctx.saved_tensors
        level = x / step
        inside = (level >= -4) & (level <= 3)
        slope = torch.where(inside, level.round() - level, level.round().clamp(-4, 3))
        return grad * inside, (grad * slope).sum().reshape_as(step)


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad / (25 * x.abs() + 1) ** 2


class ClampedExp(torch.autograd.Function):
    """The derivative of its forward pass, except for large values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0].clamp(max=3).exp()


class Scan(torch.autograd.Function):
    """h[t] = a h[t - 1] + x[t], computed in place in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        for t in range(1, x.shape[1]):
            h[:, t].add_(a[0] * h[:, t - 1])
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, h = ctx.saved_tensors
        grad = grad.clone()
        for t in range(grad.shape[1] - 2, -1, -1):
            grad[:, t].add_(a[0] * grad[:, t + 1])
        return grad, (grad[:, 1:] * h[:, :-1]).sum().reshape_as(a)


class Doubling(torch.autograd.Function):
    """A backward pass that changes a factor of the gradient in place after its use, as parallel scans do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return x * (1 + scale + scale.square())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        factor, found = ctx.saved_tensors[0].expand(grad.shape).clone(), grad.clone()
        found.add_(factor * grad)
        factor.mul_(factor)
        return found.add_(factor * grad), None


class Aligned(torch.autograd.Function):
    """Two results, one without a gradient, and another matrix in the backward pass than in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        positive = (x > 0).sum(1)
        ctx.mark_non_differentiable(positive)
        return x * weight, positive

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grad.flip(1) * weight, (grad * x.tanh()).sum().reshape_as(weight)


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


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.clamp(-0.01, 0.01)


class Auxiliary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, torch.ones((), dtype=grad.dtype)


def _weighted(x: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    return x * positive[:, None]


class Applies(nn.Module):
    """A layer, a function of its output and of a scale, and a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.last, self.function = nn.Linear(4, 6), nn.Linear(6, 1), function
        self.scale = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.layer(x), self.scale) * self.scale.exp()).square().mean()  # type: ignore[no-any-return]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "reversed": lambda x, _: Reversed.apply(x, 0.7),
    "reversed by a tensor of the module": lambda x, _: Reversed.apply(x, STRENGTH),
    "rounded": Rounded.apply,
    "surrogate": lambda x, _: Spike.apply(x),
    "clamped": lambda x, _: ClampedExp.apply(8 * x),
    "infinite": lambda x, _: ClampedExp.apply(x.masked_fill(x > 0, -float("inf"))),
    "in place": Scan.apply,
    "in place after its use": Doubling.apply,
    "two results": lambda x, scale: _weighted(*Aligned.apply(x, scale)),
    "derivative": lambda x, _: Swish.apply(x),
    "chained": lambda x, scale: Spike.apply(Rounded.apply(Swish.apply(x), scale)),
}
BATCH = torch.randn(3, 4)


@pytest.mark.parametrize("name", thinned(FUNCTIONS, keep=list(FUNCTIONS)[::2]))
def test_a_gradient_of_its_own_is_kept(name: str) -> None:
    torch.manual_seed(0)
    checked_program(Applies(FUNCTIONS[name]).double(), torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("degrees", ({"tp": 2}, {"tp": 1, "dp": 2}), ids=str)
def test_a_gradient_of_its_own_is_split_over_ranks(degrees: dict[str, int]) -> None:
    check_equivalence(Applies(FUNCTIONS["chained"]), {"x": torch.randn(4, 4)}, **degrees)


@pytest.mark.parametrize(
    ("function", "reason"),
    (
        (lambda x, _: Clipped.apply(x), "Clipped .* is not linear in the gradient that it gets"),
        (lambda x, _: Auxiliary.apply(x, x.square().mean()), "Auxiliary .* adds a gradient of its own .* to the loss"),
    ),
)
def test_what_is_not_linear_is_refused_by_name_and_line(function: Any, reason: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_autograd_functions.py:\d+: the backward pass of .*{reason}"):
        capture_program(Applies(function), {"x": BATCH})


def test_a_second_derivative_of_such_a_function_is_refused() -> None:
    def slope(x: torch.Tensor, _: Any) -> torch.Tensor:
        (found,) = torch.autograd.grad(Spike.apply(x).sum(), x, create_graph=True)
        return found

    with pytest.raises(CaptureError, match="Function before it has a backward pass of its own"):
        capture_program(Applies(slope), {"x": BATCH})


def test_reentrant_checkpoints_keep_their_gradients() -> None:
    program = capture_program(Applies(lambda x, _: checkpoint(torch.tanh, x, use_reentrant=True)), {"x": BATCH})
    target = "aten.tanh.default"
    found = [n for block in program.blocks for n in block.graph.nodes if str(n.target) == target]
    assert [n.meta["info"].differentiable for n in found] == [True]
