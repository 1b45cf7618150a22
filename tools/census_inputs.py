"""What the census needs to build a model: an entry, inputs, and losses."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH = 4
CLASSES = 10
IMAGE, TOKENS = 64, 32
Built = tuple[nn.Module, Any, Callable[..., torch.Tensor] | None]  # model, inputs, loss_fn


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model of the census."""

    package: str
    name: str
    build: Callable[[], Built]


class Part(nn.Module):
    """A model with one of its outputs: an attribute, a key or a position."""

    def __init__(self, model: nn.Module, output: str | int) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        found = self.model(*args)
        out: torch.Tensor = getattr(found, self.output) if isinstance(self.output, str) else found[self.output]
        return out


def squared(out: Any, target: torch.Tensor) -> torch.Tensor:
    """The mean square of the first output tensor, whatever shape it has. `target` only gives the batch."""
    while not isinstance(out, torch.Tensor):
        out = next(iter(out.values())) if isinstance(out, Mapping) else out[0]
    return out.float().square().mean() + 0 * target.float().mean()


def image(channels: int = 3, size: int = IMAGE, dims: int = 2) -> torch.Tensor:
    """A batch of images or volumes."""
    return torch.randn(BATCH, channels, *[size] * dims)


def classes() -> torch.Tensor:
    """A batch of class numbers."""
    return torch.randint(0, CLASSES, (BATCH,))


def classifier(model: nn.Module, x: torch.Tensor) -> Built:
    """A model whose output are the logits of classes."""
    return model, (x, classes()), F.cross_entropy


def with_square(model: nn.Module, *inputs: torch.Tensor) -> Built:
    """A model with a loss of its first output."""
    return model, (*inputs, torch.zeros(BATCH)), squared


class WithLoss(nn.Module):
    """A model that returns no loss, with the mean square of its first output as loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return squared(self.model(**inputs), torch.zeros((), device=next(iter(inputs.values())).device))


def first_that_runs(candidates: Iterable[Callable[[], Built]]) -> Built:
    """The first candidate that can be called. If there is none, the first one that fails for want of values, or any.

    A model that reads a value cannot be called on meta, so that its failure says nothing about its inputs.
    """
    built: list[Built] = []
    without_values: list[Built] = []
    failed: Exception | None = None
    for candidate in candidates:
        try:
            found = candidate()
        except Exception as error:
            failed = failed or error
            continue
        own = error_of(*found)
        if own is None:
            return found
        (without_values if "meta" in str(own).lower() else built).append(found)
    if not built and not without_values:
        raise failed or ValueError("no candidates")
    return (without_values or built)[0]


def error_of(model: nn.Module, inputs: Any, loss_fn: Callable[..., torch.Tensor] | None) -> Exception | None:
    """The error of a call, if it fails. The whole model moves to the device that it was built for."""
    model.to(torch.get_default_device()).train()
    try:
        if isinstance(inputs, Mapping):
            model(**inputs)
        elif loss_fn is None:
            model(*inputs)
        else:
            loss_fn(model(*inputs[:-1]), inputs[-1])
    except Exception as error:
        return error
    return None
