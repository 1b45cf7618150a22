"""The state of a model and of its optimizer under the model's names and shapes, whatever the plan.

`torch.distributed.checkpoint` saves it, and loads into it in place. `load_whole` copies values into it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.ir.program import Program
from autopar.ir.storage import Storage
from autopar.runtime.parameters.factored import stored
from autopar.runtime.parameters.flat_shards import FlatRows, FlatShards
from autopar.runtime.parameters.joined import JoinedTensor
from autopar.runtime.parameters.packed import by_model_parameter


def flat_state(tensor: torch.Tensor, storage: Storage | None) -> Any:
    """A parameter of the model, or state shaped like it, in its flat shape. One of several parts has no `storage`."""
    if isinstance(tensor, JoinedTensor):
        return tensor.flat_shards()
    tensor = stored(tensor)
    if storage is None:
        return tensor
    if storage.is_factored and isinstance(tensor, DTensor):
        return FlatShards.of([FlatRows(tensor=tensor, shape=storage.dims.shape)], storage.dims.shape)
    return tensor if tensor.dim() == 0 or isinstance(tensor, DTensor) else tensor.reshape(storage.dims.shape)


def optimizer_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, held: Mapping[str, Storage]
) -> dict[str, Any]:
    """The state of every parameter of the model under its name. State of another shape stays as it is."""
    state: dict[str, Any] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            state[f"{name}.{key}"] = flat_state(value, held.get(name)) if is_like else value
    return state


def names_of_state(program: Program) -> list[tuple[str, ...]]:
    """The names of every parameter and persistent buffer of the model, in the order of a state dict."""
    names = [(name, *infos[0].aliases) for name, infos in by_model_parameter(program)]
    return names + [(name, *info.aliases) for name, info in program.buffers.items() if info.persistent]


@torch.no_grad()
def load_whole(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into this rank's part of a tensor of the same global shape. Collective if the value is split."""
    whole = value.full_tensor() if isinstance(value, (DTensor, FlatShards)) else value
    if not isinstance(target, FlatShards):
        target = FlatShards.of([FlatRows(tensor=target, shape=tuple(target.shape))], tuple(target.shape))
    for offsets, sizes, values in target.chunks:
        at = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        values.copy_(whole[at])
