"""``autopar::scaled_linear``: a linear layer whose product has operands of eight bits, through torchao.

    fp8      one scale for each tensor, from its largest value; E4M3, and E5M2 for the gradient of the output
             (Micikevicius et al. 2022, "FP8 formats for deep learning")
    mxfp8    one power of two for each block of 32 numbers along the summed dimension; E4M3
             (Open Compute Project 2023, "OCP microscaling formats specification", version 1.0)

Operands are cast before each of the three products of a step, and results have the operands' own dtype. A rank casts
its own part of an operand, so a split layer has a scale for each part. A CPU emulates the products: it rounds the
operands as a GPU does, and multiplies the rounded numbers.
"""

from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import InputError
from autopar.rules.operators import define

# the sizes of a layer, and of a rank's part of it, must be multiples of this: a kernel needs it
MULTIPLES: Mapping[str, int] = {"fp8": 16, "mxfp8": 32}
# the first CUDA compute capability with such products
CAPABILITIES: Mapping[str, tuple[int, int]] = {"fp8": (8, 9), "mxfp8": (10, 0)}


def check_torchao(format: str) -> None:
    """Raise `InputError` with the remedy if torchao is missing."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise InputError(f"precision {format} needs torchao: pip install 'torchao>=0.18,<0.19' ({error})") from None


def _forward(x: torch.Tensor, weight: torch.Tensor, format: str) -> torch.Tensor:
    """(..., k) and (n, k) -> (..., n)."""
    out: torch.Tensor = _product(x.flatten(0, -2), weight, format).unflatten(0, x.shape[:-1])
    return out


def _of_x(grad: torch.Tensor, weight: torch.Tensor, format: str) -> torch.Tensor:
    """(..., n) and (n, k) -> (..., k), the gradient of the input."""
    out: torch.Tensor = _product(grad.flatten(0, -2), weight.t(), format, of_gradient=True).unflatten(
        0, grad.shape[:-1]
    )
    return out


def _of_weight(grad: torch.Tensor, x: torch.Tensor, format: str) -> torch.Tensor:
    """(..., n) and (..., k) -> (n, k), the gradient of the weight."""
    rows = [t.flatten(0, -2).t() for t in (grad, x)]
    missing = -rows[0].shape[1] % MULTIPLES[format]
    padded = [torch.nn.functional.pad(t, (0, missing)) for t in rows] if missing else rows
    return _product(padded[0], padded[1], format, of_gradient=True)


def _product(left: torch.Tensor, right: torch.Tensor, format: str, *, of_gradient: bool = False) -> torch.Tensor:
    """(m, k) and (n, k) -> (m, n). The operands are cast; `left` is a gradient with `of_gradient`."""
    if format == "mxfp8":
        return _in_blocks(left.contiguous(), right.contiguous())
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, ScaledMMConfig

    scaled = ScaledMMConfig(emulate=not left.is_cuda, use_fast_accum=not of_gradient)
    config = LinearMMConfig(scaled, scaled, scaled)
    kinds = (torch.float8_e5m2 if of_gradient else torch.float8_e4m3fn, torch.float8_e4m3fn)
    roles = (GemmInputRole.GRAD_OUTPUT if of_gradient else GemmInputRole.INPUT, GemmInputRole.WEIGHT)
    cast = [
        hp_tensor_to_float8_dynamic(t.contiguous(), kind, config, gemm_input_role=role)
        for t, kind, role in zip((left, right), kinds, roles, strict=True)
    ]
    out: torch.Tensor = torch.mm(cast[0], cast[1].t())
    return out


def _in_blocks(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kernel = KernelPreference.AUTO if left.is_cuda else KernelPreference.EMULATED
    cast = [MXTensor.to_mx(t, torch.float8_e4m3fn, 32, kernel_preference=kernel) for t in (left, right)]
    out: torch.Tensor = torch.mm(cast[0], cast[1].t())
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.format = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x, weight = ctx.saved_tensors
    of_x = OF_X(grad, weight, ctx.format) if ctx.needs_input_grad[0] else None
    return of_x, _OF_WEIGHT(grad, x, ctx.format) if ctx.needs_input_grad[1] else None, None


SCALED_LINEAR = define(
    "scaled_linear(Tensor x, Tensor weight, str format) -> Tensor",
    _forward,
    lambda x, weight, format: x.new_empty(*x.shape[:-1], weight.shape[0]),
    _backward,
    _save,
)
OF_X = define(
    "scaled_linear_of_x(Tensor grad, Tensor weight, str format) -> Tensor",
    _of_x,
    lambda grad, weight, format: grad.new_empty(*grad.shape[:-1], weight.shape[1]),
)
_OF_WEIGHT = define(
    "scaled_linear_of_weight(Tensor grad, Tensor x, str format) -> Tensor",
    _of_weight,
    lambda grad, x, format: grad.new_empty(grad.shape[-1], x.shape[-1]),
)
