"""Parameters in factored shape that show the model's shape.

A split parameter may be stored in factored shape (`autopar.runtime.parameters.placement`). It is a `FactoredTensor`,
which shows the model's shape. So a training script may decide by ``p.dim()``, and an optimizer may look at the whole
matrix:

    operators on single elements    run on the stored parts, without communication
    reductions to one number        run on the stored parts
    other operators                 run on the whole value in the model's shape, which is gathered first
    in-place operators              change the stored parts

Results that have an element for each element of the parameter are `FactoredTensor`s too.
"""

import logging
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch import private
from autopar.runtime.parameters.flat_shards import FlatRows, FlatShards
from autopar.runtime.parameters.operator_kinds import (
    TO_ONE_NUMBER,
    TURNED,
    WITHOUT_VALUES,
    has_gradient,
    is_by_element,
    makes_elements,
    rows_of,
    with_rows,
    writes,
)
from autopar.runtime.parameters.whole_values import ShownTensor, as_plain_number, refuse_compiling, run_whole, whole_of

# torch remarks that shards of ZeRO inside shards of tp are gathered one after the other, which is on purpose
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(lambda record: "sequential" not in record.msg)


class FactoredTensor(ShownTensor, DTensor):
    """A DTensor, perhaps in factored shape, that shows `model_shape`. Its reductions give plain numbers."""

    __slots__ = ()
    model_shape: torch.Size
    has_two_meshes: bool = False

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.model_shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.model_shape)

    def dim(self) -> int:
        return len(self.model_shape)

    def size(self, dim: int | None = None) -> Any:
        return self.model_shape if dim is None else self.model_shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        strides = torch.empty(self.model_shape, device="meta").stride()
        return strides if dim is None else strides[dim]

    def __len__(self) -> int:
        return self.model_shape[0]

    def full_tensor(self, **options: Any) -> torch.Tensor:
        with private.without_torch_function():
            return DTensor.full_tensor(self, **options).reshape(self.model_shape)

    def gathered(self) -> DTensor:
        every = [Replicate()] * self.device_mesh.ndim
        return DTensor.from_local(self.full_tensor(), self.device_mesh, every, run_check=False)

    @torch.no_grad()
    def write(self, whole: torch.Tensor) -> None:
        parts = _as_stored(whole, self)
        assert isinstance(parts, DTensor)
        stored(self).to_local().copy_(parts.to_local())

    def __deepcopy__(self, memo: dict[int, Any]) -> "FactoredTensor":
        twin: Any = private.with_local_part(self, self.to_local().detach().clone())
        shown(twin, self.model_shape, self.model_name).requires_grad_(self.requires_grad)
        twin.__class__ = type(self)
        twin._is_param = isinstance(self, nn.Parameter)
        twin.grad = deepcopy(self.grad, memo)
        memo[id(self)] = twin
        return twin  # type: ignore[no-any-return]

    def flat_shards(self) -> FlatShards:
        shape = tuple(self.model_shape)
        return FlatShards.of([FlatRows(tensor=stored(self), shape=shape)], shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_compiling()
        if any(issubclass(kind, ShownTensor) and not issubclass(kind, FactoredTensor) for kind in types):
            return NotImplemented  # the other operand knows how
        with private.without_torch_function():
            return _run(func, tuple(args), dict(kwargs or {}))


def stored(tensor: torch.Tensor) -> Any:
    """The tensor as it is stored: a plain DTensor with the same memory, in factored shape. Others are returned."""
    return private.plain_dtensor(tensor) if isinstance(tensor, FactoredTensor) else tensor


def shown(tensor: DTensor, shape: Sequence[int], name: str = "") -> DTensor:
    """Show a DTensor of factored shape in the model's `shape`. It changes the object itself."""
    tensor.__class__ = FactoredTensor
    assert isinstance(tensor, FactoredTensor)
    tensor.model_shape, tensor.model_name = torch.Size(shape), name
    return tensor


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch. Its arguments may contain `FactoredTensor`s."""
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        name = func.__self__.__name__
        if name not in TURNED:
            return _property(func, args)
    if name.startswith("is_") or name in WITHOUT_VALUES:
        return func(*args, **kwargs)
    if name == "view_as_real" and isinstance(args[0], FactoredTensor):  # optimizers step a complex parameter so
        return shown(func(stored(args[0])), (*args[0].model_shape, 2))
    if isinstance(kwargs.get("out"), FactoredTensor):
        out = kwargs.pop("out")
        return out.copy_(_run(func, args, kwargs))
    if is_by_element(name, args, kwargs):
        rows = [_alike(row, first_changes=writes(name)) for row in rows_of(args)]
        matched = [row for row in rows if row is not None]
        if len(matched) == len(rows):
            if _is_local(name, args):
                return _run_local(func, args, matched, kwargs)
            result = func(*with_rows(args, matched), **kwargs)
            likes = [_factored(row) for row in matched]
            if name in TO_ONE_NUMBER or any(like is not None and like.has_two_meshes for like in likes):
                result = private.pytree.tree_map(as_plain_number, result)
            return _marked(result, likes)
    return run_whole(func, name, args, kwargs)


def _is_local(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operator runs on this rank's parts, without autograd. DTensor lacks rules for some of them."""
    if not (name == "__setitem__" or makes_elements(name)):
        return False
    return not has_gradient(args)


def _run_local(func: Any, args: tuple[Any, ...], rows: Sequence[list[Any]], kwargs: dict[str, Any]) -> Any:
    """Run an operator on this rank's parts of operands that are stored alike."""
    local = [[_local(x) for x in row] for row in rows]
    others = tuple(_local(arg) for arg in args)
    result = func(*with_rows(others, local), **{name: _local(value) for name, value in kwargs.items()})
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    for k, (row, parts) in enumerate(zip(rows, local, strict=True)):
        like = _factored(row)
        if k < len(results) and like is not None and isinstance(results[k], torch.Tensor):
            inplace = results[k] is parts[0]  # an in-place operator returns its operand
            results[k] = row[0] if inplace else shown(private.with_local_part(like, results[k]), like.model_shape)
    return type(result)(results) if isinstance(result, (list, tuple)) else results[0]


def _local(operand: Any) -> Any:
    """This rank's part of an operand. A single number is the same on every rank."""
    if not isinstance(operand, DTensor):
        return operand
    return operand.to_local() if operand.dim() else operand.full_tensor()


def _property(func: Any, args: tuple[Any, ...]) -> Any:
    """A property is read or set."""
    tensor = args[0]
    name = func.__self__.__name__
    if func.__name__ == "__set__" and isinstance(tensor, FactoredTensor) and isinstance(args[1], torch.Tensor):
        return tensor.write(args[1]) if name == "data" else func(tensor, _as_stored(args[1], tensor))
    result = func(*args)
    if name == "data" and isinstance(tensor, FactoredTensor) and type(result) is DTensor:
        shown(result, tensor.model_shape, tensor.model_name)
    return result


def _alike(row: Sequence[Any], *, first_changes: bool) -> list[Any] | None:
    """Operands that are stored alike. None if their shapes differ. An operand that is written to stays what it is."""
    like = _factored(row)
    if like is None:
        return list(row)
    if first_changes and not isinstance(row[0], FactoredTensor):
        whole = FactoredTensor.gathered if isinstance(row[0], DTensor) else whole_of
        return [whole(x) if isinstance(x, FactoredTensor) else x for x in row]
    cells = []
    for x in row:
        if isinstance(x, torch.Tensor) and x.dim():
            x = _as_stored(x, like)
            if not (isinstance(x, DTensor) and private.same_layout(x, like)):
                return None
        cells.append(x)
    return cells


def _factored(row: Sequence[Any]) -> FactoredTensor | None:
    return next((x for x in row if isinstance(x, FactoredTensor)), None)


def _marked(result: Any, likes: Sequence[FactoredTensor | None]) -> Any:
    """The results of an operator. A result that is stored as an operand is shows the operand's shape."""
    results = result if isinstance(result, (list, tuple)) else [result]
    for x, like in zip(results, likes, strict=False):
        if like is not None and type(x) is DTensor and private.same_layout(x, like):
            shown(x, like.model_shape)
    return result


def _as_stored(value: torch.Tensor, like: FactoredTensor) -> torch.Tensor:
    """A whole value of the model's shape as it would be stored. A tensor that is no DTensor is whole on every rank."""
    is_stored_alike = isinstance(value, DTensor) and private.same_layout(value, like)  # a gradient as it was summed
    if isinstance(value, FactoredTensor) or is_stored_alike or value.shape != like.model_shape:
        return value
    plain = stored(like)
    every = [Replicate()] * plain.device_mesh.ndim
    whole = whole_of(value).reshape(plain.shape).to(plain.device)
    return DTensor.from_local(whole, plain.device_mesh, every, run_check=False).redistribute(
        placements=plain.placements
    )
