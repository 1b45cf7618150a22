"""The parameters and buffers of a model: names, aliases, shapes and dtypes."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopar.ir.program import PartOf, StateInfo


def parameters_of(model: nn.Module, parts: Mapping[str, PartOf]) -> dict[str, StateInfo]:
    """The parameters by first name, in the model's order. Pieces replace the unequally packed parameters."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    params: dict[str, Any] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in first:
            aliases[first[id(p)]].append(name)
            continue
        first[id(p)] = name
        aliases[name] = []
        params[name] = p
    packed: dict[str, list[PartOf]] = {}
    for part in sorted(parts.values(), key=lambda part: part.start):
        packed.setdefault(part.name, []).append(part)
    infos = [
        StateInfo(
            name=name if part is None else part.piece_name,
            aliases=tuple(aliases[name]),
            shape=tuple(p.shape) if part is None else part.piece_shape,
            dtype=p.dtype,
            requires_grad=p.requires_grad,
            part=part,
        )
        for name, p in params.items()
        for part in packed.get(name, (None,))
    ]
    return {info.name: info for info in infos}


def buffers_of(model: nn.Module) -> dict[str, StateInfo]:
    """The buffers by first name, in the model's order."""
    lasting = {id(buffer) for buffer in _persistent(model)}
    names: dict[int, list[str]] = {}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in buffers.items():
        names.setdefault(id(buffer), []).append(name)
    return {
        first: StateInfo(
            name=first,
            aliases=tuple(others),
            shape=tuple(buffers[first].shape),
            dtype=buffers[first].dtype,
            persistent=key in lasting,
        )
        for key, (first, *others) in names.items()
    }


def _persistent(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield buffer
