"""``autopar::grouped_mm``: rows in groups, each group times a matrix of its own.

The operators that models call have no float64 kernel, require strides that a shard may not have, or loop over the
groups in Python. This operator takes any strides and dtype. It is one node to autograd and to compilers. Rows behind
the last group yield zero.
"""

from typing import Any

import torch

from autopar._torch.operators import aten
from autopar.rules.operators import define

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16  # bytes, of every row of an operand of torch's kernel


def _forward(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(t, k) rows, (g, k, n) matrices, (g,) where each group ends -> (t, n)."""
    if _has_kernel(x, x.shape[1], weight.shape[2]):
        if weight.stride(-1) != 1 and weight.stride(-2) != 1:
            weight = weight.contiguous()
        behind = torch.arange(len(x), device=x.device) >= ends[-1]
        product: torch.Tensor = aten._grouped_mm(x.contiguous(), weight, ends.to(torch.int32))
        return product.masked_fill(behind[:, None], 0.0)
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for group, (start, end) in enumerate(_ranges(ends)):
        torch.mm(x[start:end], weight[group], out=out[start:end])
    return out


def _of_weight(x: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(t, k) rows and (t, n) cotangents -> (g, k, n), the cotangent of the matrices."""
    if _has_kernel(x, x.shape[1], grad.shape[1]):
        product: torch.Tensor = aten._grouped_mm(x.contiguous().t(), grad.contiguous(), ends.to(torch.int32))
        return product
    out = x.new_zeros(len(ends), x.shape[1], grad.shape[1])
    for group, (start, end) in enumerate(_ranges(ends)):
        torch.mm(x[start:end].t(), grad[start:end], out=out[group])
    return out


def _has_kernel(x: torch.Tensor, *widths: int) -> bool:
    aligned = all(width * x.element_size() % ALIGNMENT == 0 for width in widths)
    return x.is_cuda and x.dtype in KERNEL_DTYPES and aligned


def _ranges(ends: torch.Tensor) -> list[tuple[int, int]]:
    last = ends.tolist()
    return list(zip([0, *last[:-1]], last, strict=True))


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    of_x = GROUPED_MM(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    return of_x, _gradient_like(weight, x, grad, ends) if ctx.needs_input_grad[1] else None, None


def _gradient_like(weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The gradient of the matrices in their own order of strides, in which autograd keeps it without a copy."""
    if weight.stride(-2) < weight.stride(-1):
        out: torch.Tensor = _OF_WEIGHT(grad, x, ends).transpose(1, 2)
        return out
    out = _OF_WEIGHT(x, grad, ends)
    return out


GROUPED_MM = define(
    "grouped_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor",
    _forward,
    lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[2]),
    _backward,
    _save,
)
_OF_WEIGHT = define(
    "grouped_mm_of_weight(Tensor x, Tensor grad, Tensor ends) -> Tensor",
    _of_weight,
    lambda x, grad, ends: x.new_empty(ends.shape[0], x.shape[1], grad.shape[1]),
)
