"""Ring attention: every rank has a part of the queries, keys and values, and the keys and values travel.

In each of n steps a rank attends with its queries to the keys that it holds, while these keys go to the next rank. The
results of the steps become one result (`autopar.lowering.attention_parts`). No rank ever has the keys of the whole
sequence. In the backward pass keys and values travel again, and their gradients travel with them, in at least 32 bits.
The last shift brings the gradients home. (Liu et al. 2023, "Ring attention with blockwise transformers".)

Under a causal mask the last part of a sequence has the most work. Mirror ranks therefore swap half of their tokens, as
in `autopar.lowering.context_attention`. Of 2n chunks, a rank then has an early chunk c and the late chunk 2n-1-c. A
step is one of:

    the keys of the rank itself             all its queries, causal
    the keys of a rank with a smaller c     all its queries, the early half of the keys
    the keys of a rank with a larger c      the late half of its queries, all keys

Each step has the same work on every rank. An odd number of tokens is not swapped: later ranks have more work.
"""

from collections.abc import Sequence
from typing import Any

import torch

from autopar._torch import private
from autopar.lowering.attention_parts import attend, gradients, wide
from autopar.lowering.communicator import Communicator
from autopar.lowering.context_attention import of_all_ranks
from autopar.lowering.functions import all_gather_to_replicate


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float | None,
    mesh: Communicator,
) -> torch.Tensor:
    """Attention of this rank's part of the queries to the keys of all ranks, which share the sequence."""
    if private.is_rank_tensor(query):
        keys, values = (all_gather_to_replicate(x, mesh, x.dim() - 2) for x in (key, value))  # parts of ranks differ
        return of_all_ranks(query, keys, values, causal, scale, query.shape[-3] != key.shape[-3], mesh)
    batch = query.shape[:-3]
    flat = (x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    out: torch.Tensor = _Ring.apply(*flat, causal, scale, mesh)
    return out.reshape(*batch, *out.shape[-3:])


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float | None,
        mesh: Communicator,
    ) -> torch.Tensor:
        is_mirrored = causal and query.shape[-2] % 2 == 0
        if is_mirrored:
            query, key, value = _mirrored(mesh, query, key, value)
        held, out, lse = _flat(key, value), query, query
        for step in range(mesh.degree):
            coming = mesh.start_shift(held) if step < mesh.degree - 1 else None
            seen = _seen(mesh, step, query.shape[-2], key.shape[-2], causal, is_mirrored)
            if seen is not None:
                first, count = seen
                keys, values = (x[..., :count, :] for x in _parts(held, key, value))
                queries = query[..., first:, :]
                part = attend(queries, keys, values, scale, causal=causal and step == 0)
                if step:
                    _join(out, lse, *part, first)
                else:
                    out, lse = part[0].to(wide(query.dtype)), part[1]
            held = held if coming is None else mesh.wait(coming)
        out = out.to(query.dtype)
        out = _home(mesh, out)[0] if is_mirrored else out
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = causal, scale, mesh, is_mirrored
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        causal, scale, mesh, is_mirrored = ctx.options
        grad = grads[0].contiguous()
        if is_mirrored:
            grad, out = _mirrored(mesh, grad, out)
        held, of_query = _flat(key, value), torch.zeros_like(query, dtype=wide(query.dtype))
        travelling = None
        for step in range(mesh.degree):
            coming = mesh.start_shift(held) if step < mesh.degree - 1 else None
            seen = _seen(mesh, step, query.shape[-2], key.shape[-2], causal, is_mirrored)
            sums = torch.zeros_like(held, dtype=wide(query.dtype))
            if seen is not None:
                first, count = seen
                keys, values = (x[..., :count, :] for x in _parts(held, key, value))
                rows = out[..., first:, :], lse[..., first:]
                options = {"scale": scale, "causal": causal and step == 0}
                part = gradients(grad[..., first:, :], query[..., first:, :], keys, values, *rows, **options)
                of_query[..., first:, :] += part[0]
                for whole, more in zip(_parts(sums, key, value), part[1:], strict=True):
                    whole[..., :count, :] += more
            if travelling is not None:
                sums += mesh.wait(travelling)
            travelling = mesh.start_shift(sums)
            held = held if coming is None else mesh.wait(coming)
        assert travelling is not None
        results = [x.to(query.dtype) for x in (of_query, *_parts(mesh.wait(travelling), key, value))]
        if is_mirrored:
            results = _home(mesh, *results)
        return *results, None, None, None


def _early(rank: int, degree: int) -> int:
    """The early chunk of a rank whose halves were swapped."""
    return min(2 * rank, 2 * degree - 1 - 2 * rank)


def _mirrored(mesh: Communicator, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """This rank's early and late chunk of tokens, instead of two chunks that are neighbours. All go as one message."""
    at = int(mesh.index())
    halves = [x.chunk(2, -2) for x in tensors]
    others = _swapped(mesh, [second for _, second in halves])
    is_first_early = _early(at, mesh.degree) == 2 * at
    return [
        torch.cat((first, other) if is_first_early else (other, first), -2)
        for (first, _), other in zip(halves, others, strict=True)
    ]


def _home(mesh: Communicator, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The reverse of `_mirrored`."""
    at = int(mesh.index())
    halves = [x.chunk(2, -2) for x in tensors]
    halves = halves if _early(at, mesh.degree) == 2 * at else [(late, early) for early, late in halves]
    others = _swapped(mesh, [other for _, other in halves])
    return [torch.cat((first, other), -2) for (first, _), other in zip(halves, others, strict=True)]


def _swapped(mesh: Communicator, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of the mirror rank."""
    flat = torch.cat([x.reshape(-1) for x in tensors])
    parts = mesh.exchange(flat, mesh.degree - 1 - int(mesh.index())).split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _seen(
    mesh: Communicator, step: int, num_queries: int, num_keys: int, causal: bool, is_mirrored: bool
) -> tuple[int, int] | None:
    """The first query that sees keys of a step, and the number of keys that it sees; None if no query does."""
    at = int(mesh.index())
    source = (at - step) % mesh.degree
    if not causal or step == 0:
        return 0, num_keys
    is_later = source > at
    if is_mirrored:
        is_later = _early(source, mesh.degree) > _early(at, mesh.degree)
        return (num_queries // 2, num_keys) if is_later else (0, num_keys // 2)
    return None if is_later else (0, num_keys)


def _join(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, first: int) -> None:
    """Add the result of some more keys to the result of all keys so far, for the queries from `first` on."""
    rows, before = out[..., first:, :], lse[..., first:]
    after = torch.logaddexp(before, part_lse)
    rows.mul_((before - after).exp().unsqueeze(-1)).addcmul_(part.to(out.dtype), (part_lse - after).exp().unsqueeze(-1))
    before.copy_(after)


def _flat(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keys and values as one message."""
    return torch.cat((key.reshape(-1), value.reshape(-1)))


def _parts(flat: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a message, in the shapes of `key` and `value`."""
    return flat[: key.numel()].view(key.shape), flat[key.numel() :].view(value.shape)
