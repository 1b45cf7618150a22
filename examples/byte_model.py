"""A language model over bytes in plain PyTorch, as small as one gets: nothing in it knows of ranks."""

import torch
from torch import nn
from torch.nn import functional as F

NUM_BYTES, IGNORED = 256, -100


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Attention and a feed-forward network around a residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.feed_forward(self.norm2(x))
        return out


class ByteModel(nn.Module):
    """Predicts every next byte. With `tied`, the embedding is the last projection too."""

    def __init__(self, layers: int, width: int, seq_len: int, *, heads: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(NUM_BYTES, width), nn.Embedding(seq_len, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_BYTES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights, of a model on meta too. torch's own embedding is too large for a last projection."""
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Both inputs are (batch, sequence). The target of a position is the label of the next position."""
        x = self.embedding(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x))
        targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        return {"loss": F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)}
