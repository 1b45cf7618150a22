"""Copies of master weights in the dtype of computing, for parameters that FSDP2 does not cast.

FSDP2 gathers the parameters that ZeRO shards in the dtype of computing (`autopar.runtime.model.zero`). All other
parameters are cast here. A copy lasts for one step: all its micro-batches share it, and the next step makes a new copy
of the updated weight. Gradients are cast to the dtype of the parameter, so they add up in float32.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _Cast(torch.autograd.Function):
    """The copy of a value that is cast already. Its gradient has the dtype of the value."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.dtype = value.dtype
        return copy.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None


class ComputeCopies:
    """The copies of one module's parameters. `dtypes` are the dtypes of computing by name."""

    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        self._dtypes = dtypes
        self._held: dict[str, torch.Tensor] = {}

    def of(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A parameter's local value in its dtype of computing."""
        dtype = self._dtypes[name]
        if value.dtype == dtype:
            return value
        if name not in self._held:
            self._held[name] = value.detach().to(dtype)
        cast: torch.Tensor = _Cast.apply(value, self._held[name])
        return cast

    def tensors(self) -> list[torch.Tensor]:
        """The copies that are held now."""
        return list(self._held.values())

    def clear(self) -> None:
        """Forget the copies. Graphs of autograd keep what they need."""
        self._held.clear()
