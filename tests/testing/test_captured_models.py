"""Models whose capture is out of the ordinary, under a tensor and a data dimension, equal to one device."""

from typing import Any

import pytest
import torch
from equivalence import case_of, check, labelled
from tiny_models import Example, randomise
from torch import nn
from torch.nn import functional as F

from autopar.ir.sharding import Mesh

VOCABULARY = 32


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def _built(kind: str, **sizes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, kind.partition("For")[0].removesuffix("Model") + "Config")(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(getattr(transformers, kind)(config).double())


def t5() -> Example:
    """Shifts its labels by writing into slices."""
    model = _built(
        "T5ForConditionalGeneration",
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=1,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return model, {"input_ids": tokens(4, 8), "labels": tokens(4, 6)}


def deberta() -> Example:
    """Detaches in place and gathers relative positions."""
    model = _built(
        "DebertaV2ForTokenClassification",
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        relative_attention=True,
        position_buckets=4,
        pos_att_type=["c2p", "p2c"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=4,
    )
    return model, {"input_ids": tokens(4, 8), "labels": tokens(4, 8) % 4}


def mixtral() -> Example:
    """Picks experts by `topk`."""
    model = _built(
        "MixtralForCausalLM",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    return model, {"input_ids": tokens(4, 8), "labels": tokens(4, 8)}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells = nn.Embedding(VOCABULARY, 8), nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, _ = self.cells(self.table(input_ids))
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def lstm() -> Example:
    return randomise(Recurrent().double()), {"input_ids": tokens(4, 8), "labels": tokens(4, 8)}


class Pieces(nn.Module):
    """Slices written to, elements picked, a counter and an average."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(16, dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.up(x)
        self.count += 1
        self.average.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        z = torch.zeros_like(h)
        z[:, 1:] = h[:, :-1]
        z[z > 1] = 0.5
        largest = h.topk(3, -1).values.sum(-1, keepdim=True)
        spread, mean = torch.var_mean(h, -1, keepdim=True)
        out = self.down(z + h.max(1, keepdim=True).values + h.sort(1).values + self.average)
        return {"loss": F.mse_loss(out * spread + mean + largest, y)}


def pieces() -> Example:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, 6, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return randomise(Pieces().double()), {"x": x, "y": y}


MODELS = {"t5": t5, "deberta": deberta, "mixtral": mixtral, "lstm": lstm, "pieces": pieces}


@pytest.mark.parametrize("model", MODELS)
def test_equal_to_one_device(model: str) -> None:
    case = case_of(MODELS[model]())
    for mesh in (Mesh.of(dp=1, tp=2), Mesh.of(dp=2, tp=2)):
        check(case, labelled(case, mesh), mesh)
