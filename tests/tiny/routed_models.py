"""Mixtures of experts as libraries write them, in plain torch: a router, experts, and a head with a loss.

`ROUTINGS` maps a name to the way in which tokens meet experts. A routing is a function of the mixture, rows of tokens
(t, d), numbers of experts (t, k) and their weights (t, k), and returns (t, d). `example` is a model with its inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autopar.rules.grouped_product import GROUPED_MM

Example = tuple[nn.Module, dict[str, Any]]
VOCABULARY, HIDDEN, WIDTH, EXPERTS, CHOICES = 24, 8, 12, 4, 2


class Mixture(nn.Module):
    """Routed experts with a bias each, and perhaps a shared expert that all tokens meet."""

    def __init__(self, routing: str, experts: int, choices: int, gate: str = "softmax", shared: bool = False) -> None:
        super().__init__()
        self.routing, self.gate, self.experts, self.choices = routing, gate, experts, choices
        self.router = nn.Linear(HIDDEN, experts)
        self.up = nn.Parameter(torch.empty(experts, HIDDEN, WIDTH))
        self.bias = nn.Parameter(torch.empty(experts, WIDTH))
        self.down = nn.Parameter(torch.empty(experts, WIDTH, HIDDEN))
        self.correction = nn.Buffer(torch.linspace(-0.3, 0.3, experts))
        self.shared = nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.SiLU(), nn.Linear(WIDTH, HIDDEN)) if shared else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        scores = self.router(rows)
        weights, chosen = GATES[self.gate](self, scores)
        out = ROUTINGS[self.routing](self, rows, chosen, weights)
        if self.shared is not None:
            out = out + self.shared(rows)
        return out.reshape(x.shape), scores

    def of_all_rows(self, rows: torch.Tensor, expert: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert."""
        hidden = F.silu(GROUPED_MM(rows, self.up, ends) + self.bias[expert])
        return GROUPED_MM(hidden, self.down, ends)


