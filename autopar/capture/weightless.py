"""A model without its weights. It can be captured again, but does not hold the full weights in memory."""

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from autopar._torch import private
from autopar._torch.private import pytree
from autopar.errors import CaptureError

_logger = logging.getLogger("autopar")


def weightless(model: nn.Module) -> nn.Module:
    """A copy of a model on meta. The model itself if it cannot be copied, or has plain tensors beside its state."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.is_meta for tensor in tensors) or any(True for _ in plain_tensors(model)):
        return model
    try:
        return with_tensors(model, lambda tensor: torch.empty_like(tensor, device="meta"))
    except Exception as error:  # a user's attribute may raise anything
        _logger.info(
            "the capture keeps the model's weights in memory, because the model cannot be copied without them (%s)",
            error,
        )
        return model


def plain_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that are attributes of a module, or in an attribute that is a list, tuple or mapping."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            inner = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
            )
            for each in inner:
                if isinstance(each, torch.Tensor):
                    yield each


def device_of_regions(module: fx.GraphModule) -> str | None:
    """The device type of the autocast regions that are on in an exported graph. None without a region."""
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            if getattr(node.target, "__name__", "") == "wrap_with_autocast" and node.args[2]:
                return str(node.args[0])
    return None


def on_device_without_data(model: nn.Module, inputs: Any, device_type: str) -> tuple[nn.Module, Any]:
    """A copy of a meta model, and inputs, on a device and without elements: `torch.autocast` ignores meta tensors."""
    mode = private.fake_tensors()

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device_type)

    try:
        copied = with_tensors(model, empty)
    except Exception as error:  # a user's attribute may raise anything
        raise CaptureError(
            "the model is on meta, where torch.autocast has no effect, and a copy of it fails: "
            f"{type(error).__name__}: {error}; build the model on a device"
        ) from error
    return copied, pytree.tree_map_only(torch.Tensor, empty, inputs)


def with_tensors(model: nn.Module, twin: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A copy of a model with the twin of each of its tensors."""
    memo: dict[int, Any] = {}  # deepcopy takes the entry of an object's id instead of a copy
    for tensor in (*plain_tensors(model), *model.parameters(), *model.buffers()):
        new = twin(tensor)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            vars(new).update(vars(tensor))
        memo[id(tensor)] = new
    return copy.deepcopy(model, memo)
