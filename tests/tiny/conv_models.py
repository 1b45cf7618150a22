"""Convolutional networks, small enough for all ranks to run in one process."""

from typing import Any

import torch
from tiny_models import Example, randomise
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions with batch norm, added to the input or to what a strided convolution makes of it."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        same = stride == 1 and width_in == width
        shortcut = [] if same else [nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)]
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm_1(self.conv_1(x)), inplace=True)
        return F.relu(self.norm_2(self.conv_2(hidden)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network; without labels it returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.stages = nn.Sequential(Residual(4, 4), Residual(4, 4), Residual(4, 8, 2))
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.average(self.stages(self.pool(self.stem(x)))).flatten(1))
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Depthwise(nn.Module):
    """A ConvNeXt block: depthwise convolution, layer norm over channels, two products, a scale per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding="same", groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(hidden)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Patches, group norm, such blocks, pooling of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 2, 2), nn.GroupNorm(2, 4)
        self.blocks = nn.Sequential(Depthwise(4), Depthwise(4))
        self.pool = nn.Sequential(nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(2))
        self.head = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.pool(self.blocks(self.norm(self.stem(x)))).flatten(1)
        return {"loss": F.cross_entropy(self.head(hidden), labels)}


def images(batch: int = 8, size: int = 16, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 2, size, size, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 6, (batch,), generator=generator)}


def resnet() -> Example:
    return randomise(ResNet().double()), images()


def convnext() -> Example:
    return randomise(ConvNeXt().double()), images()
