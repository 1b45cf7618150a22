"""Optimizers in a checkpoint: their state by the model's names, and the options of their groups.

State of a parameter's shape is split as the parameter is. Before a load, an optimizer gets its state from one step with
zero gradients, as in torch.distributed.checkpoint. So every tensor has the layout that the optimizer itself gives it.
The parameters that this step changes are loaded afterwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar._torch import private
from autopar.errors import CheckpointError, InputError, Problem
from autopar.runtime.checkpoint.plain import decode, encode
from autopar.runtime.parameters.flat_shards import FlatShards
from autopar.runtime.parameters.shown_tensor import as_shards

SPLIT: Any = {"split": True}  # in place of a tensor that lies among the tensors under its parameter's name and key


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """An optimizer, its number in the checkpoint, and this rank's parameters by the model's names."""

    index: int
    optimizer: Optimizer
    named: Mapping[str, nn.Parameter]

    @property
    def kind(self) -> str:
        return type(self.optimizer).__name__

    @property
    def groups(self) -> list[list[str]]:
        """The names of this rank's parameters in each group; empty for a parameter of another model."""
        names = {parameter: name for name, parameter in self.named.items()}
        return [[names.get(p, "") for p in group["params"]] for group in self.optimizer.param_groups]

    def state(self) -> Iterator[tuple[str, str, Any]]:
        """Name, key and value of all state of this rank."""
        for name, parameter in self.named.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield name, key, value

    def path(self, name: str, key: str) -> str:
        """The name of a tensor of state in a checkpoint."""
        return f"optimizer.{self.index}/{name}/{key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """A group of an optimizer: the names of its parameters, and its options as JSON has them."""

    parameters: tuple[str, ...]
    options: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOptimizer:
    """An optimizer: its class, its groups, and the state of each parameter by key as JSON has it."""

    kind: str
    groups: tuple[SavedGroup, ...]
    state: Mapping[str, Mapping[str, Any]]


def described(given: NamedOptimizer, plain_tensors: dict[str, torch.Tensor]) -> SavedOptimizer:
    """This rank's part of an optimizer but `state_tensors`. Tensors of plain data are added to `plain_tensors`."""
    groups = []
    for number, (group, names) in enumerate(zip(given.optimizer.param_groups, given.groups, strict=True)):
        if not all(names):
            raise InputError(
                f"group {number} of the optimizer {given.kind} has parameters that are not of this model; make the "
                "optimizer of parallel.parameters()"
            )
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        encoded = encode(options, f"optimizer.{given.index}/groups/{number}", plain_tensors)
        groups.append(SavedGroup(parameters=tuple(names), options=encoded))
    state: dict[str, dict[str, Any]] = {}
    for name, key, value in given.state():
        is_split = isinstance(value, torch.Tensor)
        state.setdefault(name, {})[key] = SPLIT if is_split else encode(value, given.path(name, key), plain_tensors)
    return SavedOptimizer(kind=given.kind, groups=tuple(groups), state=state)