Gate = Callable[[Mixture, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # scores -> weights and numbers of experts


def softmax(m: Mixture, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.softmax(-1).topk(m.choices, -1)


def normalised(m: Mixture, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As Mixtral: the weights of a token sum to 1."""
    best, chosen = scores.topk(m.choices, -1)
    return best.softmax(-1), chosen


def corrected(m: Mixture, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As DeepSeek-V3: sigmoids; a correction decides who is chosen, and does not weigh."""
    found = scores.sigmoid()
    chosen = (found + m.correction).topk(m.choices, -1, sorted=False).indices
    return found.gather(1, chosen), chosen


def in_groups(m: Mixture, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As DeepSeek: a token chooses among the experts of its best group."""
    found = scores.softmax(-1)
    groups = found.unflatten(-1, (2, -1))
    best = groups.amax(-1).topk(1, -1).indices
    mask = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0)
    allowed = mask.unsqueeze(-1).expand_as(groups).flatten(1)
    return found.masked_fill(allowed == 0, 0.0).topk(m.choices, -1)


def one_for_all(m: Mixture, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token chooses the last experts, and nobody the others."""
    lead = 1000.0 * torch.arange(m.experts, device=scores.device, dtype=scores.dtype)
    chosen = (scores.detach() + lead).topk(m.choices, -1).indices
    return scores.sigmoid().gather(1, chosen), chosen


GATES: Mapping[str, Gate] = {
    "softmax": softmax,
    "normalised": normalised,
    "corrected": corrected,
    "in_groups": in_groups,
    "one_for_all": one_for_all,
}


Routing = Callable[[Mixture, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ends_of(expert: torch.Tensor, experts: int) -> torch.Tensor:
    counts = (expert[:, None] == torch.arange(experts, device=expert.device)).sum(0)
    return counts.cumsum(0)


def sort_and_inverse(m: Mixture, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As transformers: sort, put back by the inverse order, sum over choices."""
    expert, order = torch.sort(chosen.reshape(-1))
    out = m.of_all_rows(x[order // m.choices], expert, ends_of(expert, m.experts))
    out = out * weights.reshape(-1)[order][:, None]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return out[inverse].reshape(len(x), m.choices, -1).sum(1)


def scores_before_experts(m: Mixture, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As torchtitan: counts of unsorted numbers, `gather` with an index for every column, `scatter_add`."""
    order = torch.argsort(chosen.reshape(-1), stable=True)
    counts = torch.histc(chosen.reshape(-1).float(), bins=m.experts, min=0, max=m.experts)
    token = (order // m.choices).reshape(-1, 1).expand(-1, x.shape[1])
    rows = torch.gather(x, 0, token) * weights.reshape(-1)[order].reshape(-1, 1)
    out = m.of_all_rows(rows, chosen.reshape(-1)[order], counts.cumsum(0))
    return torch.zeros_like(x).scatter_add(0, token, out)


def tables_of_tokens(m: Mixture, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Tokens by a table of numbers, `index_add` onto a shared expert."""
    order = chosen.reshape(-1).argsort()
    token = torch.arange(len(x), device=x.device).repeat_interleave(m.choices)[order]
    expert = chosen.reshape(-1).gather(0, order)
    ends = torch.searchsorted(expert, torch.arange(m.experts, device=x.device), right=True)
    out = m.of_all_rows(x.index_select(0, token), expert, ends)
    return (x.tanh()).index_add(0, token, out * weights.reshape(-1)[order].unsqueeze(-1))


def rows_put_back(m: Mixture, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Repeated tokens, written to their places, then a product with the weights."""
    flat = chosen.flatten()
    expert, order = flat.sort(stable=True)
    counts = torch.zeros(m.experts, dtype=torch.int64, device=x.device).scatter_add(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0)
    out = m.of_all_rows(x.repeat_interleave(m.choices, 0)[order], expert, ends)
    back = torch.zeros_like(out)
    back[order] = out
    return torch.einsum("tkd,tk->td", back.reshape(len(x), m.choices, -1), weights)


def two_inverses(m: Mixture, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The inverse by a second sort, and counts by `one_hot`."""
    order = chosen.reshape(-1).argsort(stable=True)
    expert = chosen.reshape(-1)[order]
    ends = F.one_hot(chosen.reshape(-1), m.experts).sum(0).cumsum(0)
    out = m.of_all_rows(x[order // m.choices], expert, ends)
    back = out.index_select(0, order.argsort()).reshape(len(x), m.choices, -1)
    return (back * weights[..., None]).sum(1)


def marked_experts(m: Mixture, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As newer torchtitan: experts are counted by marks of every token; weights behind experts."""
    marks = torch.zeros(len(x), m.experts, dtype=torch.bool, device=x.device).scatter(-1, chosen, True)
    order = chosen.view(-1).argsort(stable=True)
    token = order // m.choices
    out = m.of_all_rows(x[token], chosen.view(-1)[order], marks.sum(0).cumsum(0, dtype=torch.int32))
    out = out * weights.view(-1)[order].reshape(-1, 1)
    return torch.zeros_like(x).scatter_add(0, token.reshape(-1, 1).expand(-1, x.shape[1]), out)


def all_experts(m: Mixture, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As Llama 4: every expert computes every token."""
    dense = torch.zeros(len(x), m.experts, dtype=weights.dtype, device=x.device).scatter(1, chosen, weights)
    repeated = x.repeat(m.experts, 1).reshape(m.experts, len(x), -1)
    hidden = F.silu(torch.bmm(repeated, m.up) + m.bias[:, None])
    return (torch.bmm(hidden, m.down) * dense.t()[..., None]).sum(0)


def loop_over_experts(m: Mixture, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A mask for every expert."""
    out = torch.zeros_like(x)
    for e in range(m.experts):
        weight = (weights * (chosen == e)).sum(-1, keepdim=True)
        out = out + F.silu(x @ m.up[e] + m.bias[e]) @ m.down[e] * weight
    return out


def weights_of_rows(m: Mixture, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As transformers' `batched_mm`: a copy of the matrices for every row."""
    flat = chosen.reshape(-1)
    rows = x.repeat_interleave(m.choices, 0).unsqueeze(1)
    hidden = F.silu(torch.bmm(rows, m.up[flat]) + m.bias[flat][:, None])
    out = torch.bmm(hidden, m.down[flat]).squeeze(1) * weights.reshape(-1, 1)
    return out.reshape(len(x), m.choices, -1).sum(1)


def capacity(m: Mixture, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As GShard: an expert takes the first tokens of the batch, and drops the others."""
    room = max(1, len(x) * m.choices // m.experts - 1)
    mask = F.one_hot(chosen, m.experts)  # (t, k, e)
    place = (mask.reshape(-1, m.experts).cumsum(0) * mask.reshape(-1, m.experts) - 1).reshape(mask.shape)
    kept = mask * (place < room)
    slots = (place.clamp(0, room - 1)[..., None] == torch.arange(room, device=x.device)) & (kept[..., None] > 0)
    combine = torch.einsum("tk,tkec->tec", weights, slots.to(x.dtype))
    dispatch = (combine > 0).to(x.dtype)
    rows = torch.einsum("tec,td->ecd", dispatch, x)
    hidden = F.silu(torch.einsum("ecd,edw->ecw", rows, m.up) + m.bias[:, None])
    return torch.einsum("tec,ecd->td", combine, torch.einsum("ecw,ewd->ecd", hidden, m.down))


DROPLESS: Mapping[str, Routing] = {
    "sort_and_inverse": sort_and_inverse,
    "scores_before_experts": scores_before_experts,
    "tables_of_tokens": tables_of_tokens,
    "rows_put_back": rows_put_back,
    "two_inverses": two_inverses,
    "marked_experts": marked_experts,
}
WITHOUT_SORT: Mapping[str, Routing] = {
    "all_experts": all_experts,
    "loop_over_experts": loop_over_experts,
    "weights_of_rows": weights_of_rows,
}
ROUTINGS: Mapping[str, Routing] = {**DROPLESS, **WITHOUT_SORT, "capacity": capacity}


class RoutedModel(nn.Module):
    """Embeddings, mixtures with a residual stream, and a head. `more` adds a term to the loss."""

    def __init__(self, mixtures: Sequence[Mixture], more: "Term | None") -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, HIDDEN)
        self.mixtures = nn.ModuleList(mixtures)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.more = more

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x, terms = self.table(tokens), []
        for mixture in self.mixtures:
            out, scores = mixture(x)
            x = x + out
            if self.more is not None:
                terms.append(self.more(scores, mixture.choices))
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return {"loss": loss + 0.1 * torch.stack(terms).mean() if terms else loss}


Term = Callable[[torch.Tensor, int], torch.Tensor]  # of a loss: scores (t, e) and k


def z_loss(scores: torch.Tensor, choices: int) -> torch.Tensor:
    """As ST-MoE: scores stay small."""
    return scores.logsumexp(-1).square().mean()


def balance_loss(scores: torch.Tensor, choices: int) -> torch.Tensor:
    """As Switch: the part of the tokens that choose an expert times its mean weight."""
    weights = scores.softmax(-1)
    chosen = weights.topk(choices, -1).indices
    load = F.one_hot(chosen, scores.shape[-1]).to(scores.dtype).sum(1).mean(0)
    return scores.shape[-1] * (load * weights.mean(0)).sum()


def randomise(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Random values for every parameter."""
    generator = torch.Generator().manual_seed(0)
    model = model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.5)
    return model


def batch_of(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Tokens, and labels without the first of each sequence."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (batch, sequence), generator=generator)
    labels = torch.randint(VOCABULARY, (batch, sequence), generator=generator)
    labels[:, 0] = -100
    return {"tokens": tokens, "labels": labels}


def example(
    routing: str,
    *,
    batch: int = 4,
    sequence: int = 6,
    experts: int = EXPERTS,
    choices: int = CHOICES,
    gate: str = "softmax",
    shared: bool = False,
    layers: int = 1,
    more: Term | None = None,
    dtype: torch.dtype = torch.float64,
) -> Example:
    """A model with random weights, and a batch."""
    mixtures = [Mixture(routing, experts, choices, gate, shared) for _ in range(layers)]
    return randomise(RoutedModel(mixtures, more), dtype), batch_of(batch, sequence)
