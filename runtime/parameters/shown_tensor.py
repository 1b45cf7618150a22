"""Tensors that show the model's shape, whatever a rank stores.

A `ShownTensor` has `parts`, and a `Joint` that says how they make up the tensor of the model:

    FactoredTensor    one part, the object itself: a DTensor, perhaps in factored shape (`placement`)
    JoinedTensor      several parts, of an unequal packing (`autopar.capture.passes.packings`): each is a parameter of
                      the generated code, because they are split differently

So a training script may decide by ``p.dim()``, and an optimizer may look at the whole matrix:

    operators on single elements    run on the stored parts, without communication
    reductions to one number        run on the stored parts, and the numbers of several parts are combined
    other operators                 run on the whole value in the model's shape, which is gathered first
    in-place operators              change the stored parts

Results that have an element for each element of the parameter are `ShownTensor`s too.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch import private
from autopar.errors import RuntimeInputError
from autopar.runtime.parameters.flat_shards import FlatShards, Joint
from autopar.runtime.parameters.operator_kinds import (
    TO_ONE_NUMBER,
    TURNED,
    WITHOUT_VALUES,
    changed_operands,
    has_gradient,
    is_by_element,
    makes_elements,
    places_of,
    rows_of,
    target_of,
    tensors_in,
    writes,
)

_Kind = TypeVar("_Kind")
_Cells = list[list[Any]]  # the operands of an operator for each part
_OF_SHAPE = frozenset(["size", "dim", "ndimension", "stride", "__len__"])
_OF_NUMBERS = {"max": "amax", "min": "amin", "_foreach_max": "amax"}  # the function of the numbers of parts

# torch remarks that shards of ZeRO inside shards of tp are gathered one after the other, which is on purpose
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(lambda record: "sequential" not in record.msg)


class ShownTensor(torch.Tensor):
    """A tensor that shows the model's shape. `model_name` is the parameter's; temporary values have none."""

    __slots__ = ()
    parts: tuple[torch.Tensor, ...]
    joint: Joint
    model_name: str
    has_two_meshes: bool = False

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """The whole value in the model's shape, as a tensor without a layout. Collective."""
        with private.without_torch_function():
            return self.joint.joined(self.parts, **options)

    def gathered(self) -> torch.Tensor:
        """A copy of the whole value in the model's shape: a replicated DTensor if the storage is a DTensor."""
        return _replicated(self.full_tensor(), self.parts[0])

    @torch.no_grad()
    def write(self, whole: torch.Tensor) -> None:
        """Change the stored values to the values of `whole`."""
        for part, piece in zip(self.parts, _cut(whole, self) or [whole], strict=True):
            private.local_part(part).copy_(private.local_part(piece))

    def flat_shards(self) -> FlatShards:
        """This rank's chunks of the model's tensor."""
        return FlatShards.of([stored(part) for part in self.parts], self.joint)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # the parts of a parameter are no part of a compiled program
            raise RuntimeInputError(
                "torch.compile traces an optimizer whose parameters are split; run its step without torch.compile, "
                "such as torch.optim.AdamW(parallel.parameters(), fused=True)"
            )
        parts = (part for x in tensors_in(args) if isinstance(x, ShownTensor) for part in x.parts)
        if "norm" in func.__name__ and any(isinstance(part, StageGradient) for part in parts):
            refuse_norm(func, sys._getframe(1))
        return _run(func, tuple(args), dict(kwargs or {}))

    # methods of a split tensor that torch.distributed.checkpoint calls

    def __create_write_items__(self, name: str, obj: Any) -> list[WriteItem]:
        return self.flat_shards().__create_write_items__(name, obj)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.flat_shards().__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.flat_shards().__get_tensor_shard__(index)


