"""The state of a model and of its optimizer under the model's names and shapes, whatever the plan.

`torch.distributed.checkpoint` saves it, and loads into it in place. `load_whole` copies values into it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.ir.program import Program, StateInfo
from autopar.ir.storage import Storage
from autopar.runtime.parameters.flat_shards import FlatRows, FlatShards
from autopar.runtime.parameters.packed import by_model_parameter
from autopar.runtime.parameters.user_view import stored


def flat_state(tensor: torch.Tensor, how: Storage) -> Any:
    """A parameter, or optimizer state shaped like it, under its flat global shape."""
    tensor = stored(tensor)
    if how.is_factored and isinstance(tensor, DTensor):
        return FlatShards.of([FlatRows(tensor=tensor, shape=how.dims.shape)], how.dims.shape)
    return tensor if tensor.dim() == 0 or isinstance(tensor, DTensor) else tensor.reshape(how.dims.shape)


def whole_state(infos: Sequence[StateInfo], tensors: Sequence[torch.Tensor], held: Mapping[str, Storage]) -> Any:
    """What `flat_state` says of a parameter, for one that is held in pieces too."""
    rows = [
        FlatRows(tensor=stored(tensor), shape=held[info.name].dims.shape, dim=info.part.dim, start=info.part.start)
        for info, tensor in zip(infos, tensors, strict=True)
        if info.part is not None
    ]
    part = infos[0].part
    return flat_state(tensors[0], held[infos[0].name]) if part is None else FlatShards.of(rows, part.shape)


def optimizer_state(
    program: Program,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    held: Mapping[str, Storage],
) -> dict[str, Any]:
    """The state of every parameter under the model's names.

    The parts of a packed parameter join their state if it has the parameter's shape. One scalar, such as a step count,
    stands for all parts. State of another shape keeps the names of the parts.
    """
    found: dict[str, Any] = {}
    for name, infos in by_model_parameter(program):
        own = [parameters[info.name] for info in infos if info.name in parameters]
        if not own:
            continue  # another pipeline stage's
        states = [optimizer.state.get(parameter, {}) for parameter in own]
        for key in dict.fromkeys(key for state in states for key in state):
            values = [state.get(key) for state in states]
            tensors = [v for v in values if isinstance(v, torch.Tensor)]
            if len(tensors) == len(own) and all(t.shape == p.shape for t, p in zip(tensors, own, strict=True)):
                found[f"{name}.{key}"] = whole_state(infos, tensors, held)
            elif len(own) == 1:
                found[f"{name}.{key}"] = values[0]
            elif len(tensors) == len(own) and all(t.dim() == 0 for t in tensors):
                found[f"{name}.{key}"] = FlatShards.of([FlatRows(tensor=t, shape=()) for t in tensors], ())
            else:
                found |= {f"{info.name}.{key}": s[key] for info, s in zip(infos, states, strict=True) if key in s}
    return found


def names_of_state(program: Program) -> list[tuple[str, ...]]:
    """The names of every parameter and persistent buffer of the model, in the order of a state dict."""
    found = [(name, *infos[0].aliases) for name, infos in by_model_parameter(program)]
    return found + [(name, *info.aliases) for name, info in program.buffers.items() if info.persistent]


@torch.no_grad()
def load_whole(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into this rank's part of a tensor of the same global shape. Collective if the value is split."""
    whole = value.full_tensor() if isinstance(value, (DTensor, FlatShards)) else value
    if not isinstance(target, FlatShards):
        target = FlatShards.of([FlatRows(tensor=target, shape=tuple(target.shape))], tuple(target.shape))
    for offsets, sizes, values in target.chunks:
        at = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        values.copy_(whole[at])
