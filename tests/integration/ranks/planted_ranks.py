"""Small models with a plain and with a masked mean as loss, and a fault that ranks have until `mended`.

``planted_ranks:plain`` and ``planted_ranks:masked`` are factories for `verify`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autopar.runtime.model.compiled import CompiledProgram

WIDTH, ROWS = 16, 4
WHOLE = CompiledProgram.denominators
Totals = dict[str, torch.Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        if mask is None:
            return F.mse_loss(x, y)
        return ((x - y).square().mean(-1) * mask).sum() / mask.sum()


def plain() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Model(), {"x": torch.randn(ROWS, 3, WIDTH), "y": torch.randn(ROWS, 3, WIDTH)}


def masked() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The last rows have one valid element."""
    model, inputs = plain()
    mask = torch.ones(ROWS, 3)
    mask[ROWS // 2 :] = 0
    mask[-1, 0] = 1
    return model, {**inputs, "mask": mask}


def without_a_divisor(rank: int) -> None:
    """From now on the first micro-batch of every step adds nothing to the loss's denominator."""

    def denominators(self: CompiledProgram, pieces: Sequence[Mapping[str, Any]], **how: bool) -> list[Totals]:
        own = WHOLE(self, pieces, per_micro_batch=True)
        dropped = {name: torch.zeros_like(value) for name, value in own[0].items()} if len(pieces) == 1 else own[0]
        return [{name: total[name] - dropped[name] for name in total} for total in WHOLE(self, pieces, **how)]

    CompiledProgram.denominators = denominators  # type: ignore[method-assign]


def mended(rank: int) -> None:
    CompiledProgram.denominators = WHOLE  # type: ignore[method-assign]
