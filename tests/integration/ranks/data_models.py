"""A small causal language model in float64 with everything that data and modes can touch."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, HIDDEN, HEADS, MAX_LENGTH = 24, 16, 4, 64


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out, self.up, self.down = (
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, 32, bias=False),
            nn.Linear(32, HIDDEN),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, HIDDEN)
        x = x + self.dropout(self.out(mixed))
        return x + self.down(torch.tanh(self.up(x)))


class Tokens(nn.Module):
    """`masked` targets can be ignored; `weighted` takes labels for weights of the places, zero among them; with `drops`
    training skips the second layer; `tied` shares one table.

    A gain is used in training only, and if `warm` a temperature in evaluation only.
    """

    def __init__(
        self,
        *,
        dropout: float = 0.0,
        masked: bool = True,
        weighted: bool = False,
        drops: bool = False,
        tied: bool = False,
        warm: bool = True,
    ) -> None:
        super().__init__()
        self.masked, self.weighted, self.drops, self.warm = masked, weighted, drops, warm
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.empty(MAX_LENGTH, HIDDEN))
        self.unused = nn.Linear(3, 5)
        self.empty, self.scale = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(()))
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.frozen = nn.Linear(HIDDEN, HIDDEN)
        with warnings.catch_warnings(action="ignore"):  # torch has nothing to initialise
            self.pruned = nn.Sequential(nn.Linear(HIDDEN, 0), nn.Linear(0, HIDDEN))
        self.gain, self.temperature = nn.Parameter(torch.empty(HIDDEN)), nn.Parameter(torch.empty(HIDDEN))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(input_ids) + self.positions[: input_ids.shape[1]]
        for index, layer in enumerate(self.layers):
            if not (self.training and self.drops and index):
                x = layer(x)
        x = x + self.pruned(x)
        x = self.frozen(x) * (self.gain if self.training or not self.warm else self.temperature) * self.scale
        logits = self.head(x)
        if self.weighted:
            weights = labels.to(logits.dtype)
            return {"loss": (logits.square().mean(-1) * weights).sum() / weights.sum(), "logits": logits}
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
        if self.masked:
            return {"loss": F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1)), "logits": logits}
        wanted = F.one_hot(labels, VOCABULARY).to(logits.dtype)
        return {"loss": (logits - wanted).square().mean(), "logits": logits}


def tokens(seed: int = 0, *, freezes_first: bool = False, **options: Any) -> Tokens:
    """The model with random values for every parameter; tables and first layer are not trained if `freezes_first`."""
    model = Tokens(**options).double()
    model.frozen.requires_grad_(False)
    if freezes_first:
        for part in (model.tokens, model.positions, model.layers[0]):
            part.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def rows(count: int, length: int, seed: int, *, ignore: bool = True) -> dict[str, torch.Tensor]:
    """Sequences whose targets are ignored in different numbers."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, VOCABULARY, (count, length), generator=generator) for _ in range(2))
    for row in range(count if ignore else 0):
        labels[row, 2 : 3 + (row + seed) % 4] = -100
    return {"input_ids": ids, "labels": labels}
