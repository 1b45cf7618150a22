"""Factories that the command line is given by name."""

import torch
from torch import nn


class Branching(nn.Module):
    """Cannot be captured: its control flow depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if y.sum() > 0:  # the line that must be named
            y = -y
        return y.square().mean()


def branching() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Branching(), {"x": torch.ones(4, 4)}


class Plain(nn.Module):
    """Exports; has one operator without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cumsum(torch.relu(self.up(x)), dim=-1)
        return self.down(torch.special.bessel_j0(y)).square().mean()


def plain() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Plain(), {"x": torch.ones(4, 16)}


def broken() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    raise KeyError("no such weights")