class FactoredTensor(ShownTensor, DTensor):
    """A DTensor, perhaps in factored shape. Its reductions give plain numbers."""

    __slots__ = ()

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return (self,)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self.joint.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.joint.shape)

    def dim(self) -> int:
        return len(self.joint.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        strides = torch.empty(self.shape, device="meta").stride()
        return strides if dim is None else strides[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> "FactoredTensor":
        twin: Any = private.with_local_part(self, private.local_part(self).detach().clone())
        shown([twin], self.joint, self.model_name).requires_grad_(self.requires_grad)
        twin.__class__ = type(self)
        twin._is_param = isinstance(self, nn.Parameter)
        twin.grad = deepcopy(self.grad, memo)
        memo[id(self)] = twin
        return twin  # type: ignore[no-any-return]


class JoinedTensor(ShownTensor):
    """A tensor without memory of its own: several parts hold its values."""

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor], joint: Joint, name: str = "") -> "JoinedTensor":
        joined: JoinedTensor = private.tensor_without_memory(cls, joint.shape, parts[0].dtype, parts[0].device)
        joined.parts, joined.joint, joined.model_name = tuple(parts), joint, name
        return joined

    def __deepcopy__(self, memo: dict[int, Any]) -> "JoinedTensor":
        joined = type(self).of([deepcopy(part, memo) for part in self.parts], self.joint, self.model_name)
        memo[id(self)] = joined
        return joined

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.model_name!r}, shape={tuple(self.joint.shape)}, parts={list(self.parts)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = next((x.model_name for x in tensors_in(args) if isinstance(x, JoinedTensor)), "")
        raise RuntimeInputError(
            f"{func} cannot run on {name or 'a value'!r}, which this plan stores in parts; pass parameter.full_tensor()"
        )


def shown(parts: Sequence[torch.Tensor], joint: Joint, name: str = "") -> torch.Tensor:
    """Parts as one tensor of the model's shape. A DTensor alone becomes it itself, another tensor alone stays."""
    if len(parts) > 1:
        return JoinedTensor.of(parts, joint, name)
    tensor = parts[0]
    if type(tensor) is DTensor:
        tensor.__class__ = FactoredTensor
        tensor.joint, tensor.model_name = joint, name  # type: ignore[attr-defined]
    return tensor


def stored(tensor: torch.Tensor) -> Any:
    """A tensor as it is stored: a plain DTensor with the same memory, in factored shape. Others are returned."""
    return private.plain_dtensor(tensor) if isinstance(tensor, FactoredTensor) else tensor


def parts_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The stored tensors of a tensor of the model: its parts, or itself."""
    return tensor.parts if isinstance(tensor, ShownTensor) else (tensor,)


def flat_state(tensor: torch.Tensor) -> Any:
    """A parameter of the model, or state shaped like it, in its flat shape."""
    if not isinstance(tensor, ShownTensor):
        return tensor
    plain = stored(tensor)
    return plain if plain.shape == tensor.shape and len(tensor.parts) == 1 else tensor.flat_shards()


def as_shards(tensor: Any) -> FlatShards:
    """A tensor of any kind as this rank's chunks of it."""
    if isinstance(tensor, ShownTensor):
        return tensor.flat_shards()
    return tensor if isinstance(tensor, FlatShards) else FlatShards.of([tensor], Joint(tuple(tensor.shape)))


# Running functions of torch.


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch on operands of which some are `ShownTensor`s."""
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        name = func.__self__.__name__
        if name not in TURNED:
            with private.without_torch_function():
                return _run_property(func, name, *args)
    if isinstance(kwargs.get("out"), ShownTensor):
        out = kwargs.pop("out")
        return out.copy_(_run(func, args, kwargs))
    by_element = is_by_element(name, args, kwargs)
    with private.without_torch_function():
        if name == "data_ptr":
            return func(args[0].parts[0])
        is_of_shape = name in _OF_SHAPE and isinstance(args[0], JoinedTensor)
        if name.startswith("is_") or name in WITHOUT_VALUES or is_of_shape:
            return func(*args, **kwargs)
        if name == "view_as_real" and isinstance(args[0], ShownTensor):  # for a complex parameter
            joint = replace(args[0].joint, shape=(*args[0].joint.shape, 2))
            return shown([func(stored(part)) for part in args[0].parts], joint)
        if by_element:
            rows = [_cells(row, first_changes=writes(name)) for row in rows_of(args)]
            matched = [cells for cells in rows if cells is not None]
            if len(matched) == len(rows):
                return _run_stored(func, name, args, matched, kwargs)
        return run_whole(func, name, args, kwargs)


def _run_property(func: Any, name: str, tensor: Any, *values: Any) -> Any:
    """Read, set or delete a property."""
    if not isinstance(tensor, ShownTensor) or name not in ("grad", "data", "requires_grad"):
        return func(tensor, *values)
    if func.__name__ == "__get__":
        held = [func(part) for part in tensor.parts]
        if name == "requires_grad":
            return any(held)
        if len(held) == 1 and name == "grad":
            return held[0]
        return None if any(value is None for value in held) else shown(held, tensor.joint, tensor.model_name)
    if name == "data":
        return tensor.write(*values)
    columns = [_cut(value, tensor) or [value] for value in values]
    for arguments in zip(tensor.parts, *columns, strict=True):
        func(*arguments)
    return None


def _cells(row: Sequence[Any], *, first_changes: bool) -> _Cells | None:
    """The operands for each part, stored alike. None if they cannot be. One that is written to stays what it is."""
    like = first_of(row, ShownTensor)
    if like is None:
        return [list(row)]
    if first_changes and not isinstance(row[0], ShownTensor):
        whole = ShownTensor.gathered if isinstance(row[0], DTensor) else whole_of
        return [[whole(x) if isinstance(x, ShownTensor) else x for x in row]]
    columns = [_cut(x, like) for x in row]
    matched = [column for column in columns if column is not None]
    return [list(cell) for cell in zip(*matched, strict=True)] if len(matched) == len(columns) else None


def _cut(operand: Any, like: ShownTensor) -> list[Any] | None:
    """An operand for each part, stored as the part is. A number serves every part. None for another shape."""
    if not isinstance(operand, torch.Tensor) or not operand.dim():
        return [operand] * len(like.parts)
    if isinstance(operand, ShownTensor) and operand.joint == like.joint:
        pieces: Sequence[torch.Tensor] = operand.parts
    elif len(like.parts) == 1 and _is_stored_alike(operand, like.parts[0]):  # a gradient as it was summed
        return [operand]
    elif tuple(operand.shape) == like.joint.shape:
        pieces = like.joint.cut(whole_of(operand))
    else:
        return None
    return list(map(_as_stored, pieces, like.parts))


def _is_stored_alike(value: torch.Tensor, part: torch.Tensor) -> bool:
    return not isinstance(part, DTensor) or (isinstance(value, DTensor) and private.same_spec(value, part))


def _as_stored(piece: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A value for a part as the part is stored. A tensor that is no DTensor is whole on every rank."""
    if _is_stored_alike(piece, part):
        return piece
    plain = stored(part)
    whole = whole_of(piece).reshape(plain.shape).to(plain.device)
    return replicated(whole, plain.device_mesh).redistribute(placements=plain.placements)


def _run_stored(func: Any, name: str, args: tuple[Any, ...], rows: Sequence[_Cells], kwargs: dict[str, Any]) -> Any:
    """Run an operator on single elements, or a reduction, on `rows` of operands for each part."""
    cells, places = [cell for row in rows for cell in row], places_of(args)
    # DTensor has no rule for some, such as the fused step of SGD
    is_local = (name == "__setitem__" or makes_elements(name)) and not has_gradient((*args, cells))
    take: Callable[[Any], Any] = _local if is_local else lambda operand: operand
    taken, options = [[take(x) for x in cell] for cell in cells], {key: take(value) for key, value in kwargs.items()}
    if places:
        operands = [take(arg) for arg in args]
        for k, column in zip(places, zip(*taken, strict=True), strict=True):
            operands[k] = list(column)
        for k, arg in enumerate(args):
            if k not in places and isinstance(arg, (list, tuple)) and len(arg) == len(rows):  # a number for each row
                operands[k] = [x for x, row in zip(arg, rows, strict=True) for _ in row]
        result = func(*operands, **options)
        if result is None:
            return None
    else:
        result = [func(*cell, **options) for cell in taken]
    outs = iter(map(_as_global, result, cells, taken) if is_local else result)
    together = [
        _together(name, args, kwargs, row, [next(outs) for _ in parts])
        for row, parts in zip(rows_of(args), rows, strict=True)
    ]
    return type(result)(together) if places else together[0]


def _local(operand: Any) -> Any:
    """This rank's part of an operand. A single number is the same on every rank."""
    if not isinstance(operand, DTensor):
        return operand
    return private.local_part(operand) if operand.dim() else operand.full_tensor()


def _as_global(out: Any, cell: Sequence[Any], taken: Sequence[Any]) -> Any:
    """What an operator returned for local parts, as the operand that it changed, or with the layout of the first."""
    like = first_of(cell, DTensor)
    if like is None or not isinstance(out, torch.Tensor):
        return out
    return cell[0] if out is taken[0] else private.with_local_part(like, out)


def _together(name: str, args: Any, kwargs: dict[str, Any], row: Sequence[Any], outs: Sequence[Any]) -> Any:
    """What an operator returns for one row of operands, of what it returned for the parts."""
    like = first_of(row, ShownTensor)
    if like is None:
        return outs[0]
    if writes(name):
        return row[0]
    if len(like.parts) == 1:
        out = as_plain_number(outs[0]) if name in TO_ONE_NUMBER or like.has_two_meshes else outs[0]
        return shown([out], like.joint) if isinstance(out, DTensor) and private.same_spec(out, like) else out
    if name in TO_ONE_NUMBER or name in ("_foreach_norm", "_foreach_max"):
        numbers = torch.stack([whole_of(x) for x in outs])
        number = _combined(name, args, kwargs, numbers, like)
        return number if name in TO_ONE_NUMBER else _replicated(number, like.parts[0])
    return shown(outs, like.joint)


def _combined(name: str, args: Any, kwargs: dict[str, Any], numbers: torch.Tensor, like: ShownTensor) -> torch.Tensor:
    """The number of a whole tensor, of the numbers of its parts."""
    if name in ("norm", "linalg_vector_norm", "_foreach_norm"):
        given = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
        order = 2.0 if given in (None, "fro") else float(given)
        return torch.linalg.vector_norm(numbers, order) if order else numbers.sum()
    if name == "mean":
        shares = [part.numel() / like.numel() for part in like.parts]
        return (numbers * torch.tensor(shares, dtype=numbers.dtype, device=numbers.device)).sum()
    function: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, _OF_NUMBERS.get(name, name))
    return function(numbers)


class StageGradient:
    """A gradient of one of this rank's pipeline stages."""

    __slots__ = ()


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


def _replicated(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A whole value on the mesh of a part."""
    return replicated(whole, part.device_mesh) if isinstance(part, DTensor) else whole


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
