"""What an entry of the survey of strangers is, and what several of them share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, TOKENS, WIDTH, CLASSES, VOCABULARY = 4, 16, 32, 6, 64
Built = tuple[nn.Module, Any] | tuple[nn.Module, Any, Callable[..., torch.Tensor]]  # model, inputs, perhaps loss_fn
PADDING, COUPLED, STATISTICS, EXPERTS, GRADIENT, SIZES = KINDS = (
    "padding mask",
    "coupled samples",
    "batch statistics",
    "mixture",
    "autograd.Function or gradient in forward",
    "sizes depend on data",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger:
    """A model as its package builds it, with its own way to train. `module` has its factory.

    `kinds` are words of `KINDS`.
    """

    package: str
    module: str
    kinds: tuple[str, ...]
    build: Callable[[], Built]


STRANGERS: dict[str, Stranger] = {}


def stranger(package: str, *kinds: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Add a factory to the survey under its own name. Its weights and inputs are those of seed 0."""

    def add(build: Callable[[], Built]) -> Callable[[], Built]:
        def seeded() -> Built:
            torch.manual_seed(0)
            return build()

        assert build.__name__ not in STRANGERS, build.__name__
        STRANGERS[build.__name__] = Stranger(package=package, module=build.__module__, kinds=kinds, build=seeded)
        return seeded

    return add


class Losing(nn.Module):
    """A model and the loss that a training script computes from its inputs."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor], **more: nn.Module) -> None:
        super().__init__()
        self.model, self.loss, self.more = model, loss, nn.ModuleDict(more)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model, *args, **self.more)


def tokens(rows: int = BATCH, length: int = TOKENS, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Token ids without the first four, which packages use for padding and the like."""
    return torch.randint(4, vocabulary, (rows, length))


def padding(rows: int = BATCH, length: int = TOKENS, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """A mask that is true for real tokens: every row has another length."""
    lengths = torch.tensor([length - 3 * (row % 4) for row in range(rows)])
    return (torch.arange(length) < lengths[:, None]).to(dtype)


def labels(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The ids as targets, without those that are padded."""
    return ids.masked_fill(~mask.bool(), -100)


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the tokens that have a target."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def classes(rows: int = BATCH) -> torch.Tensor:
    """A batch of class numbers."""
    return torch.randint(0, CLASSES, (rows,))


def classified(model: nn.Module, *inputs: torch.Tensor) -> Built:
    """A classifier whose loss is the script's."""
    return model, (*inputs, classes()), F.cross_entropy
