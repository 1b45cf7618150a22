"""Models small enough for all ranks to run in one process, and whose sizes divide by the degrees under test."""

import math
from typing import Any

import torch
from torch import nn

Example = tuple[nn.Module, dict[str, torch.Tensor]]


def randomise(model: nn.Module, seed: int = 0, scale: float = 0.3) -> nn.Module:
    """Random values for every parameter: ones and zeros hide permutations."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * scale)
    return model


def token_batch(batch: int, sequence: int, vocabulary: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Ids and labels, some of them to be ignored, a different number in each sequence."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (batch, sequence), generator=generator)
    labels = torch.randint(0, vocabulary, (batch, sequence), generator=generator)
    for row in range(batch):
        labels[row, 1 : 2 + row % 3] = -100
    return {"input_ids": ids, "labels": labels}


def llama(degree: int = 2, *, batch: int = 4, layers: int = 2, sequence: int | None = None) -> Example:
    """A Llama with grouped queries whose heads, widths, vocabulary and sequence divide by `degree`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    groups = degree if degree > 2 else 2
    config = LlamaConfig(
        hidden_size=8 * groups,
        intermediate_size=12 * groups,
        num_hidden_layers=layers,
        num_attention_heads=2 * groups,
        num_key_value_heads=groups,
        vocab_size=10 * groups,
    )
    return seeded(LlamaForCausalLM, config, batch, sequence or 2 * groups, 10 * groups)


def gpt2(degree: int = 2, *, batch: int = 4, layers: int = 2, sequence: int | None = None) -> Example:
    """A GPT-2 without dropout whose heads, vocabulary and sequence divide by `degree`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    heads = degree if degree > 2 else 2
    config = GPT2Config(
        n_embd=6 * heads,
        n_layer=layers,
        n_head=heads,
        vocab_size=8 * heads,
        n_positions=4 * heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        scale_attn_by_inverse_layer_idx=True,
    )
    return seeded(GPT2LMHeadModel, config, batch, sequence or 2 * heads, 8 * heads)


def seeded(kind: Any, config: Any, batch: int, sequence: int, vocabulary: int) -> Example:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = kind(config)
    return randomise(model.double()), token_batch(batch, sequence, vocabulary)


class Mlp(nn.Module):
    """Two products, a norm between them and a mean square loss."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.down(self.norm(torch.tanh(self.up(x))))
        return {"loss": torch.nn.functional.mse_loss(y, target), "y": y}


def mlp(degree: int = 2, *, batch: int = 4) -> Example:
    model = randomise(Mlp(4 * degree, 8 * degree).double())
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(batch, 2 * degree, 4 * degree, generator=generator, dtype=torch.float64) for _ in range(2))
    return model, {"x": x, "target": target}


class MegatronBlock(nn.Module):
    """A transformer layer as Korthikanti et al. 2022 count it: explicit attention matrix, three dropouts, GELU MLP."""

    def __init__(self, hidden: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        return x.reshape(batch, sequence, self.heads, hidden // self.heads).transpose(1, 2)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self.split_heads(project(x)) for project in (self.query, self.key, self.value))
        scores = torch.matmul(query / math.sqrt(query.shape[-1]), key.transpose(-1, -2))
        mask = torch.full((x.shape[1], x.shape[1]), -1e4, dtype=x.dtype, device=x.device).triu(1)
        weights = self.dropout(torch.softmax(scores + mask, dim=-1))
        return self.out(torch.matmul(weights, value).transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm_2(x)))))


class Megatron(nn.Module):
    """A stack of such layers between a token table and its transpose."""

    def __init__(self, hidden: int, heads: int, *, vocabulary: int = 64, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(MegatronBlock(hidden, heads, dropout) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = torch.nn.functional.linear(x, self.table.weight)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def megatron(degree: int = 2, *, batch: int = 4, dropout: float = 0.0) -> Example:
    """The Megatron-like layers at tiny sizes, in float64."""
    model = Megatron(8 * degree, degree if degree > 2 else 4, vocabulary=8 * degree, dropout=dropout)
    return randomise(model.double()), token_batch(batch, 2 * degree, 8 * degree)
