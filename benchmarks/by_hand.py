"""What the programs written by hand share: an exchange with gradients, and one buffer of gradients."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Sizes = list[int] | None  # rows to or from every rank; None: equal parts


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, to_ranks: Sizes, from_ranks: Sizes) -> torch.Tensor:
        ctx.back = from_ranks, to_ranks
        got = torch.empty_like(rows) if from_ranks is None else rows.new_empty(sum(from_ranks), *rows.shape[1:])
        dist.all_to_all_single(got, rows, from_ranks, to_ranks)
        return got

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Exchange.apply(grads[0].contiguous(), *ctx.back), None, None


def exchange(rows: torch.Tensor, to_ranks: Sizes = None, from_ranks: Sizes = None) -> torch.Tensor:
    """All-to-all of rows that lie in the order of the ranks that get them. Gradients go back the same way."""
    out: torch.Tensor = _Exchange.apply(rows.contiguous(), to_ranks, from_ranks)
    return out


def gradient_buffer(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """One buffer that holds the gradients of all parameters, so that one all-reduce sums them."""
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
    pieces = buffer.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    return buffer
