"""Parameters as their users see them: in the model's own shape, with hooks that get the gradient of a whole step.

A split parameter may be stored in factored shape (`autopar.runtime.parameters.placement`). It is a `FactoredTensor`,
which shows the model's shape. So a training script may decide by ``p.dim()``, and an optimizer may look at the whole
matrix:

    operators on single elements    run on the stored parts, without communication
    reductions to one number        run on the stored parts
    other operators                 run on the whole value in the model's shape, which is gathered first
    in-place operators              change the stored parts

Results that have an element for each element of the parameter are `FactoredTensor`s too.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from autopar._torch import private
from autopar.errors import RuntimeInputError
from autopar.ir.storage import Storage
from autopar.runtime.parameters.flat_shards import FlatRows, FlatShards

Hook = Callable[[Any], Any]
_LIKE_ITS_OPERAND = """
    zeros_like ones_like empty_like full_like clone detach detach_ contiguous to type type_as float double half bfloat16
    cpu cuda copy_ zero_ fill_ requires_grad_ view_as
"""
# operators with a result of the operand's shape, which torch does not call pointwise
_LIKE = frozenset(_LIKE_ITS_OPERAND.split())
# operators on single elements which torch does not call pointwise
_BY_ELEMENT = frozenset(["where", "copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"])
_TO_ONE_NUMBER = frozenset(["norm", "linalg_vector_norm", "sum", "mean", "amax", "amin", "max", "min", "all", "any"])
_INFIX = frozenset(["truediv", "rtruediv", "rdiv", "radd", "rsub", "rmul", "rpow", "iadd", "isub", "imul", "itruediv"])
_IN_PLACE = frozenset(["__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"])
_TURNED = frozenset(["T", "mT", "H", "mH"])  # properties that are operators
_WITHOUT_VALUES = frozenset(["numel", "nelement", "element_size", "get_device", "data_ptr", "storage_offset"])


class FactoredTensor(DTensor):
    """A DTensor, perhaps in factored shape, that shows the model's shape.

    `model_shape` is the shape that it shows. `model_name` is the name of the parameter, for its gradient too; "" for a
    temporary value.
    """

    __slots__ = ()
    model_shape: torch.Size
    model_name: str

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
        """The whole value in the model's shape. Collective."""
        whole: torch.Tensor = _parts(self).full_tensor(**options)
        return whole.reshape(self.model_shape)

    # methods of a split tensor that torch.distributed.checkpoint calls

    def _chunks(self) -> FlatShards:
        shape = tuple(self.model_shape)
        return FlatShards.of([FlatRows(tensor=_parts(self), shape=shape)], shape)

    def __create_write_items__(self, name: str, obj: Any) -> list[WriteItem]:
        return self._chunks().__create_write_items__(name, obj)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks().__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._chunks().__get_tensor_shard__(index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with private.without_torch_function():
            return run(func, tuple(args), dict(kwargs or {}))


class GatheredView(DTensor):
    """A view of the gathered value of a parameter or gradient. Writing to it would change nothing, so it raises."""

    __slots__ = ()
    model_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _writes(func.__name__) and isinstance(target := _target(args, kwargs or {}), cls):
            raise RuntimeInputError(
                f"{func.__name__} would change a copy of {target.model_name!r}, which this plan stores in parts of "
                "another shape; change the parameter itself, not a view of it"
            )
        with private.without_torch_function():
            return run(func, tuple(args), dict(kwargs or {}))


class UserParameter:
    """What a user may do with a parameter of any storage: register hooks. Mixed into the class of the parameter."""

    __slots__ = ()

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(gradient)`` with the gradient of every `forward_backward`; its result replaces the gradient."""
        return _registered(self, "gradient_hooks", hook)

    def register_post_accumulate_grad_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(parameter)`` after every `forward_backward`, when the gradient is summed over all ranks."""
        return _registered(self, "after_gradient_hooks", hook)


class PlainParameter(UserParameter, nn.Parameter):
    __slots__ = ()


class FactoredParameter(UserParameter, FactoredTensor):
    __slots__ = ()


class StageGradient:
    """A gradient in a pipeline. torch's norm of all gradients would be that of this rank's stages, so it raises."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm" in func.__name__ and is_of_clipping(sys._getframe(1)):
            raise norm_of_stages()
        with private.without_torch_function():
            return run(func, tuple(args), dict(kwargs or {}))


def is_of_clipping(frame: FrameType) -> bool:
    """Whether a function was called by torch's clipping of gradients."""
    return frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad"


def norm_of_stages() -> RuntimeInputError:
    """What torch's norm of gradients in a pipeline raises."""
    return RuntimeInputError(
        "torch.nn.utils computes a norm over the gradients of this rank's pipeline stages, which differs among "
        "ranks; call parallel.clip_grad_norm_(max_norm), which returns the norm of all gradients"
    )


class PlainStageGradient(StageGradient, torch.Tensor):
    __slots__ = ()


class FactoredStageGradient(StageGradient, FactoredTensor):
    __slots__ = ()


def show_parameter(parameter: nn.Parameter, name: str, how: Storage) -> None:
    """Make a parameter what its user sees. It changes the object itself: FSDP2 and optimizers hold the object."""
    kind: Any = PlainParameter
    if isinstance(parameter, DTensor):
        shown(parameter, how.dims.shape, name)
        kind = FactoredParameter
    parameter.__class__ = kind


def show_gradient(parameter: nn.Parameter, *, in_stages: bool) -> None:
    """Show a parameter's gradient in the parameter's shape. With `in_stages` other ranks have other gradients."""
    grad = parameter.grad
    if grad is None:
        return
    if isinstance(parameter, FactoredTensor):
        assert isinstance(grad, DTensor)
        shown(grad, parameter.model_shape, parameter.model_name)
        grad.__class__ = FactoredStageGradient if in_stages else FactoredTensor
    elif in_stages:
        grad.__class__ = PlainStageGradient


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a hook waits for the parameter's gradient."""
    return bool(getattr(parameter, "gradient_hooks", None) or getattr(parameter, "after_gradient_hooks", None))


def run_hooks(parameter: nn.Parameter, kind: str) -> None:
    """Call the hooks of one kind: ``gradient_hooks`` or ``after_gradient_hooks``."""
    for hook in list(getattr(parameter, kind, {}).values()):
        if kind == "after_gradient_hooks":
            hook(parameter)
            continue
        changed = hook(parameter.grad)
        if changed is not None:
            parameter.grad = changed
            show_gradient(parameter, in_stages=isinstance(parameter.grad, StageGradient))


def _registered(parameter: Any, kind: str, hook: Hook) -> RemovableHandle:
    if not parameter.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if not hasattr(parameter, kind):
        setattr(parameter, kind, OrderedDict())
    handle = RemovableHandle(getattr(parameter, kind))
    getattr(parameter, kind)[handle.id] = hook
    return handle


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is stored: a plain DTensor with the same memory, in factored shape. Others are returned."""
    return _parts(tensor) if isinstance(tensor, FactoredTensor) else tensor


def _parts(tensor: FactoredTensor) -> DTensor:
    plain: DTensor = private.plain_dtensor(tensor)
    return plain


def shown(tensor: DTensor, shape: Sequence[int], name: str = "") -> DTensor:
    """Show a DTensor of factored shape in the model's `shape`. It changes the object itself."""
    tensor.__class__ = FactoredTensor
    assert isinstance(tensor, FactoredTensor)
    tensor.model_shape, tensor.model_name = torch.Size(shape), name
    return tensor


# ---- operators on tensors of factored shape ----


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch. Its arguments may contain `FactoredTensor`s."""
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        name = func.__self__.__name__
        if name not in _TURNED:
            return _property(func, args)
    if name.startswith("is_") or name in _WITHOUT_VALUES:
        return func(*args, **kwargs)
    if isinstance(kwargs.get("out"), FactoredTensor):
        out = kwargs.pop("out")
        return out.copy_(run(func, args, kwargs))
    if _is_by_element(name, args, kwargs):
        rows = [_alike(row, writes=_writes(name)) for row in _rows(args)]
        alike = [row for row in rows if row is not None]
        if len(alike) == len(rows):
            if _is_local(name, args):
                return _run_local(func, args, alike, kwargs)
            result = func(*_with_rows(args, alike), **kwargs)
            return _marked(result, [_factored(row) for row in alike])
    return _run_whole(func, name, args, kwargs)


def _is_local(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operator may run on this rank's parts: it makes an element of one element, without autograd.

    DTensor has no rule for some of these operators, such as the fused step of SGD.
    """
    if not (name == "__setitem__" or _makes_elements(name)):
        return False
    return not torch.is_grad_enabled() or not any(one.requires_grad for one in _tensors(args))


@cache
def _makes_elements(name: str) -> bool:
    base = name.strip("_")
    known = name in _BY_ELEMENT or base in _INFIX or name.startswith("_fused_")
    return known or _is_pointwise(base.removeprefix("foreach_"))


def _run_local(func: Any, args: tuple[Any, ...], rows: Sequence[list[Any]], kwargs: dict[str, Any]) -> Any:
    """Run an operator on this rank's parts of operands that are stored alike."""
    local = [[_local(one) for one in row] for row in rows]
    others = tuple(_local(arg) for arg in args)
    result = func(*_with_rows(others, local), **{name: _local(value) for name, value in kwargs.items()})
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    for k, (row, parts) in enumerate(zip(rows, local, strict=True)):
        like = _factored(row)
        if k < len(results) and like is not None and isinstance(results[k], torch.Tensor):
            own = results[k] is parts[0]  # an in-place operator returns its operand
            results[k] = row[0] if own else shown(private.with_local_part(like, results[k]), like.model_shape)
    return type(result)(results) if isinstance(result, (list, tuple)) else results[0]


def _local(operand: Any) -> Any:
    """This rank's part of an operand. A single number is the same on every rank."""
    if not isinstance(operand, DTensor):
        return operand
    return operand.to_local() if operand.dim() else operand.full_tensor()


def _run_whole(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on whole values in the model's shape."""
    target = _target(args, kwargs)
    if _writes(name) and target is not None:
        every = [one for one in _tensors(target) if isinstance(one, FactoredTensor)]
        wholes = {id(one): _whole(one) for one in _tensors((args, kwargs))}
        plain = private.pytree.tree_map(lambda one: wholes.get(id(one), one), (args, kwargs))
        func(*plain[0], **plain[1])
        for changed in every:
            _write(changed, wholes[id(changed)])
        return target
    gathered: dict[int, torch.Tensor] = {}
    operands = list(_tensors((args, kwargs)))
    for factored in operands:
        if isinstance(factored, FactoredTensor):
            gathered[id(factored)] = _gathered(factored)
    mesh = next((whole.device_mesh for whole in gathered.values() if isinstance(whole, DTensor)), None)
    for plain in operands:
        if mesh is not None and plain.dim() and not isinstance(plain, DTensor):
            gathered[id(plain)] = DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)
    args, kwargs = private.pytree.tree_map(lambda one: gathered.get(id(one), one), (args, kwargs))
    result = func(*args, **kwargs)
    if isinstance(target, (FactoredTensor, GatheredView)) and target.model_name:
        copied = gathered.get(id(target), target)
        for made in _tensors(result):
            if isinstance(made, DTensor) and private.shares_memory(made, copied):
                _as_view(made, target.model_name)
    return result


def _as_view(tensor: Any, name: str) -> None:
    tensor.__class__ = GatheredView
    tensor.model_name = name


def _property(func: Any, args: tuple[Any, ...]) -> Any:
    """A property is read or set."""
    tensor = args[0]
    if func.__name__ == "__set__" and isinstance(tensor, FactoredTensor) and isinstance(args[1], torch.Tensor):
        return func(tensor, _as_stored(args[1], tensor))
    result = func(*args)
    if func.__self__.__name__ == "data" and isinstance(tensor, FactoredTensor) and type(result) is DTensor:
        shown(result, tensor.model_shape, tensor.model_name)
    return result


@cache
def _is_pointwise(name: str) -> bool:
    """Whether torch calls every overload pointwise that takes a tensor first and writes to no other tensor."""
    every = private.overloads_of(getattr(torch.ops.aten, name, None)).values()
    taking = [one for one in every if one._schema.arguments and str(one._schema.arguments[0].type) == "Tensor"]
    own = [one for one in taking if not any(argument.is_out for argument in one._schema.arguments)]
    return bool(own) and all(torch.Tag.pointwise in one.tags for one in own)


def _is_by_element(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator treats every element alike, or reduces all of them to one number."""
    if any(one.dim() for one in _tensors(kwargs)):
        return False
    if name == "where":
        return len(args) == 3  # of one argument it is `nonzero`
    if name == "__setitem__":  # a mask of the operand's shape, and a number
        is_mask = isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool and args[1].shape == args[0].shape
        return is_mask and not isinstance(args[2], torch.Tensor)
    if name.startswith("_foreach_") or name in _LIKE or _makes_elements(name):
        return True
    if name in _TO_ONE_NUMBER:
        most = 2 if name in ("norm", "linalg_vector_norm") else 1  # with the order of a norm
        return len(args) <= most and not {"dim", "keepdim", "axis"} & kwargs.keys()
    return False


def _places(args: tuple[Any, ...]) -> list[int]:
    """The positions of lists of tensors."""
    return [k for k, arg in enumerate(args) if isinstance(arg, (list, tuple)) and any(map(torch.is_tensor, arg))]


def _rows(args: tuple[Any, ...]) -> list[list[Any]]:
    """The operands that belong together: all of them, or the operands at one position of several lists."""
    places = _places(args)
    return [list(row) for row in zip(*(args[k] for k in places), strict=True)] if places else [list(args)]


def _with_rows(args: tuple[Any, ...], rows: Sequence[Any]) -> tuple[Any, ...]:
    places = _places(args)
    if not places:
        return tuple(rows[0])
    columns = dict(zip(places, zip(*rows, strict=True), strict=True))
    return tuple(list(columns[k]) if k in columns else arg for k, arg in enumerate(args))


def _alike(row: Sequence[Any], *, writes: bool) -> list[Any] | None:
    """Operands that are stored alike. None if their shapes differ. An operand that is written to stays what it is."""
    like = _factored(row)
    if like is None:
        return list(row)
    if writes and not isinstance(row[0], FactoredTensor):
        whole = _gathered if isinstance(row[0], DTensor) else _whole
        return [whole(one) if isinstance(one, FactoredTensor) else one for one in row]
    found = []
    for one in row:
        if isinstance(one, torch.Tensor) and one.dim():
            one = _as_stored(one, like)
            if not (isinstance(one, DTensor) and private.same_layout(one, like)):
                return None
        found.append(one)
    return found


def _factored(row: Sequence[Any]) -> FactoredTensor | None:
    return next((one for one in row if isinstance(one, FactoredTensor)), None)


def _marked(result: Any, likes: Sequence[FactoredTensor | None]) -> Any:
    """The results of an operator. A result that is stored as an operand is shows the operand's shape."""
    results = result if isinstance(result, (list, tuple)) else [result]
    for one, like in zip(results, likes, strict=False):
        if like is not None and type(one) is DTensor and private.same_layout(one, like):
            shown(one, like.model_shape)
    return result


def _gathered(tensor: FactoredTensor) -> DTensor:
    """The whole value on every rank, in the model's shape."""
    plain = _parts(tensor)
    every = [Replicate()] * plain.device_mesh.ndim
    whole = plain.redistribute(placements=every).to_local().reshape(tensor.model_shape)
    return DTensor.from_local(whole, plain.device_mesh, every, run_check=False)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole value as a tensor without a layout."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _as_stored(value: torch.Tensor, like: FactoredTensor) -> torch.Tensor:
    """A whole value of the model's shape as it would be stored. A tensor that is no DTensor is whole on every rank."""
    is_stored_alike = isinstance(value, DTensor) and private.same_layout(value, like)  # a gradient as it was summed
    if isinstance(value, FactoredTensor) or is_stored_alike or value.shape != like.model_shape:
        return value
    plain = _parts(like)
    every = [Replicate()] * plain.device_mesh.ndim
    whole = _whole(value).reshape(plain.shape).to(plain.device)
    return DTensor.from_local(whole, plain.device_mesh, every, run_check=False).redistribute(
        placements=plain.placements
    )


@torch.no_grad()
def _write(tensor: FactoredTensor, whole: torch.Tensor) -> None:
    """Change the stored part of a value to its part of `whole`."""
    parts = _as_stored(whole, tensor)
    assert isinstance(parts, DTensor)
    _parts(tensor).to_local().copy_(parts.to_local())


def _writes(name: str) -> bool:
    """Whether a function of torch changes its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that an in-place function changes: the first."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (one for one in private.pytree.tree_leaves(tree) if isinstance(one, torch.Tensor))
