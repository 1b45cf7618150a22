"""Attention of some queries to some of their keys: the result with its log-sum-exp, and the gradients.

Results of several sets of keys become one result, row by row:

    lse = log Σ exp(lse_j),    out = Σ exp(lse_j - lse) · out_j

The gradients of one set need the result and the log-sum-exp of all sets (Dao et al. 2022, "FlashAttention", section 3.1
and appendix B.2; Liu et al. 2023, "Ring attention with blockwise transformers", section 3). Tensors are (batch, heads,
tokens, width). Several query heads may share a key head. A causal call has as many queries as keys.
"""

import torch

from autopar._torch.operators import aten

_ON_CPU = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ON_GPU = (torch.bfloat16, torch.float16)
_WIDEST_HEAD = 256  # of the GPU kernel
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results and gradients of several sets of keys are summed."""
    return dtype if dtype == torch.float64 else torch.float32


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the log-sum-exp of every row's scores as (batch, heads, queries)."""
    kernel = _kernel(query, value)
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value, 0.0, causal, scale=scale)
        return out, lse
    if kernel == "gpu":
        out, lse = aten._scaled_dot_product_flash_attention.default(query, key, value, 0.0, causal, scale=scale)[:2]
        return out, lse
    scores, values = _scores(query, key, scale, causal), _of_queries(value, query)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ values.to(scores.dtype)).to(query.dtype), lse


def gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float | None,
    *,
    causal: bool,
) -> _Gradients:
    """The gradients of queries, keys and values through these keys. `out` and `lse` are those of all keys."""
    kernel = _kernel(query, value)
    if kernel == "cpu":
        grads: _Gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, query, key, value, out, lse, 0.0, causal, scale=scale
        )
        return grads
    if kernel == "gpu":
        none = torch.empty(0, dtype=torch.int64, device=query.device)  # no dropout, so no random numbers
        lengths = query.shape[-2], key.shape[-2]
        grads = aten._scaled_dot_product_flash_attention_backward.default(
            grad, query, key, value, out, lse, None, None, *lengths, 0.0, causal, none, none, scale=scale
        )
        return grads
    scores = _scores(query, key, scale, causal)
    part = (scores - lse.unsqueeze(-1)).exp()
    grad, out, keys, values = (
        t.to(part.dtype) for t in (grad, out, _of_queries(key, query), _of_queries(value, query))
    )
    of_scores = part * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * _scale(query, scale)
    of_query, of_key, of_value = of_scores @ keys, of_scores.mT @ query.to(part.dtype), part.mT @ grad
    groups = key.shape[1]
    summed = of_query, *(t.unflatten(1, (groups, -1)).sum(2) for t in (of_key, of_value))
    return tuple(t.to(query.dtype) for t in summed)


def _kernel(query: torch.Tensor, value: torch.Tensor) -> str:
    """The fused kernel for these tensors: "cpu", "gpu", or "" if there is none."""
    width = query.shape[-1]
    if width != value.shape[-1]:
        return ""
    if query.device.type in ("cpu", "meta"):
        return "cpu" if query.dtype in _ON_CPU else ""
    fits = query.dtype in _ON_GPU and width % 8 == 0 and width <= _WIDEST_HEAD
    return "gpu" if query.device.type == "cuda" and fits else ""


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float | None, causal: bool) -> torch.Tensor:
    dtype = wide(query.dtype)
    scores = query.to(dtype) @ _of_queries(key, query).to(dtype).mT * _scale(query, scale)
    if causal:
        sees = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~sees, float("-inf"))
    return scores


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _of_queries(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values with a head for every query head."""
    repeats = query.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)
