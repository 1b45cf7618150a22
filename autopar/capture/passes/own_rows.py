"""An index that counts 0, 1, 2 ... along a dimension picks each row for itself: `mask[arange(batch), keys]`.

Such an index is dropped, and the rows stay a dimension of the result, which can be split. If the other indices differ
between the rows, as in `x[arange(batch), lengths]`, each row gathers its own elements.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import closure, compute, is_random, value
from autopar.capture.passes.constants import evaluate

_MASKS = (torch.bool, torch.uint8)
_MOST_EVALUATED = 2**22  # elements of an index
_Make = Callable[..., fx.Node]


def own_rows(graph: fx.Graph) -> None:
    """Replace every `index` of which an index counts the rows."""
    for node in list(graph.nodes):
        if node.target is not aten.index.Tensor:
            continue
        given = {place: index for place, index in enumerate(node.args[1]) if index is not None}
        if any(value(index).dtype in _MASKS for index in given.values()):
            continue
        rank = max(value(index).dim() for index in given.values())
        rows = dict[int, int]()  # the place of the index that counts along a dimension of the indices
        for place, index in given.items():
            along = _counts_along(index)
            if along is not None:
                rows.setdefault(along + rank - value(index).dim(), place)
        if rows:
            with graph.inserting_before(node):
                new = _picked(node, given, rows, rank)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _counts_along(index: fx.Node) -> int | None:
    """The dimension along which an index that depends on nothing counts from 0. It is constant along all others."""
    nodes = closure([index])
    if any(n.op != "call_function" or is_random(n) or value(n).numel() > _MOST_EVALUATED for n in nodes):
        return None
    known = evaluate(index, lambda leaf: value(leaf))
    for dim, size in enumerate(known.shape):
        numbers = torch.arange(size).view([-1 if d == dim else 1 for d in range(known.dim())])
        if size > 1 and torch.equal(known, numbers.expand_as(known)):
            return dim
    return None


def _picked(node: fx.Node, given: dict[int, fx.Node], rows: dict[int, int], rank: int) -> fx.Node:
    """The value of an `index`. Its operand becomes [rows ..., dimensions of other indices ..., rest ...]."""

    def made(target: Any, *args: Any) -> fx.Node:
        return compute(node.graph, node, target, *args)

    x: Any = node.args[0]
    counted = sorted(rows)
    block = list(torch.broadcast_shapes(*(value(index).shape for index in given.values())))
    for dim, place in rows.items():
        if value(x).shape[place] != block[dim]:
            x = made(aten.slice.Tensor, x, place, 0, block[dim])
    others = [place for place in given if place not in rows.values()]
    rest = [d for d in range(value(x).dim()) if d not in given]
    x = _permuted(made, x, [*(rows[dim] for dim in counted), *others, *rest])
    # every other index as [rows ..., other dimensions of the indices ...]
    columns = [dim for dim in range(rank) if dim not in rows]
    indices = [_aligned(made, given[place], rank, [*counted, *columns]) for place in others]
    sizes = list(torch.broadcast_shapes(*(value(index).shape for index in indices))) if indices else [1] * rank
    num_rows, tail = len(rows), [value(x).shape[d] for d in range(len(given), value(x).dim())]
    if any(size != 1 for size in sizes[:num_rows]):
        x = _gathered(made, x, indices, num_rows, [block[dim] for dim in counted], sizes[num_rows:])
    elif indices:
        flat = [made(aten.reshape.default, i, list(value(i).shape[num_rows:])) for i in indices]
        x = made(aten.index.Tensor, x, [*[None] * num_rows, *flat])
    else:
        for _ in columns:
            x = made(aten.unsqueeze.default, x, num_rows)
    # back to the order of the indices, which stand where the indexed dimensions were if these are adjacent
    places = sorted(given)
    at = sum(d < places[0] for d in rest) if places == list(range(places[0], places[-1] + 1)) else 0
    now = [*counted, *columns]
    picked = [now.index(dim) for dim in range(rank)]
    after = [*range(rank, rank + len(rest))]
    x = _permuted(made, x, [*after[:at], *picked, *after[at:]])
    wanted = [*tail[:at], *block, *tail[at:]]
    return x if list(value(x).shape) == wanted else made(aten.expand.default, x, wanted)


def _gathered(
    made: _Make, x: fx.Node, indices: Sequence[fx.Node], num_rows: int, rows: list[int], columns: list[int]
) -> fx.Node:
    """The elements of each row at its own indices."""
    inside = list(value(x).shape[num_rows : num_rows + len(indices)])
    tail = list(value(x).shape[num_rows + len(indices) :])
    flat: Any = None
    for index, size in zip(indices, inside, strict=True):
        number = made(aten.to.dtype, index, torch.int64)
        # an index may count from the end, and `gather` knows no such index
        number = made(aten.where.self, made(aten.lt.Scalar, number, 0), made(aten.add.Tensor, number, size), number)
        if len(inside) > 1:  # else a number outside of one dimension would be one inside of the product
            outside = made(aten.ne.Tensor, made(aten.clamp.default, number, 0, size - 1), number)
            number = made(aten.masked_fill.Scalar, number, outside, -prod(inside))
        flat = number if flat is None else made(aten.add.Tensor, made(aten.mul.Tensor, flat, size), number)
    flat = made(aten.expand.default, flat, [*rows, *columns])
    flat = made(aten.reshape.default, flat, [*rows, prod(columns), *[1] * len(tail)])
    flat = made(aten.expand.default, flat, [*rows, prod(columns), *tail])
    x = made(aten.reshape.default, x, [*rows, prod(inside), *tail])
    return made(aten.reshape.default, made(aten.gather.default, x, num_rows, flat), [*rows, *columns, *tail])


def _aligned(made: _Make, index: fx.Node, rank: int, order: list[int]) -> fx.Node:
    """An index with all dimensions of the indices, in another order."""
    index = made(aten.reshape.default, index, [*[1] * (rank - value(index).dim()), *value(index).shape])
    return _permuted(made, index, order)


def _permuted(made: _Make, x: fx.Node, order: list[int]) -> fx.Node:
    return x if order == sorted(order) else made(aten.permute.default, x, order)
