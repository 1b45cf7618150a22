"""Parameters that are stored as several parts, shown as the one parameter of the model.

The parts of an unequal packing (`autopar.capture.passes.packings`) are split differently, so each is a parameter of the
generated code. A `JoinedTensor` shows them in the model's shape:

    operators on single elements    run on each part
    reductions to one number        run on each part, and the numbers are combined
    other operators                 run on the whole value, whose parts are gathered first
    in-place operators              change the parts

Results that have an element for each element of the parameter are `JoinedTensor`s too.
"""

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar._torch import private
from autopar.errors import RuntimeInputError
from autopar.runtime.parameters.factored import stored
from autopar.runtime.parameters.flat_shards import FlatRows, FlatShards
from autopar.runtime.parameters.operator_kinds import (
    TO_ONE_NUMBER,
    WITHOUT_VALUES,
    places_of,
    rows_of,
    tensors_in,
    writes,
)
from autopar.runtime.parameters.whole_values import (
    ShownTensor,
    StageGradient,
    first_of,
    refuse_compiled_parts,
    refuse_norm,
    replicated,
    whole_of,
)

_OF_SHAPE = frozenset(["size", "dim", "ndimension", "stride", "__len__"])
_OF_NUMBERS = {"max": "amax", "min": "amin", "_foreach_max": "amax"}  # the function of the numbers of parts


