"""A model as it computes under a precision: its parameters in the precision's dtype, everything else as it is.

Casts that the model writes itself, such as a norm in float32, stay in the captured graph. Buffers keep their dtype, as
they do under FSDP2's mixed precision.
"""

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from autopar._torch.private import pytree
from autopar.capture.weightless import plain_tensors
from autopar.errors import InputError
from autopar.ir.precision import EIGHT_BITS, PRECISIONS, compute_dtype
from autopar.rules.scaled_product import check_torchao

if TYPE_CHECKING:
    from autopar.capture.export.export import Inputs


def checked_precision(precision: str | None) -> str | None:
    """A precision that parameters can have. Raises InputError for another one."""
    if precision is not None and precision not in PRECISIONS:
        raise InputError(f"precision {precision!r} is unknown; use {', '.join(PRECISIONS)}, or leave it out")
    return precision


def products_of(precision: str | None) -> str | None:
    """The format of linear layers under a precision with operands of eight bits; None under another one.

    Raises InputError if torchao is missing.
    """
    if precision not in EIGHT_BITS:
        return None
    check_torchao(precision)
    return precision


def in_precision(model: nn.Module, precision: str | None) -> nn.Module:
    """A copy of a model with floating-point parameters in the dtype of a precision. Their values are undefined.

    The model itself is returned without a precision, and if its parameters have the dtype already. Buffers and tied
    parameters are shared as in the model.

    Raises InputError if the model cannot be copied.
    """
    if precision is None:
        return model
    dtype = compute_dtype(precision)
    odd = next((name for name, p in model.named_parameters() if p.is_complex()), None)
    if odd is not None:
        raise InputError(
            f"parameter {odd!r} is complex, and precision {precision!r} would drop its imaginary part; leave the "
            "precision out, or store the parameter as real numbers"
        )
    others = [p for p in model.parameters() if p.is_floating_point() and p.dtype != dtype]
    if not others:
        return model
    computed = (tensor for tensor in plain_tensors(model) if not tensor.is_leaf)  # such as the weight of a weight norm
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *computed)}
    for parameter in others:  # deepcopy takes the entry of an object's id instead of a copy
        value = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=parameter.requires_grad)
        vars(value).update(vars(parameter))
        memo[id(parameter)] = value
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # a user's attribute may raise anything
        raise InputError(
            f"precision {precision!r} needs a copy of the model with {dtype} parameters, and the copy fails: "
            f"{type(error).__name__}: {error}; convert the model with model.to({dtype}) and leave the precision out"
        ) from error


def inputs_in_precision(inputs: "Inputs", precision: str | None) -> "Inputs":
    """Example inputs with floating-point tensors in the dtype of a precision."""
    if precision is None:
        return inputs
    dtype = compute_dtype(precision)
    found: Inputs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
    return found