def merged(parts: Sequence[SavedOptimizer]) -> SavedOptimizer:
    """One optimizer of the parts of all ranks. Ranks of a pipeline have the parameters of their own stages."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if part.kind != first.kind or len(part.groups) != len(first.groups):
            raise CheckpointError(
                f"rank {rank} saves {part.kind} with {len(part.groups)} groups, but rank 0 {first.kind} with "
                f"{len(first.groups)}; make the same optimizer on every rank"
            )
        for number, (group, other) in enumerate(zip(part.groups, first.groups, strict=True)):
            if group.options != other.options:
                raise CheckpointError(
                    f"group {number} of {part.kind} has other options on rank {rank} than on rank 0; use the same "
                    "options on every rank"
                )
    groups = [
        SavedGroup(
            parameters=tuple(dict.fromkeys(name for part in parts for name in part.groups[number].parameters)),
            options=group.options,
        )
        for number, group in enumerate(first.groups)
    ]
    state = {name: keys for part in parts for name, keys in part.state.items()}
    return SavedOptimizer(kind=first.kind, groups=tuple(groups), state=state)


def differences(saved: SavedOptimizer, index: int, ranks: Sequence[tuple[str, list[list[str]]]]) -> list[Problem]:
    """How an optimizer differs from the saved one, by its class and the names in its groups on all ranks."""
    path, (kind, groups) = f"optimizer {index}", ranks[0]
    if kind != saved.kind:
        return [Problem(path=path, rule=f"must be {saved.kind}, as in the checkpoint", value=kind)]
    if len(groups) != len(saved.groups):
        rule = f"must have {len(saved.groups)} groups, as in the checkpoint"
        return [Problem(path=path, rule=rule, value=len(groups))]
    problems = []
    for number, group in enumerate(saved.groups):
        now = {name or "a parameter of another model" for _, groups in ranks for name in groups[number]}
        then = set(group.parameters)
        problems += [Problem(path=f"{path}, group {number}", rule=f"lacks {name}") for name in sorted(then - now)]
        problems += [Problem(path=f"{path}, group {number}", rule=f"has {n} in addition") for n in sorted(now - then)]
    return problems


def set_options(optimizer: Optimizer, saved: SavedOptimizer, plain_tensors: Mapping[str, torch.Tensor]) -> None:
    """Give the groups their saved options, such as the learning rate of the moment."""
    for group, then in zip(optimizer.param_groups, saved.groups, strict=True):
        for key, value in decode(then.options, plain_tensors).items():
            now = group.get(key)
            if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
                now.copy_(value)
            else:
                group[key] = value


def prepare_state(given: NamedOptimizer, saved: SavedOptimizer, plain_tensors: Mapping[str, torch.Tensor]) -> None:
    """Make the state that a load fills, and set the values that are no tensors. It may change parameters."""
    optimizer, named, state = given.optimizer, given.named, saved.state
    params = {p for group in optimizer.param_groups for p in group["params"]}
    wanted = {named[name]: state[name] for name in state if name in named and named[name] in params}
    lacking = [parameter for parameter, keys in wanted.items() if not _has_tensors(optimizer, parameter, keys)]
    if lacking:
        _step_with_zeros(optimizer, lacking)
    for parameter in params:
        if parameter not in wanted:
            optimizer.state.pop(parameter, None)
    for parameter, keys in wanted.items():
        held = optimizer.state[parameter]
        for key in [key for key in held if key not in keys]:
            if isinstance(held[key], torch.Tensor):
                name = next(name for name, p in named.items() if p is parameter)
                raise CheckpointError(
                    f"{given.kind} holds {key} of {name}, which the checkpoint does not have; make the "
                    "optimizer with the options that it was saved with. Parameters have changed: build the model again"
                )
            del held[key]
        held.update({key: decode(value, plain_tensors) for key, value in keys.items() if value != SPLIT})


def _has_tensors(optimizer: Optimizer, parameter: nn.Parameter, keys: Mapping[str, Any]) -> bool:
    held = optimizer.state.get(parameter, {})
    return all(isinstance(held.get(key), torch.Tensor) for key, value in keys.items() if value == SPLIT)


def _step_with_zeros(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """One step in which only these parameters have gradients, which are zero."""
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.grad for parameter in every]
    for parameter in every:
        parameter.grad = None
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with private.without_step_hooks(optimizer):
            optimizer.step()
    except TypeError as error:
        raise CheckpointError(
            f"the state of {type(optimizer).__name__} cannot be made by a step with zero gradients ({error}); call "
            "step() once before load"
        ) from None
    finally:
        for parameter, grad in zip(every, before, strict=True):
            parameter.grad = grad


def state_tensors(given: NamedOptimizer, saved: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, FlatShards]:
    """The tensors of this rank's optimizer state by their names in a checkpoint. Loading writes into them."""
    state: dict[str, FlatShards] = {}
    for name, key, value in given.state():
        if isinstance(value, torch.Tensor) and (saved or {}).get(name, {}).get(key, SPLIT) == SPLIT:
            at = given.path(name, key)
            if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
                raise InputError(f"{at} cannot be saved, because ranks hold parts of a sum; use another optimizer")
            state[at] = as_shards(value.detach())
    return state
