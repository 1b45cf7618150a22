"""Models whose inputs and outputs are nested, are dataclasses, or are no tensors; and losses of every form."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, CLASSES = 8, 4


@dataclass
class Sample:
    x: torch.Tensor
    target: torch.Tensor


@dataclass
class Unknown:
    x: torch.Tensor
    target: torch.Tensor


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor
    name: str = "output"


torch.export.register_dataclass(Sample)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, CLASSES)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.up(x)))


class Nested(Base):
    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        image, (offset, *_) = batch["image"]["x"], batch["offsets"]
        return F.cross_entropy(self.logits(image + offset), batch["target"])


class OfDataclass(Base):
    def forward(self, sample: Any) -> Output:
        logits = self.logits(sample.x)
        return Output(logits, F.cross_entropy(logits, sample.target))


class WithFlags(Base):
    def forward(
        self, x: torch.Tensor, target: torch.Tensor, scale: float = 1.0, mask: Any = None, mode: str = "mean"
    ) -> torch.Tensor:
        logits = self.logits(x * scale)
        return F.cross_entropy(logits if mask is None else logits * mask, target, reduction=mode)


class SeveralLosses(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.logits(x)
        return {"classes": F.cross_entropy(logits, y), "size": logits.square().mean()}


class KeepsItsLoss(Base):
    loss: torch.Tensor

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.logits(x)
        self.loss = F.cross_entropy(logits, y)
        return logits


class Logits(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x)


def weighted(output: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (F.cross_entropy(output, target, reduction="none") * weight).sum()


def of_batch(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return weighted(output, batch["y"], batch["w"])


def total(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["classes"] + 0.1 * output["size"]


def tensors(rows: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64)
    y = torch.randint(CLASSES, (rows,), generator=draw)
    return x, y, torch.rand(rows, generator=draw, dtype=torch.float64)


def cases(rows: int = 4, seed: int = 0) -> dict[str, tuple[type[nn.Module], Any, Any]]:
    """A model, its inputs and its loss function by name."""
    x, y, w = tensors(rows, seed)
    nested = {"image": {"x": x}, "offsets": [torch.ones_like(x), "unused"], "target": y}
    return {
        "nested": (Nested, {"batch": nested}, None),
        "nested in a tuple": (Nested, (nested,), None),
        "a dataclass": (OfDataclass, {"sample": Sample(x, y)}, None),
        "flags": (WithFlags, {"x": x, "target": y, "scale": 2.0, "mask": None, "mode": "sum"}, None),
        "flags in a tuple": (WithFlags, (x, y, 2.0, None, "sum"), None),
        "several losses": (SeveralLosses, {"x": x, "y": y}, total),
        "a kept loss": (KeepsItsLoss, {"x": x, "y": y}, None),
        "three arguments": (Logits, {"x": x, "target": y, "weight": w}, weighted),
        "three arguments in a tuple": (Logits, (x, y, w), weighted),
        "the whole batch": (Logits, {"x": x, "y": y, "w": w}, of_batch),
        "a nested target": (Logits, {"x": x, "target": {"y": y, "w": w}}, of_batch_target),
    }


def of_batch_target(output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
    return of_batch(output, target)


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def loss_on_one_device(model: nn.Module, inputs: Any, loss_fn: Any) -> torch.Tensor:
    """The loss as a user's loop computes it."""
    if loss_fn is None:
        out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        found: torch.Tensor = model.loss if isinstance(model, KeepsItsLoss) else getattr(out, "loss", out)
        return found
    if loss_fn is total:
        return total(model(**inputs))
    if not isinstance(inputs, dict):
        return weighted(model(inputs[0]), *inputs[1:])
    output = model(inputs["x"])
    if loss_fn is weighted:
        return weighted(output, inputs["target"], inputs["weight"])
    return of_batch(output, inputs.get("target", inputs))
