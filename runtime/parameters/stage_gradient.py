"""Gradients in a pipeline: torch's norm of all gradients would be the norm of this rank's stages, so it raises."""

import sys
from types import FrameType
from typing import Any

import torch

from autopar._torch import private
from autopar.errors import RuntimeInputError
from autopar.runtime.parameters.factored import FactoredTensor
from autopar.runtime.parameters.whole_values import ShownTensor


class StageGradient:
    """A gradient of one of this rank's pipeline stages."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_norm(func, sys._getframe(1))
        if issubclass(cls, ShownTensor):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]
        if any(issubclass(kind, ShownTensor) for kind in types):
            return NotImplemented  # the other operand knows how
        with private.without_torch_function():
            return func(*args, **(kwargs or {}))


class PlainStageGradient(StageGradient, torch.Tensor):
    __slots__ = ()


class FactoredStageGradient(StageGradient, FactoredTensor):
    __slots__ = ()


def refuse_norm(func: Any, frame: FrameType) -> None:
    """Raise if torch's clipping of gradients, whose frame called a function of torch, computes a norm."""
    if "norm" in func.__name__ and frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
        raise RuntimeInputError(
            "torch.nn.utils computes a norm over the gradients of this rank's pipeline stages, which differs among "
            "ranks; call parallel.clip_grad_norm_(max_norm), which returns the norm of all gradients"
        )
