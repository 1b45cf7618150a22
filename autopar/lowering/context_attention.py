"""Causal attention of queries that are split over ranks, while every rank has all keys and values.

A query sees the keys before it, so the last part of a sequence has the most work. Of 2n equal chunks of queries, a rank
has two neighbours. Mirror ranks, the first and the last, the second and the second last and so on, swap their second
chunks. Then each rank has an early and a late chunk, and all ranks have the same work (Grattafiori et al. 2024, "The
Llama 3 herd of models", section 3.3.2, whose ranks hold such chunks all the time). The results are swapped back.
"""

import torch

from autopar._torch import private
from autopar._torch.operators import aten
from autopar.lowering.communicator import Communicator
from autopar.lowering.functions import Linear


def _swapped(x: torch.Tensor, mesh: Communicator) -> torch.Tensor:
    """`x` with its second half, along its last dimension but one, swapped with that of the mirror rank.

    A swap undoes itself, so the gradient is swapped too.
    """
    first, second = x.chunk(2, -2)
    return torch.cat((first, mesh.exchange(second.contiguous(), mesh.degree - 1 - int(mesh.index()))), -2)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begin: int, scale: float | None, grouped: bool
) -> torch.Tensor:
    """Attention of the queries from position `begin` on, to the keys up to their own positions."""
    end = begin + query.shape[-2]
    mask = private.causal_to_the_end(query.shape[-2], end) if begin else None
    out: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        query, key[..., :end, :], value[..., :end, :], mask, is_causal=not begin, scale=scale, enable_gqa=grouped
    )
    return out


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    grouped: bool,
    mesh: Communicator,
) -> torch.Tensor:
    """Causal attention of this rank's part of the queries to all keys. With `grouped`, query heads share a key head."""
    rows = query.shape[-2]
    if private.is_rank_tensor(query):
        return of_all_ranks(query, key, value, True, scale, grouped, mesh)
    at = int(mesh.index())
    if rows % 2:
        return _attend(query, key, value, at * rows, scale, grouped)
    early, late = Linear.apply(query, _swapped, _swapped, mesh).chunk(2, -2)
    chunk, mirror = rows // 2, mesh.degree - 1 - at
    begins = (2 * at * chunk, (2 * mirror + 1) * chunk)
    parts = [
        _attend(part, key, value, begin, scale, grouped) for part, begin in zip((early, late), begins, strict=True)
    ]
    out: torch.Tensor = Linear.apply(torch.cat(parts, -2), _swapped, _swapped, mesh)
    return out


def of_all_ranks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float | None,
    grouped: bool,
    mesh: Communicator,
) -> torch.Tensor:
    """The same for all ranks in one process, whose masks differ in values only."""
    sees = None
    if causal:
        rows = torch.arange(query.shape[-2], device=query.device) + mesh.index() * query.shape[-2]
        sees = rows.unsqueeze(-1) >= torch.arange(key.shape[-2], device=query.device)
    options = {"attn_mask": sees, "scale": scale, "enable_gqa": grouped}
    out: torch.Tensor = aten.scaled_dot_product_attention.default(query, key, value, **options)
    return out
