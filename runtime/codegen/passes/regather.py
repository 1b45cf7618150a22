"""A gather fused with the matrix products that it feeds; regathering saves the shard and gathers again in backward.

The fused function starts the input-gradient collective before it computes the weight gradients, so that the two
overlap (Korthikanti et al. 2022, section 4.2.2). It saves the gathered tensor, as autograd over separate nodes would,
or the shard (7.5 instead of 11.5 sbh bytes in a Llama attention block at t = 8), which it then gathers beside the
products of the input's gradient. A backward pass in parts has the input's gradient in the first and the weights', with
the second gather, in the second. Which gathers are fused is said in `autopar.lowering.local_graph`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from autopar._torch.operators import aten
from autopar._torch.private import wanted_gradients
from autopar.runtime.codegen.conversions import (
    all_gather_,
    c10d,
    ordered,
    start_all_gather,
    start_reduce_scatter,
)
from autopar.runtime.distributed.mesh import MeshDim


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: MeshDim, dim: int, again: bool, *weights: torch.Tensor | None) -> Any:
        ctx.where = (mesh, dim, again)
        whole = all_gather_(x, mesh, dim, 0)
        ctx.save_for_backward(x if again else whole, *weights)
        pairs = zip(weights[::2], weights[1::2], strict=True)
        return tuple(aten.linear.default(whole, weight, bias) for weight, bias in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, *weights = ctx.saved_tensors
        mesh, dim, again = ctx.where
        into_x, *into = wanted_gradients(ctx)
        into = into[3:]
        gathering = start_all_gather(kept, mesh) if again and any(into) else None
        scattering = start_reduce_scatter(_products(grads, weights[::2]), mesh, dim) if into_x else None
        whole = kept if gathering is None else ordered(c10d.wait_tensor(gathering), mesh, dim)
        whole = whole.flatten(0, -2)
        into_weights: list[torch.Tensor | None] = []
        for grad, into_weight, into_bias in zip(grads, into[::2], into[1::2], strict=True):
            rows = grad.flatten(0, -2)
            into_weights.append(rows.t() @ whole if into_weight else None)
            into_weights.append(rows.sum(0) if into_bias else None)
        summed = None if scattering is None else c10d.wait_tensor(scattering)
        return summed, None, None, None, *into_weights


def _products(grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The gradient of what the products share."""
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total.add_(grad @ weight)
    return total


def gather_linear(x: torch.Tensor, mesh: MeshDim, dim: int, *weights: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """All-gather `x` along `dim`, then one `linear` per (weight, bias) pair; backward gathers `x` again."""
    out: tuple[torch.Tensor, ...] = _GatherLinear.apply(x, mesh, dim, True, *weights)
    return out


def kept_gather_linear(
    x: torch.Tensor, mesh: MeshDim, dim: int, *weights: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """As `gather_linear`; backward has what was gathered."""
    out: tuple[torch.Tensor, ...] = _GatherLinear.apply(x, mesh, dim, False, *weights)
    return out
