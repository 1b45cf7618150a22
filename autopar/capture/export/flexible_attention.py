"""`flex_attention` as ordinary operators: products, the score and mask functions over all places, and a softmax.

During a capture this function stands in for PyTorch's own operator, whose functions no rule could read. The block mask
only tells a kernel which blocks to leave out, so its mask function alone decides.
"""

from collections.abc import Callable
from math import log
from typing import Any

import torch

from autopar._torch.exports import index_by_tensors

_PLACES = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None))


def flexible_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention with a score and a mask function: the output, and of each row the log-sum-exp and maximum in base 2."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    working = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = (query @ key.transpose(-2, -1)).to(working) * scale
    places = [torch.arange(size, device=query.device) for size in scores.shape]
    with index_by_tensors():
        scores = _over_places(score_mod, (0,))(scores, *places)
        mask = _over_places(block_mask[-1], ())(*places)
    least = torch.finfo(working).min  # not infinity: the softmax of a row without any key must have a derivative
    scores = torch.where(mask, scores, least)
    weights = torch.where(mask, scores.softmax(-1), 0.0)
    out = weights.to(query.dtype) @ value
    return out, scores.logsumexp(-1) / log(2), scores.amax(-1) / log(2)


def _over_places(function: Callable[..., torch.Tensor], first: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    """A function of scalars, of every batch, head, query and key."""
    for dims in _PLACES:
        function = torch.vmap(function, in_dims=(*first, *dims), out_dims=0)
    return function
