"""A model without its weights, to be captured again later without holding what the ranks have split."""

import copy
import logging

import torch
from torch import nn

logger = logging.getLogger("autopar")


def weightless(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers are on meta; ties, modes and all else are the model's.

    A model that cannot be copied, or has tensors that are neither parameters nor buffers and would meet those on meta,
    is returned as it is, and its weights stay in memory as long as it does.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.is_meta for tensor in tensors):
        return model
    if _has_plain_tensors(model):
        return model
    memo: dict[int, torch.Tensor] = {}  # deepcopy takes what stands here for an object's id
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever a user's attribute raises
        logger.info("the model is kept with its weights: it cannot be copied without them (%s)", error)
        return model


def _has_plain_tensors(model: nn.Module) -> bool:
    """Whether a module has a tensor as an attribute, or in a list, tuple or mapping that is one."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            if any(isinstance(each, torch.Tensor) for each in (value, *inner)):
                return True
    return False
