"""A step as a plain training loop writes it: the loss of a call, whose backward pass ends with the sums over ranks.

torch's autograd runs the backward pass of the call. Its first function is `_Begin`, which asks the engine to call
`ParallelModel.end_backward` when all gradients of this rank are there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autopar._torch import private


class _Begin(torch.autograd.Function):
    """The loss, unchanged; its backward pass runs `begin` before every other function of the step."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, begin: Callable[[], None]) -> torch.Tensor:
        ctx.begin = begin
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.begin()
        return gradient, None


def with_backward(loss: torch.Tensor, begin: Callable[[], None], end: Callable[[], None]) -> torch.Tensor:
    """The loss with a backward pass that runs `begin` first, and `end` after FSDP2's own last callback."""

    def start() -> None:
        begin()
        private.after_backward(lambda: private.after_backward(end))  # FSDP2 asks for its callback after this

    found: torch.Tensor = _Begin.apply(loss, start)
    return found
