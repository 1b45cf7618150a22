"""What the functions of torch do with a parameter, by their names: tables for `shown_tensor`."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from autopar._torch import private

_LIKE_ITS_OPERAND = """
    zeros_like ones_like empty_like full_like clone detach detach_ contiguous to type type_as float double half bfloat16
    cpu cuda copy_ zero_ fill_ requires_grad_ view_as
"""
# operators with a result of the operand's shape, which torch does not call pointwise
_LIKE = frozenset(_LIKE_ITS_OPERAND.split())
# operators on single elements which torch does not call pointwise
_BY_ELEMENT = frozenset(["where", "copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"])
TO_ONE_NUMBER = frozenset(["norm", "linalg_vector_norm", "sum", "mean", "amax", "amin", "max", "min", "all", "any"])
_INFIX = frozenset(["truediv", "rtruediv", "rdiv", "radd", "rsub", "rmul", "rpow", "iadd", "isub", "imul", "itruediv"])
_IN_PLACE = frozenset(["__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"])
TURNED = frozenset(["T", "mT", "H", "mH"])  # properties that are operators
WITHOUT_VALUES = frozenset(["numel", "nelement", "element_size", "get_device", "data_ptr", "storage_offset"])


@cache
def makes_elements(name: str) -> bool:
    base = name.strip("_")
    known = name in _BY_ELEMENT or base in _INFIX or name.startswith("_fused_")
    return known or _is_pointwise(base.removeprefix("foreach_"))


@cache
def _is_pointwise(name: str) -> bool:
    """Whether torch calls every overload pointwise that takes a tensor first and writes to no other tensor."""
    every = private.overloads_of(getattr(torch.ops.aten, name, None)).values()
    taking = [f for f in every if f._schema.arguments and str(f._schema.arguments[0].type) == "Tensor"]
    fs = [f for f in taking if not any(argument.is_out for argument in f._schema.arguments)]
    return bool(fs) and all(torch.Tag.pointwise in f.tags for f in fs)


def is_by_element(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator treats every element alike, or reduces all of them to one number."""
    if any(t.dim() for t in tensors_in(kwargs)):
        return False
    if name == "where":
        return len(args) == 3  # of one argument it is `nonzero`
    if name == "__setitem__":  # a mask of the operand's shape, and a number
        is_mask = isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool and args[1].shape == args[0].shape
        return is_mask and not isinstance(args[2], torch.Tensor)
    if name.startswith("_foreach_") or name in _LIKE or makes_elements(name):
        return True
    if name in TO_ONE_NUMBER:
        if name not in ("sum", "mean") and has_gradient(args):
            return False  # gradients of partial norms and maxima are wrong in DTensor
        most = 2 if name in ("norm", "linalg_vector_norm") else 1  # with the order of a norm
        return len(args) <= most and not {"dim", "keepdim", "axis"} & kwargs.keys()
    return False


def has_gradient(args: Any) -> bool:
    """Whether autograd records an operator of these operands."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args))


def places_of(args: tuple[Any, ...]) -> list[int]:
    """The positions of lists of tensors."""
    return [k for k, arg in enumerate(args) if isinstance(arg, (list, tuple)) and any(map(torch.is_tensor, arg))]


def rows_of(args: tuple[Any, ...]) -> list[list[Any]]:
    """The operands that belong together: all of them, or the operands at one position of several lists."""
    places = places_of(args)
    return [list(row) for row in zip(*(args[k] for k in places), strict=True)] if places else [list(args)]


def writes(name: str) -> bool:
    """Whether a function of torch changes its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def changed_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The operands that an operator of `torch.ops` changes, as its schema says. Other functions have none."""
    operands = []
    for overload in private.overloads_of(func).values():
        for place, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                operands.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return operands


def target_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that an in-place function changes: the first."""
    return args[0] if args else next(iter(kwargs.values()), None)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    return (t for t in private.pytree.tree_leaves(tree) if isinstance(t, torch.Tensor))
