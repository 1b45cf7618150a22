"""Factories of models whose inputs are nested or decide branches: `verify("input_factories:name", ...)`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deciding_models import Encoder, Lengths, PaddedIfNeeded, of_lengths, tokens_and_padding
from deciding_models import built as built_deciding
from input_models import WIDTH, Base, Logits, Sample, built, cases, tensors
from torch import nn
from torch.nn import functional as F

Factory = Callable[[], tuple[Any, ...]]


def _case(name: str) -> tuple[Any, ...]:
    kind, inputs, loss_fn = cases()[name]
    return (built(kind), inputs) if loss_fn is None else (built(kind), inputs, loss_fn)


class Everything(Base):
    """Takes a dict of dicts, a dataclass, None, numbers, texts and a list, and returns two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, batch: dict[str, Any], *, options: dict[str, Any], sample: Any) -> dict[str, Any]:
        inner = batch["inner"]
        assert inner["mask"] is None and options["how"] == "mean"
        x = (inner["deep"]["x"] + sample.x) * options["scale"]
        if options["twice"]:
            x = 2 * x
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.logits(x) + inner["deep"]["more"][0]
        classes = F.cross_entropy(logits, sample.target, reduction=options["how"])
        return {"losses": (classes, logits), "classes": classes, "size": logits.square().mean(), "name": "output"}


def weighted_sum(
    output: dict[str, Any], target: torch.Tensor, weight: torch.Tensor, factor: float = 0.5
) -> torch.Tensor:
    rows = F.cross_entropy(output["losses"][1], target, reduction="none")
    return output["classes"] + factor * output["size"] + (rows * weight).sum()


def everything() -> tuple[Any, ...]:
    x, y, w = tensors()
    inputs = {
        "batch": {"inner": {"deep": {"x": x, "more": [w[:, None], None, 3]}, "mask": None}},
        "options": {"scale": 0.5, "twice": True, "how": "mean"},
        "sample": Sample(x.flip(0), y),
        "target": y.flip(0),
        "weight": w,
    }
    return built(Everything), inputs, weighted_sum


nested: Factory = partial(_case, "nested")
nested_in_a_tuple: Factory = partial(_case, "nested in a tuple")
dataclass: Factory = partial(_case, "a dataclass")
flags: Factory = partial(_case, "flags")
flags_in_a_tuple: Factory = partial(_case, "flags in a tuple")
several_losses: Factory = partial(_case, "several losses")
kept_loss: Factory = partial(_case, "a kept loss")
three_arguments: Factory = partial(_case, "three arguments")
three_in_a_tuple: Factory = partial(_case, "three arguments in a tuple")
whole_batch: Factory = partial(_case, "the whole batch")
nested_target: Factory = partial(_case, "a nested target")


def padded() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Only the last of four rows is padded: fewer rows would take the other branch."""
    return built_deciding(PaddedIfNeeded).float(), tokens_and_padding(padded=(3,))


class WithOutput(PaddedIfNeeded):
    """Returns the embedded tokens beside the loss."""

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": super().forward(tokens, padding), "embedded": self.embed(tokens).tanh()}


def padded_with_output() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return built_deciding(WithOutput).float(), tokens_and_padding(padded=(3,))


def whole_with_output() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return built_deciding(WithOutput).float(), tokens_and_padding(padded=())


def lengths() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return built_deciding(Lengths), of_lengths(4, 3, 9, 2)


def encoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return built_deciding(Encoder), tokens_and_padding(padded=(1,))


def compiled() -> tuple[Any, ...]:
    x, y, _ = tensors()
    return torch.compile(built(Logits)), (x, y), F.cross_entropy


class Sensitive(nn.Module):
    """Doubles every difference 26 times: in float32 no digit of a gradient is certain, in float64 eight are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.down(torch.tanh(self.up(x))))
        for _ in range(26):
            y = 3.99 * y * (1 - y)
        return y.square().mean()


def sensitive() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Sensitive(), (torch.randn(4, WIDTH),)


class Holding(nn.Module):
    """Keeps a function that holds the model: in a copy it reads the attributes of the original."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scaled = lambda y: y * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = x.mean()
        y: torch.Tensor = self.scaled(self.layer(x))
        del self.scale
        return y.square().mean()


def holding() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Holding(), (torch.randn(4, WIDTH),)


def without_probabilities() -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    """Targets of -1, as some losses mark padding. The loss refuses them on one device."""
    inputs = {"input": torch.randn(4, 8), "target": torch.tensor([[1.0], [0.0], [-1.0], [-1.0]])}
    return nn.Sequential(nn.Linear(8, 1), nn.Sigmoid()), inputs, nn.functional.binary_cross_entropy
