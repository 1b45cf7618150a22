"""A deep convolutional network with a bias before every batch norm, and a batch norm before another."""

import torch
from torch import nn


class DeepConvolutions(nn.Module):
    """Residual blocks of convolution, batch norm and ReLU, with a bias and a running mean that are rounding alone."""

    def __init__(self, depth: int = 16, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, width, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.BatchNorm2d(width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(x)
        for layer in self.layers:
            x = x + nn.functional.relu(layer(x))
        logits = self.head(x.mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, target), "logits": logits}


def deep_convolutions(batch: int = 8, depth: int = 16) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    inputs = torch.randn(batch, 2, 6, 6, generator=generator)
    return DeepConvolutions(depth), {"x": inputs, "target": torch.arange(batch) % 4}
