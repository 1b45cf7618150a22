"""The parameters and buffers of a model: names, aliases, shapes and dtypes."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from autopar.ir.program import PartOf, StateInfo


def named_state(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The kind, name and tensor of every parameter and buffer, under each of its names."""
    yield from (("parameter", *pair) for pair in module.named_parameters(remove_duplicate=False))
    yield from (("buffer", *pair) for pair in module.named_buffers(remove_duplicate=False))


def parameters_of(model: nn.Module, parts: Mapping[str, PartOf]) -> dict[str, StateInfo]:
    """The parameters by first name, in the model's order. Pieces replace the unequally packed parameters."""
    packed: dict[str, list[PartOf]] = {}
    for part in sorted(parts.values(), key=lambda part: part.start):
        packed.setdefault(part.name, []).append(part)
    infos = [
        StateInfo(
            name=name if part is None else part.piece_name,
            aliases=aliases,
            shape=tuple(p.shape) if part is None else part.piece_shape,
            dtype=p.dtype,
            requires_grad=p.requires_grad,
            part=part,
        )
        for name, (p, aliases) in _by_first_name(model.named_parameters(remove_duplicate=False)).items()
        for part in packed.get(name, (None,))
    ]
    return {info.name: info for info in infos}


def buffers_of(model: nn.Module) -> dict[str, StateInfo]:
    """The buffers by first name, in the model's order."""
    lasting = {
        id(buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    return {
        name: StateInfo(
            name=name,
            aliases=aliases,
            shape=tuple(buffer.shape),
            dtype=buffer.dtype,
            persistent=id(buffer) in lasting,
        )
        for name, (buffer, aliases) in _by_first_name(model.named_buffers(remove_duplicate=False)).items()
    }


def _by_first_name(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
    """Every tensor by its first name, with its other names."""
    by_name, names = dict(tensors), dict[int, list[str]]()
    for name, tensor in by_name.items():
        names.setdefault(id(tensor), []).append(name)
    return {first: (by_name[first], tuple(others)) for first, *others in names.values()}
