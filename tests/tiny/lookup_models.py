"""Models whose batches hold indices: packed documents, tags under a mask, and a recommender. Written as public code is.

Each has a batch of legal indices, and `corrupted` puts other numbers into it.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]
WIDTH, HEADS, WORDS, PLACES, TAGS, ITEMS = 16, 4, 24, 20, 6, 31


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        q, k, v = (p(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class PackedDocuments(nn.Module):
    """Several documents in one sequence, so positions are an input. The loss ignores -1, and never reads label 0."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1), ignore_index=-1)
        return {"loss": loss, "logits": logits}


class Tagger(nn.Module):
    """Words and tags under a mask: what stands in masked places is never read. Places are counted, as in RoBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.block, self.head = Attention(), nn.Linear(WIDTH, TAGS)

    def forward(self, words: torch.Tensor, mask: torch.Tensor, tags: torch.Tensor) -> dict[str, torch.Tensor]:
        keep = mask.bool()
        place = torch.cumsum(mask, 1) * keep
        x = self.words(torch.where(keep, words, torch.zeros_like(words))) + self.places(place)
        logits = self.head(self.block(x))
        loss = F.cross_entropy(logits.flatten(0, 1), tags.masked_fill(~keep, -100).flatten())
        return {"loss": loss, "logits": logits}


class Recommender(nn.Module):
    """A history of items with -1 for none, an hour of the day, and a bucket that is computed of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.hours, self.buckets = (
            nn.Embedding(ITEMS + 1, WIDTH),
            nn.Embedding(24, WIDTH),
            nn.Embedding(6, WIDTH),
        )
        self.mix, self.head = nn.Linear(3 * WIDTH, WIDTH), nn.Linear(WIDTH, ITEMS)
        self.register_buffer("prices", torch.arange(ITEMS) % 3)

    def forward(
        self,
        history: torch.Tensor,
        minute: torch.Tensor,
        country: torch.Tensor,
        device: torch.Tensor,
        item: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        past = self.items(history + 1).mean(1)
        hour = self.hours(minute // 60 % 24)
        bucket = self.buckets(country * 2 + device)
        hidden = torch.tanh(self.mix(torch.cat((past, hour, bucket), -1)))
        scores = self.head(hidden) - self.prices[item].unsqueeze(-1)
        return {"loss": F.cross_entropy(scores, item), "scores": scores}


class Corrected(nn.Module):
    """The labels are read twice: as targets, and by a table that has no row for the ignored number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.block = Attention()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.block(self.table(tokens - 1)) + self.table(labels)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def _ids(*shape: int, end: int, seed: int) -> torch.Tensor:
    return torch.randint(0, end, shape, generator=torch.Generator().manual_seed(seed))


def packed_documents(batch: int, length: int = 8, seed: int = 0) -> Batch:
    starts = _ids(batch, 1, end=length, seed=seed)
    positions = (torch.arange(length) - starts) % length
    labels = _ids(batch, length, end=WORDS, seed=seed + 2)
    labels[:, 3] = -1
    return {"tokens": _ids(batch, length, end=WORDS, seed=seed + 1), "positions": positions, "labels": labels}


def tagger(batch: int, length: int = 8, seed: int = 0) -> Batch:
    lengths = _ids(batch, 1, end=length - 2, seed=seed) + 2
    mask = (torch.arange(length) < lengths).long()
    words, tags = _ids(batch, length, end=WORDS, seed=seed + 1), _ids(batch, length, end=TAGS, seed=seed + 2)
    return {"words": words, "mask": mask, "tags": tags}


def recommender(batch: int, length: int = 5, seed: int = 0) -> Batch:
    return {
        "history": _ids(batch, length, end=ITEMS + 1, seed=seed) - 1,
        "minute": _ids(batch, end=1440, seed=seed + 1),
        "country": _ids(batch, end=3, seed=seed + 2),
        "device": _ids(batch, end=2, seed=seed + 3),
        "item": _ids(batch, end=ITEMS, seed=seed + 4),
    }


def corrected(batch: int, length: int = 8, seed: int = 0) -> Batch:
    tokens, labels = (_ids(batch, length, end=WORDS, seed=seed + k) for k in range(2))
    return {"tokens": tokens + 1, "labels": labels}


MODELS: dict[str, tuple[Any, Any]] = {
    "packed documents": (PackedDocuments, packed_documents),
    "tagger": (Tagger, tagger),
    "recommender": (Recommender, recommender),
    "corrected": (Corrected, corrected),
}


def built(name: str) -> nn.Module:
    """A model in float64 with equal weights in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = MODELS[name][0]()
    return model.double()


def batch_of(name: str, count: int, **options: int) -> Batch:
    found: Batch = MODELS[name][1](count, **options)
    return found


def corrupted(batch: Batch, name: str, place: tuple[int, ...], value: int) -> Batch:
    """The batch with another number in one place of one input."""
    changed = batch[name].clone()
    changed[place] = value
    return {**batch, name: changed}
