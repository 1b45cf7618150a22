"""Models that read values while they run: of masks that they make, of padding, of lengths."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]
WIDTH, WORDS, LENGTH = 16, 24, 10


class Encoder(nn.Module):
    """`nn.TransformerEncoder`, which looks whether its mask is causal."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, WORDS)
        self.causal = causal

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]) if self.causal else None
        if self.causal:
            padding = torch.zeros_like(padding, dtype=self.head.weight.dtype).masked_fill(padding, float("-inf"))
        x = self.encoder(self.embed(tokens), mask=mask, src_key_padding_mask=padding)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class PaddedIfNeeded(nn.Module):
    """Skips the mask of a batch without padding, as audio models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if padding.any():
                x = 2 * x.masked_fill(padding[..., None], 0.5)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Lengths(nn.Module):
    """Cuts a batch to its longest sequence, and masks the others by their length."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max())
        y = self.down(torch.relu(self.up(x[:, :longest])))
        inside = torch.arange(longest, device=x.device)[None] < lengths[:, None]
        return (y.square().mean(-1) * inside).sum() / lengths.sum()


class Full(nn.Module):
    """Scales a batch whose longest sequence fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if lengths.max() == x.shape[1] else 1.0
        return scale * self.head(x).square().mean()


class RelativePositions(nn.Module):
    """Attention with buckets of distances, whose table must be as long as the largest bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Embedding(2 * LENGTH, 4)
        self.register_buffer("limit", torch.tensor(LENGTH - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        distances = (places[:, None] - places[None]).clamp(-self.limit.item(), self.limit.item())
        if distances.min() < 0:
            distances = distances - distances.min()
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(distances).permute(2, 0, 1))
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


class MaskedAutoencoder(nn.Module):
    """Encodes the visible patches only. A token stands for hidden patches, if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Linear(5, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 5))

    def forward(self, patches: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.embed(patches)[~hidden]
        for layer in self.encoder:
            x = x + torch.tanh(layer(x))
        if not hidden.any():
            return (self.decoder(x).view_as(patches) - patches).square().mean()
        whole = self.token.expand(*hidden.shape, -1).clone()
        whole[~hidden] = x
        return (self.decoder(whole) - patches)[hidden].square().mean()


class Checked(nn.Module):
    """Refuses tokens and variances that it cannot use. The positions of tokens may be given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.mean, self.register = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor, variance: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        if tokens.max() >= WORDS - 4 or not (tokens >= 0).all():
            raise ValueError(f"tokens must be below {WORDS - 4}")
        assert variance.max().item() < 9, "the variance is too large"
        x = self.embed(tokens)
        if places is not None:
            torch._assert((places < LENGTH).all(), "too many places")
            x = x + self.places(places)
        found = self.mean(torch.tanh(self.register(x))).squeeze(-1)
        return F.gaussian_nll_loss(found, tokens.to(x.dtype), variance)


def patches(*hidden: int, rows: int = 4, seed: int = 0) -> Batch:
    """Patches of which the rows have so many hidden ones, the last row none."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.zeros(rows, 6, dtype=torch.bool)
    for row, count in enumerate(hidden):
        mask[row, torch.randperm(6, generator=draw)[:count]] = True
    return {"patches": torch.randn(rows, 6, 5, generator=draw, dtype=torch.float64), "hidden": mask}


def tokens_and_variance(*, word: int = 5, variance: float = 1.0, place: int | None = None, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS - 4, (4, LENGTH), generator=draw)
    variances = torch.rand(4, LENGTH, generator=draw, dtype=torch.float64) + 0.5
    tokens[3, 2], variances[1, 3] = word, variance
    if place is None:
        return {"tokens": tokens, "variance": variances}
    places = torch.randint(LENGTH - 1, (4, LENGTH), generator=draw)
    places[2, 2] = place
    return {"tokens": tokens, "variance": variances, "places": places}


def tokens_and_padding(rows: int = 4, *, padded: tuple[int, ...] = (1,), seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    padding = torch.zeros(rows, LENGTH, dtype=torch.bool)
    for row in padded:
        padding[row, 7:] = True
    return {"tokens": torch.randint(WORDS, (rows, LENGTH), generator=draw), "padding": padding}


def of_lengths(*lengths: int, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(len(lengths), LENGTH, WIDTH, generator=draw, dtype=torch.float64)
    return {"x": x, "lengths": torch.tensor(lengths)}


def rows_of(batch: Batch, part: slice) -> Batch:
    return {name: value[part] for name, value in batch.items()}


def built(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = kind()
    return model.double()
