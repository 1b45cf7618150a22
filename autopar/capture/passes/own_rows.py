"""An index that counts 0, 1, 2 ... along a dimension picks each row for itself: `mask[arange(batch), keys]`.

Such an index is dropped, and the rows stay a dimension of the result, which can be split. If the other indices differ
between the rows, as in `x[arange(batch), lengths]`, each row gathers its own elements. A write to such an index
scatters. Rows of samples that lie end to end, `x.flatten(0, 1)[arange(batch)[:, None] * length + places]`, are those of
`x[arange(batch)[:, None], places]`, and a place outside of the length is an error.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import Compute, closure, rewrite, value
from autopar.capture.passes.constants import constant_of

_MASKS = (torch.bool, torch.uint8)
_SAME_ELEMENTS = (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.flatten.using_ints)


def own_rows(graph: fx.Graph) -> None:
    """Replace every `index` and `index_put` of which an index counts the rows."""
    of_samples = (aten.index_select.default, aten.index.Tensor, aten.index_put.default)
    rewrite(graph, dict.fromkeys(of_samples, _with_rows))
    rewrite(graph, {aten.index.Tensor: partial(_by_rows, _picked), aten.index_put.default: partial(_by_rows, _written)})


def _by_rows(of_rows: Callable[..., fx.Node | None], emit: Compute, node: fx.Node) -> fx.Node | None:
    indices: Any = node.args[1]
    given = {place: index for place, index in enumerate(indices) if index is not None}
    if any(value(index).dtype in _MASKS for index in given.values()):
        return None
    rank = max(value(index).dim() for index in given.values())
    rows = dict[int, int]()  # the place of the index that counts along a dimension of the indices
    for place, index in given.items():
        along = _counts_along(index)
        if along is not None:
            rows.setdefault(along + rank - value(index).dim(), place)
    return of_rows(emit, node, given, rows, rank) if rows else None


def _with_rows(emit: Compute, node: fx.Node) -> fx.Node | None:
    """A node that takes rows of several samples, laid end to end, by an index of the sample and one inside of it."""
    is_selected = node.target is aten.index_select.default
    args: Any = node.args
    if is_selected and args[1] != 0:
        return None
    x, indices = args[0], [args[2]] if is_selected else list(args[1])
    core = index = indices[0]
    if index is None or any(i is not None for i in indices[1:]) or value(index).dtype in _MASKS:
        return None
    while core.target in _SAME_ELEMENTS:
        core = core.args[0]
    if core.target is not aten.add.Tensor or core.kwargs:
        return None
    for term, other in (core.args, core.args[::-1]):
        size = value(x).shape[0]
        dim = _counts_along(term, size) if isinstance(term, fx.Node) and isinstance(other, fx.Node) else None
        if dim is None:
            continue
        count, (picked, rest) = value(term).shape[dim], (value(core).shape, value(x).shape[1:])
        rows = emit(aten.div.Tensor_mode, term, size // count, rounding_mode="floor")
        inside = emit(aten.masked_fill.Scalar, other, emit(aten.lt.Scalar, other, 0), size // count)
        x = emit(aten.reshape.default, x, [count, size // count, *rest])
        if node.target is aten.index_put.default:
            new = emit(aten.expand.default, args[2], [*value(index).shape, *rest])
            new = emit(aten.reshape.default, new, [*picked, *rest])
            new = emit(aten.index_put.default, x, [rows, inside], new, *args[3:])
        else:
            new = emit(aten.index.Tensor, x, [rows, inside])
        return emit(aten.reshape.default, new, list(value(node).shape))
    return None


def _counts_along(index: fx.Node, total: int | None = None) -> int | None:
    """The dimension along which an index that depends on nothing counts from 0, by one or equally up to `total`."""
    known = constant_of(index)
    if known is None:
        return None
    for dim, size in enumerate(known.shape):
        step = 1 if total is None else total // max(size, 1)
        numbers = torch.arange(size).view([-1 if d == dim else 1 for d in range(known.dim())]) * step
        if size > 1 and total in (None, size * step) and torch.equal(known, numbers.expand_as(known)):
            return dim
    return None


def _picked(emit: Compute, node: fx.Node, given: dict[int, fx.Node], rows: dict[int, int], rank: int) -> fx.Node:
    """The value of an `index`. Its operand becomes [rows ..., dimensions of other indices ..., rest ...]."""
    x: Any = node.args[0]
    counted = sorted(rows)
    block = list(torch.broadcast_shapes(*(value(index).shape for index in given.values())))
    for dim, place in rows.items():
        if value(x).shape[place] != block[dim]:
            x = emit(aten.slice.Tensor, x, place, 0, block[dim])
    others = [place for place in given if place not in rows.values()]
    rest = [d for d in range(value(x).dim()) if d not in given]
    x = _permuted(emit, x, [*(rows[dim] for dim in counted), *others, *rest])
    # every other index as [rows ..., other dimensions of the indices ...]
    columns = [dim for dim in range(rank) if dim not in rows]
    indices = [_aligned(emit, given[place], rank, [*counted, *columns]) for place in others]
    sizes = list(torch.broadcast_shapes(*(value(index).shape for index in indices))) if indices else [1] * rank
    num_rows, tail = len(rows), [value(x).shape[d] for d in range(len(given), value(x).dim())]
    if any(size != 1 for size in sizes[:num_rows]):
        x = _gathered(emit, x, indices, num_rows, [block[dim] for dim in counted], sizes[num_rows:])
    elif indices:
        flat = [emit(aten.reshape.default, i, list(value(i).shape[num_rows:])) for i in indices]
        x = emit(aten.index.Tensor, x, [*[None] * num_rows, *flat])
    else:
        for _ in columns:
            x = emit(aten.unsqueeze.default, x, num_rows)
    # back to the order of the indices, which stand where the indexed dimensions were if these are adjacent
    places = sorted(given)
    at = sum(d < places[0] for d in rest) if places == list(range(places[0], places[-1] + 1)) else 0
    now = [*counted, *columns]
    picked = [now.index(dim) for dim in range(rank)]
    after = [*range(rank, rank + len(rest))]
    x = _permuted(emit, x, [*after[:at], *picked, *after[at:]])
    wanted = [*tail[:at], *block, *tail[at:]]
    return x if list(value(x).shape) == wanted else emit(aten.expand.default, x, wanted)


def _written(
    emit: Compute, node: fx.Node, given: dict[int, fx.Node], rows: dict[int, int], rank: int
) -> fx.Node | None:
    """The value of an `index_put`, as `_picked`. None if it does not write to all rows."""
    args: Any = node.args
    x, shape, new, adds = args[0], list(value(args[0]).shape), args[2], any(args[3:])
    block = list(torch.broadcast_shapes(*(value(index).shape for index in given.values())))
    others = [place for place in given if place not in rows.values()]
    if not others or any(shape[place] != block[dim] for dim, place in rows.items()):
        return None
    counted, rest, places = sorted(rows), [d for d in range(len(shape)) if d not in given], sorted(given)
    columns = [dim for dim in range(rank) if dim not in rows]
    order = [*(rows[dim] for dim in counted), *others, *rest]
    x = _permuted(emit, x, order)

    def back(y: fx.Node) -> fx.Node:
        y = emit(aten.reshape.default, y, [shape[d] for d in order])
        return _permuted(emit, y, [order.index(d) for d in range(len(order))])

    indices = [_aligned(emit, given[place], rank, [*counted, *columns]) for place in others]
    sizes, tail = [block[dim] for dim in columns], [shape[d] for d in rest]
    x, flat = _flat(emit, x, indices, len(rows), [block[dim] for dim in counted], sizes)
    learns = any(value(leaf).requires_grad for leaf in closure([new]) if leaf.op == "placeholder")
    if not (adds or learns or value(new).dim()):  # one number, whose gradient does not count writes
        written = emit(aten.scatter.value, emit(aten.lt.Tensor, x, x), len(rows), flat, True)
        return back(emit(aten.where.self, written, new, x))
    at = sum(d < places[0] for d in rest) if places == list(range(places[0], places[-1] + 1)) else 0
    new = emit(aten.expand.default, new, [*tail[:at], *block, *tail[at:]])
    where = [at + dim for dim in (*counted, *columns)]
    new = _permuted(emit, new, [*where, *(d for d in range(len(block) + len(tail)) if d not in where)])
    new = emit(aten.reshape.default, new, list(value(flat).shape))
    return back(emit(aten.scatter_add.default if adds else aten.scatter.src, x, len(rows), flat, new))


def _gathered(
    emit: Compute, x: fx.Node, indices: Sequence[fx.Node], num_rows: int, rows: list[int], columns: list[int]
) -> fx.Node:
    """The elements of each row at its own indices."""
    tail = list(value(x).shape[num_rows + len(indices) :])
    x, flat = _flat(emit, x, indices, num_rows, rows, columns)
    return emit(aten.reshape.default, emit(aten.gather.default, x, num_rows, flat), [*rows, *columns, *tail])


def _flat(
    emit: Compute, x: fx.Node, indices: Sequence[fx.Node], num_rows: int, rows: list[int], columns: list[int]
) -> tuple[fx.Node, fx.Node]:
    """A value with one dimension for those of the indices, and one index of as many dimensions."""
    inside = list(value(x).shape[num_rows : num_rows + len(indices)])
    tail = list(value(x).shape[num_rows + len(indices) :])
    flat: Any = None
    for index, size in zip(indices, inside, strict=True):
        number = emit(aten.to.dtype, index, torch.int64)
        # an index may count from the end, and `gather` knows no such index
        number = emit(aten.where.self, emit(aten.lt.Scalar, number, 0), emit(aten.add.Tensor, number, size), number)
        if len(inside) > 1:  # else a number outside of one dimension would be one inside of the product
            outside = emit(aten.ne.Tensor, emit(aten.clamp.default, number, 0, size - 1), number)
            number = emit(aten.masked_fill.Scalar, number, outside, -prod(inside))
        flat = number if flat is None else emit(aten.add.Tensor, emit(aten.mul.Tensor, flat, size), number)
    flat = emit(aten.expand.default, flat, [*rows, *columns])
    flat = emit(aten.reshape.default, flat, [*rows, prod(columns), *[1] * len(tail)])
    flat = emit(aten.expand.default, flat, [*rows, prod(columns), *tail])
    return emit(aten.reshape.default, x, [*rows, prod(inside), *tail]), flat


def _aligned(emit: Compute, index: fx.Node, rank: int, order: list[int]) -> fx.Node:
    """An index with all dimensions of the indices, in another order."""
    index = emit(aten.reshape.default, index, [*[1] * (rank - value(index).dim()), *value(index).shape])
    return _permuted(emit, index, order)


def _permuted(emit: Compute, x: fx.Node, order: list[int]) -> fx.Node:
    return x if order == sorted(order) else emit(aten.permute.default, x, order)
