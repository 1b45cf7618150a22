"""A meta model on a device without data: `torch.autocast` has no effect on meta tensors.

A model on meta is exported on meta. If its graph then has an autocast region, it is exported again on tensors that lie
on the region's device and have no elements.
"""

import copy
from typing import Any

import torch
from torch import fx, nn

from autopar._torch import private
from autopar._torch.private import pytree
from autopar.capture.weightless import plain_tensors
from autopar.errors import CaptureError


def device_of_regions(module: fx.GraphModule) -> str | None:
    """The device type of the autocast regions that are on in an exported graph. None without a region."""
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            if getattr(node.target, "__name__", "") == "wrap_with_autocast" and node.args[2]:
                return str(node.args[0])
    return None


def on_device_without_data(model: nn.Module, inputs: Any, device_type: str) -> tuple[nn.Module, Any]:
    """A copy of a meta model, and inputs, on a device and without elements."""
    mode = private.fake_tensors()

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device_type)

    # deepcopy takes the entry of an object's id instead of a copy
    memo: dict[int, Any] = {id(tensor): empty(tensor) for tensor in plain_tensors(model)}
    for tensor in (*model.parameters(), *model.buffers()):
        twin = empty(tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(twin, requires_grad=tensor.requires_grad) if is_parameter else twin
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:  # a user's attribute may raise anything
        raise CaptureError(
            "the model is on meta, where torch.autocast has no effect, and a copy of it fails: "
            f"{type(error).__name__}: {error}; build the model on a device"
        ) from error
    return copied, pytree.tree_map_only(torch.Tensor, empty, inputs)
