"""Calls whose result has a size that data decides: ``x[mask]``, ``nonzero``, ``repeat_interleave``, ``x[:length]``.

Such a call is written with the size as a number. A mask becomes the positions of its true elements
(``nonzero_static``), as many as the mask has during capture. `known_sizes` asks its caller for every number, so that
the caller can refuse, or compare later batches with it.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar._torch import exports, private
from autopar._torch.private import pytree

_Number = Callable[[Tensor], int]  # the value of a traced integer
_MASKS = (torch.bool, torch.uint8)
_INTEGERS = (torch.int64, torch.int32, torch.int16)
_FIND = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)
_SELECT = (torch.masked_select, Tensor.masked_select)
_REPEAT = (torch.repeat_interleave, Tensor.repeat_interleave)
_PLACES_AS_NUMBERS: Mapping[str, set[int | str]] = {"narrow": {2}}  # places of tensors whose value an operator reads


def known_sizes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], number: _Number) -> Any:
    """The result of a call of which data decides a size, with numbers from `number` instead; or NotImplemented."""
    if func is Tensor.__getitem__ and (at := _place_of_row(args[1])) is not None:
        return _row(args[0], args[1] if isinstance(args[1], tuple) else (args[1],), at, number)
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        index = _index(args[1], number) if func is Tensor.__getitem__ or _is_packed(*args) else args[1]
        return func(args[0], index, *args[2:]) if index is not args[1] else NotImplemented
    if func in _SELECT:
        x, mask = args[0], kwargs["mask"] if "mask" in kwargs else args[1]
        sizes = torch.broadcast_shapes(x.shape, mask.shape)
        is_known = _is_mask(mask) and len(sizes) > 0
        return x.expand(sizes)[_positions(mask.expand(sizes), number)] if is_known else NotImplemented
    finds = func in _FIND or (func is torch.where and len(args) == 1 and not kwargs)
    if finds and exports.traced_node(args[0]) is not None and args[0].dim():
        positions = _positions(args[0], number)
        return positions if func is torch.where or kwargs.get("as_tuple") else torch.stack(positions, 1)
    if func in _REPEAT:
        return _repeated(func, args, kwargs, number)
    if func is F.one_hot and len(args) + len(kwargs) == 1 and exports.traced_node(args[0]) is not None:
        return func(args[0], number(args[0].max() + 1))
    tensors, given = _places_of_tensors(getattr(func, "__name__", "")), dict[int | str, Any](enumerate(args))
    given.update(kwargs)
    others = [] if tensors is None else [k for k in given if k not in tensors]
    read = [k for k in others if any(map(_is_integer, pytree.tree_leaves(given[k])))]
    for place in read:
        given[place] = pytree.tree_map(lambda leaf: number(leaf) if _is_integer(leaf) else leaf, given[place])
    return func(*(given[k] for k in range(len(args))), **{k: given[k] for k in kwargs}) if read else NotImplemented


@cache
def _places_of_tensors(name: str) -> set[int | str] | None:
    """The positions and names of arguments that an operator may take as tensors. None if there is no such operator."""
    overloads = private.overloads_of(getattr(torch.ops.aten, name, None))
    arguments = [pair for overload in overloads.values() for pair in enumerate(overload._schema.arguments)]
    tensors = [(k, a) for k, a in arguments if "Tensor" in str(a.type)]
    places = {place for k, a in tensors for place in ((a.name,) if a.kwarg_only else (k, a.name))}
    return places - _PLACES_AS_NUMBERS.get(name, set()) if overloads else None


def _place_of_row(index: Any) -> int | None:
    """The place of an integer tensor in an index that has no other tensor. It selects a row."""
    items = index if isinstance(index, tuple) else (index,)
    places = [k for k, item in enumerate(items) if _is_integer(item)]
    is_alone = sum(isinstance(item, (Tensor, list)) for item in items) == 1
    return places[0] if places and is_alone else None


def _row(x: Tensor, items: tuple[Any, ...], at: int, number: _Number) -> Tensor:
    """The row that a tensor selects, by an index of one row: no number is read."""
    used = sum(item is not None and item is not Ellipsis for item in items)
    before = (x.dim() - used if item is Ellipsis else item is None or isinstance(item, slice) for item in items[:at])
    index = _index((*items[:at], items[at].reshape(1), *items[at + 1 :]), number)
    row: Tensor = x[index].squeeze(sum(before))
    return row


def _index(index: Any, number: _Number) -> Any:
    """The index with positions for masks, and with numbers for the ends of slices. The same object without any."""
    items = index if isinstance(index, tuple) else (index,)
    index_out: list[Any] = []
    for item in items:
        if _is_mask(item):
            index_out += _positions(item, number)
        elif isinstance(item, slice) and any(_is_integer(end) for end in (item.start, item.stop, item.step)):
            ends = (item.start, item.stop, item.step)
            index_out.append(slice(*(number(end) if _is_integer(end) else end for end in ends)))
        elif _is_integer(item):
            index_out.append(number(item))
        else:
            index_out.append(item)
    is_same = len(index_out) == len(items) and all(a is b for a, b in zip(index_out, items, strict=True))
    return index if is_same else tuple(index_out)


def _is_packed(x: Tensor, index: Any, value: Any) -> bool:
    """Whether a value that is written through an index has one element for every true element of a mask."""
    if not _is_mask(index):
        return isinstance(index, (tuple, slice)) and not any(_is_mask(item) for item in pytree.tree_leaves(index))
    return isinstance(value, Tensor) and value.dim() == x.dim() - index.dim() + 1 and value.shape[0] != 1


def _positions(mask: Tensor, number: _Number) -> tuple[Tensor, ...]:
    """The positions of the elements that are not zero, one tensor for each dimension."""
    size = number((mask != 0).sum())
    return torch.nonzero_static(mask, size=size).unbind(1)


def _repeated(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], number: _Number) -> Any:
    names = ("input", "repeats", "dim") if len(args) + ("repeats" in kwargs) > 1 else ("repeats",)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    repeats = given.get("repeats")
    if not isinstance(repeats, Tensor) or exports.traced_node(repeats) is None or "output_size" in kwargs:
        return NotImplemented
    every = repeats
    if "input" in given:
        dim = given.get("dim")
        every = repeats.expand(given["input"].numel() if dim is None else given["input"].shape[dim])
    return func(*args, **kwargs, output_size=number(every.sum()))


def _is_mask(value: Any) -> bool:
    is_mask = isinstance(value, Tensor) and value.dtype in _MASKS and value.dim() > 0
    return is_mask and exports.traced_node(value) is not None


def _is_integer(value: Any) -> bool:
    is_integer = isinstance(value, Tensor) and value.dtype in _INTEGERS and not value.dim()
    return is_integer and exports.traced_node(value) is not None
