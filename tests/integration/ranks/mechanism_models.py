"""Small models with one mechanism each that many packages have, and a batch: factories ``() -> (model, inputs)``."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
Factory = Callable[[], tuple[nn.Module, Batch]]
MODELS: dict[str, Factory] = {}
ROWS, LENGTH, WORDS, WIDTH, CLASSES = 8, 12, 64, 16, 5


def mechanism(factory: Factory) -> Factory:
    MODELS[factory.__name__] = factory
    return factory


def _decoder(kind: str = "Llama", **options: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False}
    what = options.pop("what", "ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **options)
    model: nn.Module = getattr(transformers, f"{kind}{what}")(config)
    return model


def _tokens() -> tuple[Tensor, Tensor]:
    """Ids, and a mask of rows of 5 to 12 tokens, padded on the right."""
    return torch.randint(1, WORDS, (ROWS, LENGTH)), (torch.arange(LENGTH) < torch.arange(5, 13)[:, None]).long()


def _with_labels(ids: Tensor, mask: Tensor) -> Batch:
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@mechanism
def padded_on_the_right() -> tuple[nn.Module, Batch]:
    return _decoder(), _with_labels(*_tokens())


@mechanism
def padded_on_the_left() -> tuple[nn.Module, Batch]:
    ids, mask = _tokens()
    return _decoder("Mistral", sliding_window=4), _with_labels(ids, mask.flip(1))


@mechanism
def packed_positions() -> tuple[nn.Module, Batch]:
    ids, _ = _tokens()
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in range(2, 2 + ROWS)])
    return _decoder(), {"input_ids": ids, "position_ids": positions, "labels": ids}


@mechanism
def last_token_of_each_row() -> tuple[nn.Module, Batch]:
    ids, mask = _tokens()
    model = _decoder("Qwen2", what="ForSequenceClassification", num_labels=3)
    return model, {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.randint(3, (ROWS,))}


class Between(nn.Module):
    """A function between two residual blocks, which a pipeline can cut, with a loss for each row."""

    def __init__(self, function: Callable[[Tensor, Mapping[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.table, self.function, self.head = nn.Embedding(WORDS, WIDTH), function, nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor, n: Tensor, y: Tensor) -> Tensor:
        h = self.table(x)
        h = self.function(h + self.blocks[0](h), {"n": n})
        return F.cross_entropy(self.head(h + self.blocks[1](h)).mean(1), y)


def _between(function: Callable[[Tensor, Mapping[str, Tensor]], Tensor]) -> tuple[nn.Module, Batch]:
    ids, mask = _tokens()
    return Between(function), {"x": ids, "n": mask.sum(1), "y": torch.randint(CLASSES, (ROWS,))}


@mechanism
def tokens_by_row_and_number() -> tuple[nn.Module, Batch]:
    """The last two tokens of each row, by numbers that come with the batch."""

    def picked(h: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        rows = torch.arange(h.shape[0])
        return torch.stack([h[rows, given["n"] - 1], h[rows, given["n"] - h.shape[1] - 2]], 1)

    return _between(picked)


@mechanism
def best_tokens_of_each_row() -> tuple[nn.Module, Batch]:
    def picked(h: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return h[torch.arange(h.shape[0])[:, None], h.mean(-1).topk(3, dim=1).indices]

    return _between(picked)
