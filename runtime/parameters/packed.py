"""Packed parameters: one parameter of the model is several parameters of the program, one for each part.

The parts' values are cut from the model's tensor. Results are joined when they leave the runtime.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import nn

from autopar.ir.program import Program, StateInfo
from autopar.runtime.parameters.flat_shards import Joint

ParameterSource = Callable[[str], torch.Tensor]


def packed_source(program: Program, source: ParameterSource) -> ParameterSource:
    """A source of the model's tensors that also answers for the program's pieces."""
    wholes = lru_cache(maxsize=2)(source)  # the pieces of a weight and of its bias are asked for in turn

    def get(name: str) -> torch.Tensor:
        info = program.every_parameter.get(name)
        if info is None or info.part is None:
            return source(name)
        return wholes(info.part.name).narrow(info.part.dim, info.part.start, info.part.stop - info.part.start)

    return get


def by_model_parameter(program: Program) -> Iterator[tuple[str, list[StateInfo]]]:
    """The model's parameters by name, each with its pieces in order, or with itself."""
    groups: dict[str, list[StateInfo]] = {}
    for info in program.every_parameter.values():
        groups.setdefault(info.whole_name, []).append(info)
    yield from groups.items()


def joint_of(infos: Sequence[StateInfo]) -> Joint:
    """How the pieces of a parameter, or it alone, make up the model's tensor."""
    parts = [info.part for info in infos if info.part is not None]
    if not parts:
        return Joint(infos[0].shape)
    return Joint(parts[0].shape, parts[0].dim, (*(part.start for part in parts), parts[-1].stop))


def names_of_state(program: Program) -> list[tuple[str, ...]]:
    """The names of every parameter and persistent buffer of the model, in the order of a state dict."""
    names = [(name, *infos[0].aliases) for name, infos in by_model_parameter(program)]
    return names + [(name, *info.aliases) for name, info in program.buffers.items() if info.persistent]


def join_packed(program: Program, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole values by the model's names; a parameter without a value has none."""
    joined: dict[str, torch.Tensor] = {}
    for name, infos in by_model_parameter(program):
        pieces = [values[info.name] for info in infos if info.name in values]
        if pieces:
            joined[name] = joint_of(infos).joined(pieces)
    return joined


def complete_gradients(program: Program, parameters: Mapping[str, nn.Parameter]) -> None:
    """Pieces that the loss did not reach get zeros if others have gradients: optimizers decay rows with zeros."""
    for _, infos in by_model_parameter(program):
        params = [parameters[info.name] for info in infos if info.name in parameters]
        if any(p.grad is not None for p in params):
            for parameter in params:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
