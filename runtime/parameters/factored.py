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
from torch.distributed.tensor import DTensor

from autopar._torch import private
from autopar.runtime.parameters.flat_shards import FlatShards, as_shards
from autopar.runtime.parameters.operator_kinds import (
    TO_ONE_NUMBER,
    WITHOUT_VALUES,
    has_gradient,
    makes_elements,
    with_rows,
)
from autopar.runtime.parameters.whole_values import (
    ShownTensor,
    as_plain_number,
    first_of,
    refuse_compiled_parts,
    replicated,
    whole_of,
)

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
        return replicated(self.full_tensor(), self.device_mesh)

    @torch.no_grad()
    def write(self, whole: torch.Tensor) -> None:
        parts = _as_stored(whole, self)
        private.local_part(self).copy_(private.local_part(parts))

    def __deepcopy__(self, memo: dict[int, Any]) -> "FactoredTensor":
        twin: Any = private.with_local_part(self, private.local_part(self).detach().clone())
        shown(twin, self.model_shape, self.model_name).requires_grad_(self.requires_grad)
        twin.__class__ = type(self)
        twin._is_param = isinstance(self, nn.Parameter)
        twin.grad = deepcopy(self.grad, memo)
        memo[id(self)] = twin
        return twin  # type: ignore[no-any-return]

    def flat_shards(self) -> FlatShards:
        return as_shards(stored(self), self.model_shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_compiled_parts()
        if any(issubclass(kind, ShownTensor) and not issubclass(kind, FactoredTensor) for kind in types):
            return NotImplemented  # the other operand knows how
        with private.without_torch_function():
            if func.__name__ == "view_as_real" and isinstance(args[0], FactoredTensor):  # for a complex parameter
                return shown(func(stored(args[0])), (*args[0].model_shape, 2))
            return FactoredTensor.run(func, tuple(args), dict(kwargs or {}), WITHOUT_VALUES)

    @classmethod
    def run_property(cls, func: Any, name: str, tensor: Any, *values: Any) -> Any:
        if func.__name__ == "__set__" and isinstance(tensor, FactoredTensor) and isinstance(values[0], torch.Tensor):
            return tensor.write(values[0]) if name == "data" else func(tensor, _as_stored(values[0], tensor))
        result = func(tensor, *values)
        if name == "data" and isinstance(tensor, FactoredTensor) and type(result) is DTensor:
            shown(result, tensor.model_shape, tensor.model_name)
        return result

    @classmethod
    def matched(cls, row: Sequence[Any], *, first_changes: bool) -> list[Any] | None:
        like = first_of(row, FactoredTensor)
        if like is None:
            return list(row)
        if first_changes and not isinstance(row[0], FactoredTensor):
            whole = FactoredTensor.gathered if isinstance(row[0], DTensor) else whole_of
            return [whole(x) if isinstance(x, FactoredTensor) else x for x in row]
        cells = []
        for x in row:
            if isinstance(x, torch.Tensor) and x.dim():
                x = _as_stored(x, like)
                if not (isinstance(x, DTensor) and private.same_spec(x, like)):
                    return None
            cells.append(x)
        return cells

    @classmethod
    def run_stored(cls, func: Any, name: str, args: Any, rows: Sequence[list[Any]], kwargs: dict[str, Any]) -> Any:
        if (name == "__setitem__" or makes_elements(name)) and not has_gradient(args):
            return _run_local(func, args, rows, kwargs)  # DTensor has no rule for some, such as the fused step of SGD
        result = func(*with_rows(args, rows), **kwargs)
        likes = [first_of(row, FactoredTensor) for row in rows]
        if name in TO_ONE_NUMBER or any(like is not None and like.has_two_meshes for like in likes):
            result = private.pytree.tree_map(as_plain_number, result)
        for x, like in zip(result if isinstance(result, (list, tuple)) else [result], likes, strict=False):
            if like is not None and type(x) is DTensor and private.same_spec(x, like):
                shown(x, like.model_shape)
        return result


def stored(tensor: torch.Tensor) -> Any:
    """The tensor as it is stored: a plain DTensor with the same memory, in factored shape. Others are returned."""
    return private.plain_dtensor(tensor) if isinstance(tensor, FactoredTensor) else tensor


def shown(tensor: DTensor, shape: Sequence[int], name: str = "") -> DTensor:
    """Show a DTensor of factored shape in the model's `shape`. It changes the object itself."""
    tensor.__class__ = FactoredTensor
    assert isinstance(tensor, FactoredTensor)
    tensor.model_shape, tensor.model_name = torch.Size(shape), name
    return tensor


def _run_local(func: Any, args: tuple[Any, ...], rows: Sequence[list[Any]], kwargs: dict[str, Any]) -> Any:
    """Run an operator on this rank's parts of operands that are stored alike."""
    local = [[_local(x) for x in row] for row in rows]
    others = tuple(_local(arg) for arg in args)
    result = func(*with_rows(others, local), **{name: _local(value) for name, value in kwargs.items()})
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    for k, (row, parts) in enumerate(zip(rows, local, strict=True)):
        like = first_of(row, FactoredTensor)
        if k < len(results) and like is not None and isinstance(results[k], torch.Tensor):
            inplace = results[k] is parts[0]  # an in-place operator returns its operand
            results[k] = row[0] if inplace else shown(private.with_local_part(like, results[k]), like.model_shape)
    return type(result)(results) if isinstance(result, (list, tuple)) else results[0]


def _local(operand: Any) -> Any:
    """This rank's part of an operand. A single number is the same on every rank."""
    if not isinstance(operand, DTensor):
        return operand
    return private.local_part(operand) if operand.dim() else operand.full_tensor()


def _as_stored(value: torch.Tensor, like: FactoredTensor) -> torch.Tensor:
    """A whole value of the model's shape as it would be stored. A tensor that is no DTensor is whole on every rank."""
    is_stored_alike = isinstance(value, DTensor) and private.same_spec(value, like)  # a gradient as it was summed
    if isinstance(value, FactoredTensor) or is_stored_alike or value.shape != like.model_shape:
        return value
    plain = stored(like)
    whole = whole_of(value).reshape(plain.shape).to(plain.device)
    return replicated(whole, plain.device_mesh).redistribute(placements=plain.placements)
