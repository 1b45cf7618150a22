"""Factories that the command line is given by name."""

from typing import Any

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


class Masked(nn.Module):
    """Takes another branch if no element is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if hidden.any():  # the line that must be named
            y = 2 * y.masked_fill(hidden, 0.0)
        return y


def masked() -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    """The loss is outside, and only the last row is hidden."""
    hidden = torch.arange(4)[:, None].eq(3).expand(4, 8).clone()
    inputs = {"x": torch.ones(4, 8), "hidden": hidden, "target": torch.zeros(4, 8)}
    return Masked(), inputs, nn.functional.mse_loss


def double() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Has float64 weights."""
    return Plain().double(), {"x": torch.ones(4, 16, dtype=torch.float64)}


def not_a_loss() -> tuple[nn.Module, dict[str, torch.Tensor], str]:
    return Masked(), {"x": torch.ones(4, 8)}, "mse"
