"""Routing of tokens to experts: rows of tokens in the order of experts, as operators in which tokens are parallel.

Every token of t chooses j experts, so there are ``(t j)`` rows. A rank that has some of the tokens sorts the rows of
its own tokens. The order of rows therefore differs between ranks and one device, and so does the place of every row.
Values with such a *ragged* dimension are never cut or joined along it.

Ranks may also split the experts. A rank then has the rows of its experts. All ranks send rows to the ranks of their
experts, and get the products back (`autopar.lowering.experts`). Or every rank has all tokens, takes the part of its
experts from their order, and adds its rows to those of the others.

    expert_order    which row each place has
    expert_rows     rows of tokens in that order
    expert_take     rows in that order, from rows in the order of tokens; `expert_untake` is its inverse
    expert_product  rows in that order times the matrices of their experts
"""

from typing import Any

import torch

from autopar._torch.operators import aten
from autopar.rules.grouped_product import GROUPED_MM
from autopar.rules.operators import define


def _order(expert: torch.Tensor) -> torch.Tensor:
    """(t, j) numbers of experts -> (t j) rows, the rows of one expert in the order of tokens."""
    order: torch.Tensor = aten.argsort.stable(expert.reshape(-1), stable=True)
    return order


def _rows(x: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    return x.index_select(0, order.div(k, rounding_mode="floor"))


def _take(x: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    return x.index_select(0, order)


def _untake(rows: torch.Tensor, order: torch.Tensor, k: int, total: int | None = None) -> torch.Tensor:
    """Rows in the order of tokens. Of `total` rows the ones that are not here are zero."""
    if total is None:
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    else:
        out = rows.new_zeros(total, *rows.shape[1:])
    return out.index_copy_(0, order, rows)


def _product(rows: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor, k: int) -> torch.Tensor:
    """The rows of expert e end where the next number begins. Rows behind the last expert yield zero."""
    experts = torch.arange(weight.shape[0], device=expert.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert.contiguous(), experts, right=True)
    product: torch.Tensor = GROUPED_MM(rows, weight, ends)
    return product


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, order, ctx.k = inputs[:3]
    ctx.total = x.shape[0]
    ctx.save_for_backward(order)


def _back_in_place(grad: torch.Tensor, order: torch.Tensor, k: int, total: int) -> torch.Tensor:
    """The gradients of rows, where the rows were taken from. Rows of other ranks' experts have none."""
    rows: torch.Tensor = UNTAKE(grad, order, k, None if total == order.shape[0] else total)
    return rows


def _rows_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    """Every token sums the gradients of its rows. This needs no atomic additions, so it is deterministic."""
    (order,) = ctx.saved_tensors
    rows = _back_in_place(grad, order, ctx.k, ctx.total * ctx.k)
    return rows.unflatten(0, (-1, ctx.k)).sum(1), None, None


def _take_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    (order,) = ctx.saved_tensors
    return _back_in_place(grad, order, ctx.k, ctx.total), None, None


def _untake_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return TAKE(grad, *ctx.saved_tensors, ctx.k), None, None, None


def _fake(x: torch.Tensor, order: torch.Tensor, k: int, total: int | None = None) -> torch.Tensor:
    return x.new_empty(total or order.shape[0], *x.shape[1:])


ORDER = define("expert_order(Tensor expert) -> Tensor", _order)
ROWS = define("expert_rows(Tensor x, Tensor order, int k) -> Tensor", _rows, _fake, _rows_backward, _save)
TAKE = define("expert_take(Tensor x, Tensor order, int k) -> Tensor", _take, _fake, _take_backward, _save)
UNTAKE = define(
    "expert_untake(Tensor rows, Tensor order, int k, int? total=None) -> Tensor",
    _untake,
    _fake,
    _untake_backward,
    _save,
)
PRODUCT = define("expert_product(Tensor rows, Tensor weight, Tensor expert, int k) -> Tensor", _product)
ROUTED = (ORDER, ROWS, TAKE, UNTAKE, PRODUCT)
SORTED = frozenset([ORDER, ROWS, TAKE])  # dimension 0 of their result is ragged, whatever their operands are
