"""Tensors that show the model's shape, and the functions of torch that run on their whole values."""

import sys
from abc import abstractmethod
from collections.abc import Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from autopar._torch import private
from autopar.errors import RuntimeInputError
from autopar.runtime.parameters.flat_shards import FlatShards
from autopar.runtime.parameters.operator_kinds import (
    TURNED,
    changed_operands,
    is_by_element,
    rows_of,
    target_of,
    tensors_in,
    writes,
)

_Kind = TypeVar("_Kind")


class ShownTensor(torch.Tensor):
    """A tensor that shows the model's shape. `model_name` is the parameter's; temporary values have none."""

    __slots__ = ()
    model_name: str

    @abstractmethod
    def gathered(self) -> torch.Tensor:
        """A copy of the whole value in the model's shape: a replicated DTensor if the storage is a DTensor."""

    @abstractmethod
    def write(self, whole: torch.Tensor) -> None:
        """Change the stored values to the values of `whole`."""

    @abstractmethod
    def full_tensor(self) -> torch.Tensor:
        """The whole value in the model's shape, as a tensor without a layout. Collective."""

    @abstractmethod
    def flat_shards(self) -> FlatShards:
        """This rank's chunks of the model's tensor."""

    @classmethod
    def run(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], itself: frozenset[str]) -> Any:
        """Run a function of torch on tensors of this kind. Those of `itself` look at the tensor alone."""
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__
            if name not in TURNED:
                return cls.run_property(func, name, *args)
        if name.startswith("is_") or name in itself:
            with private.without_torch_function():
                return func(*args, **kwargs)
        if isinstance(kwargs.get("out"), cls):
            out = kwargs.pop("out")
            return out.copy_(cls.run(func, args, kwargs, itself))
        if is_by_element(name, args, kwargs):
            rows = [cls.matched(row, first_changes=writes(name)) for row in rows_of(args)]
            matched = [row for row in rows if row is not None]
            if len(matched) == len(rows):
                return cls.run_stored(func, name, args, matched, kwargs)
        return run_whole(func, name, args, kwargs)

    @classmethod
    @abstractmethod
    def run_property(cls, func: Any, name: str, tensor: Any, *values: Any) -> Any:
        """Read, set or delete a property."""

    @classmethod
    @abstractmethod
    def matched(cls, row: Sequence[Any], *, first_changes: bool) -> list[Any] | None:
        """Operands that are stored alike, None if they cannot be. An operand that is written to stays what it is."""

    @classmethod
    @abstractmethod
    def run_stored(cls, func: Any, name: str, args: Any, rows: Sequence[list[Any]], kwargs: dict[str, Any]) -> Any:
        """Run an operator on single elements, or a reduction, on `rows` of matched operands."""

    # methods of a split tensor that torch.distributed.checkpoint calls

    def __create_write_items__(self, name: str, obj: Any) -> list[WriteItem]:
        return self.flat_shards().__create_write_items__(name, obj)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.flat_shards().__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.flat_shards().__get_tensor_shard__(index)


def refuse_compiled_parts() -> None:
    """Raise while `torch.compile` traces an operator: the parts of a parameter are no part of a compiled program."""
    if torch.compiler.is_compiling():
        raise RuntimeInputError(
            "torch.compile traces an optimizer whose parameters are split; run its step without torch.compile, "
            "such as torch.optim.AdamW(parallel.parameters(), fused=True)"
        )


class StageGradient:
    """A gradient of one of this rank's pipeline stages."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_norm(func, sys._getframe(1))
        if issubclass(cls, ShownTensor):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]
        if any(issubclass(kind, ShownTensor) for kind in types):
            return NotImplemented  # the other operand knows how
        with private.without_torch_function():
            return func(*args, **(kwargs or {}))


def refuse_norm(func: Any, frame: FrameType) -> None:
    """Raise if torch's clipping of gradients, whose frame called a function of torch, computes a norm."""
    if "norm" in func.__name__ and frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
        raise RuntimeInputError(
            "torch.nn.utils computes a norm over the gradients of this rank's pipeline stages, which differs among "
            "ranks; call parallel.clip_grad_norm_(max_norm), which returns the norm of all gradients"
        )


class GatheredView:
    """A value computed from gathered values. Writing to a view of a parameter (it has a `model_name`) raises."""

    __slots__ = ()
    model_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, dict(kwargs or {})
        if writes(name) and isinstance(target := target_of(args, kwargs), cls) and target.model_name:
            raise RuntimeInputError(
                f"{name} would change a copy of {target.model_name!r}, which this plan stores in parts of "
                "another shape; change the parameter itself, not a view of it"
            )
        if any(issubclass(kind, ShownTensor) for kind in types):
            return NotImplemented  # the other operand knows how
        with private.without_torch_function():
            return run_whole(func, name, tuple(args), kwargs)


class PlainGatheredView(GatheredView, torch.Tensor):
    __slots__ = ()


class SplitGatheredView(GatheredView, DTensor):
    __slots__ = ()


def run_whole(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on whole values in the model's shape."""
    target = target_of(args, kwargs)
    changed = [target] if writes(name) else changed_operands(func, args, kwargs)
    every = [t for t in tensors_in(changed) if isinstance(t, ShownTensor)]
    if every or (writes(name) and not isinstance(target, GatheredView)):
        wholes = {id(t): whole_of(t) for t in tensors_in((args, kwargs))}
        plain = private.pytree.tree_map(lambda t: wholes.get(id(t), t), (args, kwargs))
        result = func(*plain[0], **plain[1])
        for view in every:
            view.write(wholes[id(view)])
        return target if writes(name) else result
    gathered: dict[int, torch.Tensor] = {}
    operands = list(tensors_in((args, kwargs)))
    for shown in operands:
        if isinstance(shown, ShownTensor):
            gathered[id(shown)] = shown.gathered()
    mesh = next((t.device_mesh for t in (*gathered.values(), *operands) if isinstance(t, DTensor)), None)
    for plain in operands:
        if mesh is not None and plain.dim() and not isinstance(plain, (ShownTensor, DTensor)):
            gathered[id(plain)] = replicated(plain, mesh)
    args, kwargs = private.pytree.tree_map(lambda t: gathered.get(id(t), t), (args, kwargs))
    result = func(*args, **kwargs)
    result = private.pytree.tree_map(as_plain_number, result)
    named = target.model_name if isinstance(target, (ShownTensor, GatheredView)) else ""
    for t in tensors_in(result):
        is_view = named and private.shares_memory(t, gathered.get(id(target), target))
        if type(t) is DTensor or (type(t) is torch.Tensor and is_view):
            _as_view(t, named if is_view else "")
    return result


def _as_view(tensor: Any, name: str) -> None:
    tensor.__class__ = SplitGatheredView if isinstance(tensor, DTensor) else PlainGatheredView
    tensor.model_name = name


def replicated(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A whole value as operators take it beside the shards of a mesh."""
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def of_local(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """This rank's part of a value of a global shape, which the mesh need not divide."""
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def as_plain_number(result: Any) -> Any:
    """A single number as a tensor without a layout."""
    return result.full_tensor() if isinstance(result, DTensor) and not result.dim() else result


def whole_of(value: Any) -> torch.Tensor:
    """The whole value as a tensor without a layout."""
    whole: torch.Tensor = value.full_tensor() if isinstance(value, (ShownTensor, DTensor, FlatShards)) else value
    return whole


def first_of(row: Sequence[Any], kind: type[_Kind]) -> _Kind | None:
    """The first operand of a kind."""
    return next((x for x in row if isinstance(x, kind)), None)
