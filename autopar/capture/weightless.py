"""A model without its weights. It can be captured again, but does not hold the full weights in memory."""

import copy
import logging
from collections.abc import Iterator

import torch
from torch import nn

logger = logging.getLogger("autopar")


def weightless(model: nn.Module) -> nn.Module:
    """A copy of a model on meta. The model itself if it cannot be copied, or has plain tensors beside its state."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.is_meta for tensor in tensors):
        return model
    if any(True for _ in plain_tensors(model)):
        return model
    memo: dict[int, torch.Tensor] = {}  # deepcopy uses the entry of an object's id instead of a copy
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # a user's attribute may raise anything
        logger.info(
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
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            yield from (each for each in (value, *inner) if isinstance(each, torch.Tensor))
