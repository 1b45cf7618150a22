"""Vocabulary-parallel embedding and cross-entropy: rewrites of operators whose vocabulary axis is split.

Both follow Megatron-LM (Shoeybi et al. 2019, section 3). Each rank looks up, or scores, its own range of ids. No rank
ever holds the logits of the whole vocabulary.
"""

from typing import Any

import torch

from autopar._torch.operators import aten
from autopar.lowering.communicator import Communicator


def own_ids(ids: torch.Tensor, mesh: Communicator, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids relative to this rank's range, clamped into it, and which of them lie in it."""
    local = ids - mesh.index() * size
    mine = (local >= 0) & (local < size)
    return torch.where(mine, local, torch.zeros_like(local)), mine


def vocab_parallel_embedding(
    weight: torch.Tensor, ids: torch.Tensor, padding_idx: int, mesh: Communicator
) -> torch.Tensor:
    """Rows of this rank's part of the table, zero for ids of other ranks; `padding_idx` (-1: none) gets no gradient."""
    local, mine = own_ids(ids, mesh, weight.shape[0])
    rows: torch.Tensor = aten.embedding.default(weight, local)
    if padding_idx >= 0:
        rows = torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return rows * mine.unsqueeze(-1).to(rows.dtype)


def without_padding(logits: torch.Tensor, classes: int, mesh: Communicator) -> torch.Tensor:
    """Logits of classes that do not exist are minus infinity; all ranks hold as many."""
    size = logits.shape[-1]
    if size * mesh.degree == classes:
        return logits
    index = torch.arange(size, device=logits.device) + mesh.index() * size
    return torch.where(index < classes, logits, torch.full((), float("-inf"), dtype=logits.dtype, device=logits.device))


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore: int, classes: int, mesh: Communicator
    ) -> torch.Tensor:
        logits = without_padding(logits, classes, mesh)
        valid = target != ignore
        local, mine = own_ids(target, mesh, logits.shape[-1])
        mine = mine & valid
        highest = mesh.all_reduce(logits.amax(-1), "max")
        exponents = (logits - highest.unsqueeze(-1)).exp_()
        zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
        scores = torch.where(mine, torch.gather(logits, -1, local.unsqueeze(-1)).squeeze(-1), zero)
        sums = mesh.all_reduce(torch.stack((exponents.sum(-1), scores)))
        total, wanted = sums[0], sums[1]
        ctx.save_for_backward(exponents.div_(total.unsqueeze(-1)), local, mine, valid)
        return torch.where(valid, torch.log(total) + highest - wanted, zero).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        probabilities, local, mine, valid = ctx.saved_tensors
        grad = probabilities * (valid.to(probabilities.dtype) * grads[0]).unsqueeze(-1)
        grad.scatter_add_(-1, local.unsqueeze(-1), -(mine.to(grad.dtype) * grads[0]).unsqueeze(-1))
        return grad, None, None, None, None


def vocab_parallel_cross_entropy_sum(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    classes: int,
    mesh: Communicator,
) -> torch.Tensor:
    """The sum of cross-entropies of logits (tokens, vocabulary / degree) of `classes`, padded on the last ranks."""
    assert label_smoothing == 0.0, "label smoothing keeps the vocabulary whole"
    out: torch.Tensor = _CrossEntropySum.apply(logits, target, ignore_index, classes, mesh)
    return out