@dataclass(frozen=True, slots=True)
class Joint:
    """Where the parts of a tensor of `shape` begin and end in dimension `dim`: ``(0, 6, 9, 12)`` for three parts."""

    shape: torch.Size
    dim: int
    bounds: tuple[int, ...]

    def cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The part of a whole value for each part. Views."""
        return [whole.narrow(self.dim, start, stop - start) for start, stop in pairwise(self.bounds)]


class JoinedTensor(ShownTensor):
    """A tensor without memory of its own: `parts` hold the values of a tensor of the model's shape."""

    parts: tuple[torch.Tensor, ...]
    joint: Joint

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor], joint: Joint, name: str = "") -> "JoinedTensor":
        joined: JoinedTensor = private.tensor_without_memory(cls, joint.shape, parts[0].dtype, parts[0].device)
        joined.parts, joined.joint, joined.model_name = tuple(parts), joint, name
        return joined

    def full_tensor(self) -> torch.Tensor:
        return torch.cat([whole_of(part) for part in self.parts], self.joint.dim)

    def gathered(self) -> torch.Tensor:
        return _replicated(self.full_tensor(), self.parts[0])

    @torch.no_grad()
    def write(self, whole: torch.Tensor) -> None:
        for part, piece in zip(self.parts, self.joint.cut(whole), strict=True):
            if isinstance(part, ShownTensor):
                part.write(piece)
            else:
                part.copy_(piece)

    def __deepcopy__(self, memo: dict[int, Any]) -> "JoinedTensor":
        joined = type(self).of([deepcopy(part, memo) for part in self.parts], self.joint, self.model_name)
        memo[id(self)] = joined
        return joined

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.model_name!r}, shape={tuple(self.joint.shape)}, parts={list(self.parts)})"

    def flat_shards(self) -> FlatShards:
        sizes = [tuple(cut.shape) for cut in self.joint.cut(torch.empty(self.joint.shape, device="meta"))]
        rows = [
            FlatRows(tensor=stored(part), shape=size, dim=self.joint.dim, start=start)
            for part, size, start in zip(self.parts, sizes, self.joint.bounds, strict=False)
        ]
        return FlatShards.of(rows, tuple(self.joint.shape))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_compiled_parts()
        joined = [x for x in tensors_in(args) if isinstance(x, JoinedTensor)]
        if any(isinstance(x.parts[0], StageGradient) for x in joined):
            refuse_norm(func, sys._getframe(1))
        if func.__name__ == "data_ptr":
            return joined[0].parts[0].data_ptr()
        return JoinedTensor.run(func, tuple(args), dict(kwargs or {}), WITHOUT_VALUES | _OF_SHAPE)

    @classmethod
    def run_property(cls, func: Any, name: str, tensor: Any, *values: Any) -> Any:
        if not isinstance(tensor, JoinedTensor) or name not in ("grad", "data", "requires_grad"):
            with private.without_torch_function():
                return func(tensor, *values)
        if func.__name__ == "__get__":
            parts = [getattr(part, name) for part in tensor.parts]
            if name == "requires_grad":
                return any(parts)
            return None if any(v is None for v in parts) else JoinedTensor.of(parts, tensor.joint, tensor.model_name)
        for part, value in zip(tensor.parts, _cut(values[0] if values else None, tensor.joint) or (), strict=True):
            setattr(part, name, value)
        return None

    @classmethod
    def matched(cls, row: Sequence[Any], *, first_changes: bool) -> list[Any] | None:
        """The operands of each part."""
        like = first_of(row, JoinedTensor)
        if like is None:
            return [list(row)]
        if first_changes and isinstance(row[0], DTensor):
            return [[x.gathered() if isinstance(x, JoinedTensor) else x for x in row]]
        columns = [_cut(x, like.joint) for x in row]
        known = [column for column in columns if column is not None]
        return [list(part) for part in zip(*known, strict=True)] if len(known) == len(columns) else None

    @classmethod
    def run_stored(cls, func: Any, name: str, args: Any, rows: Sequence[list[Any]], kwargs: dict[str, Any]) -> Any:
        places, counts = places_of(args), [len(parts) for parts in rows]
        if not places:
            return _together(name, args, kwargs, args, [func(*part, **kwargs) for part in rows[0]])
        operands = list(args)
        for column, k in enumerate(places):
            operands[k] = [part[column] for parts in rows for part in parts]
        for k, arg in enumerate(args):
            if k not in places and isinstance(arg, (list, tuple)) and len(arg) == len(rows):  # a number for each row
                operands[k] = [x for x, count in zip(arg, counts, strict=True) for _ in range(count)]
        result = func(*operands, **kwargs)
        if result is None:
            return None
        results = iter(result)
        together = zip(rows_of(args), counts, strict=True)
        return type(result)(
            _together(name, args, kwargs, row, [next(results) for _ in range(count)]) for row, count in together
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = next((x.model_name for x in tensors_in(args) if isinstance(x, JoinedTensor)), "")
        raise RuntimeInputError(
            f"{func} cannot run on {name or 'a value'!r}, which this plan stores in parts; pass parameter.full_tensor()"
        )


def _together(name: str, args: Any, kwargs: dict[str, Any], row: Sequence[Any], outs: Sequence[Any]) -> Any:
    """What an operator returns for one row of operands, of what it returned for the parts."""
    like = first_of(row, JoinedTensor)
    if like is None:
        return outs[0]
    if writes(name):
        return row[0]
    if name in TO_ONE_NUMBER or name in ("_foreach_norm", "_foreach_max"):
        numbers = torch.stack([whole_of(x) for x in outs])
        number = _combined(name, args, kwargs, numbers, like)
        return number if name in TO_ONE_NUMBER else _replicated(number, like.parts[0])
    return JoinedTensor.of(outs, like.joint)


def _combined(name: str, args: Any, kwargs: dict[str, Any], numbers: torch.Tensor, like: JoinedTensor) -> torch.Tensor:
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


def _cut(operand: Any, joint: Joint) -> list[Any] | None:
    """An operand for each part. A number serves every part. None for a tensor of another shape."""
    if isinstance(operand, JoinedTensor):
        return list(operand.parts) if operand.joint == joint else None
    if not isinstance(operand, torch.Tensor) or not operand.dim():
        return [operand] * (len(joint.bounds) - 1)
    if operand.shape != joint.shape:
        return None
    return joint.cut(whole_of(operand))


def _replicated(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A whole value on the mesh of a part."""
    return replicated(whole, part.device_mesh) if isinstance(part, DTensor) else whole
