"""Small networks for coloured pictures, and a text classifier, as their authors write them."""

import torch
from torch import nn
from torch.nn import functional as F

CLASSES, WORDS = 10, 77


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut of 1 × 1."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Conv2d(channels, width, 1, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ColourResNet(nn.Module):
    """A stem of three input channels that is much of the work, residual blocks of growing width, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.layers = nn.Sequential(BasicBlock(8, 16), BasicBlock(16, 32), BasicBlock(32, 64))
        self.fc = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        logits = self.fc(F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class ColourLeNet(nn.Module):
    """A plain sequence of layers without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 5), nn.Conv2d(8, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * 5 * 5, 24), nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits = self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class TextClassifier(nn.Module):
    """More words than classes: a label must not be drawn below the number of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.Linear(32, CLASSES)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.head(F.relu(self.up(self.words(tokens).mean(1)))), target)}


def pictures(batch: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 3, 32, 32, generator=generator)
    return {"x": x, "labels": torch.randint(0, CLASSES, (batch,), generator=generator)}


def colour_resnet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return ColourResNet(), pictures()


def colour_lenet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return ColourLeNet(), pictures()


def text_classifier() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return TextClassifier(), {"tokens": torch.ones(4, 6, dtype=torch.long), "target": torch.zeros(4, dtype=torch.long)}
