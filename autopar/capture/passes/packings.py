"""Unequal packings: a linear whose output is cut into pieces of different sizes becomes one linear per piece.

With grouped queries, one projection packs ``q | k | v`` of different sizes. Its output dimension is a *sum* of axes.
The axis analysis knows products of axes, but no sums. So the weight and bias are cut into pieces. Each piece is a
parameter of its own, and its name states its rows (``qkv_proj.weight[0:3072]``). The runtime joins the pieces for every
use of the model's own names. Equal, aligned pieces are a product ``(c e)`` and stay one parameter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.flat_graph import Flat
from autopar.capture.nodes import arg, compute, is_random, put, value
from autopar.capture.nodes import shape as shape_of
from autopar.ir.program import PartOf

_Interval = tuple[int, int]  # rows of the weight from start to stop; the stop is excluded


def split_packings(flat: Flat, tied: frozenset[str]) -> None:
    """Cut every unequally packed linear of a normalised graph in place. `tied` names parameters that stay whole."""
    wholes: list[fx.Node] = []
    for node in list(flat.graph.nodes):
        if _is_parameter(flat, node) and flat.placeholders[node.name][1] not in tied:
            packing = _packing_of(flat, node, tied)
            if packing is not None:
                _cut(flat, packing)
                wholes += (packing.weight, *packing.biases)
    flat.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    for whole in wholes:
        flat.graph.erase_node(whole)
        del flat.placeholders[whole.name]
    flat.graph.lint()


def _is_parameter(flat: Flat, node: fx.Node) -> bool:
    return node.op == "placeholder" and flat.placeholders.get(node.name, ("", ""))[0] == "parameter"


# ---- the slices of a linear's output ----


@dataclass(frozen=True, slots=True, kw_only=True)
class _At:
    """The packed dimension of a value, and the number of weight rows per element of this dimension."""

    dim: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Take:
    """A slice or select of the packed dimension, and the operators between the linear and this node."""

    node: fx.Node
    path: tuple[tuple[fx.Node, _At], ...]
    at: _At
    rows: _Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packing:
    """A weight with its packed dimension, its biases, the linears that use them, and the pieces to cut."""

    weight: fx.Node
    dim: int
    biases: tuple[fx.Node, ...]
    takes: dict[fx.Node, list[_Take]]
    pieces: tuple[_Interval, ...]


def _packing_of(flat: Flat, weight: fx.Node, tied: frozenset[str]) -> _Packing | None:
    """The pieces to cut a weight into. None unless all its uses are linears with the same unequal pieces."""
    linears: list[fx.Node] = []
    turned = [u for u in weight.users if u.target is aten.t.default]
    if turned and len(turned) != len(weight.users):
        return None
    for node in turned or [weight]:
        linears += node.users
        if any(u.target is not aten.linear.default or u.args[1] is not node for u in node.users):
            return None
    if not linears or any(weight in linear.all_input_nodes[:1] for linear in linears):
        return None
    dim = 1 if turned else 0
    size = shape_of(weight)[dim]
    takes: dict[fx.Node, list[_Take]] = {}
    partitions = set()
    for linear in linears:
        taken = _takes(linear, _At(dim=len(shape_of(linear)) - 1, rows=1), ())
        pieces = None if taken is None else _partition(taken, size)
        if taken is None or pieces is None:
            return None
        takes[linear] = taken
        partitions.add(pieces)
    biases = _biases(flat, linears, tied)
    if len(partitions) != 1 or biases is None:
        return None
    return _Packing(weight=weight, dim=dim, biases=biases, takes=takes, pieces=partitions.pop())


def _biases(flat: Flat, linears: Sequence[fx.Node], tied: frozenset[str]) -> tuple[fx.Node, ...] | None:
    """The distinct biases of linears. None if a bias is no parameter, is tied, or has another use."""
    biases = dict.fromkeys(arg(n, 2) for n in linears if len(n.args) > 2 and n.args[2] is not None)
    for bias in biases:
        used_here = all(user in linears and user.args.index(bias) == 2 for user in bias.users)
        if not _is_parameter(flat, bias) or flat.placeholders[bias.name][1] in tied or not used_here:
            return None
    return tuple(biases)


def _takes(node: fx.Node, at: _At, path: tuple[tuple[fx.Node, _At], ...]) -> list[_Take] | None:
    """All slices of a packed value. None if the value also has another use."""
    taken: list[_Take] = []
    for user in node.users:
        bounds = _bounds(user, at)
        if bounds is not None:
            taken.append(_Take(node=user, path=path, at=at, rows=(bounds[0] * at.rows, bounds[1] * at.rows)))
            continue
        after = _after(user, at)
        deeper = None if after is None else _takes(user, after, (*path, (user, after)))
        if not deeper:
            return None
        taken += deeper
    return taken


def _bounds(node: fx.Node, at: _At) -> _Interval | None:
    """The interval that a node cuts out of the packed dimension. None if the node is no slice of it."""
    if node.target not in (aten.slice.Tensor, aten.narrow.default, aten.select.int) or node.kwargs:
        return None
    shape = shape_of(arg(node, 0))
    dim, *rest = node.args[1:] or (0,)
    if not isinstance(dim, int) or dim % len(shape) != at.dim or not all(isinstance(n, int | None) for n in rest):
        return None
    if node.target is aten.slice.Tensor:
        rows = range(*slice(*rest).indices(shape[at.dim])) if rest else range(shape[at.dim])
    else:
        start = int(str(rest[0])) % shape[at.dim]
        rows = range(start, start + (int(str(rest[1])) if node.target is aten.narrow.default else 1))
    return (rows.start, rows.stop) if rows and rows.step == 1 else None


def _after(node: fx.Node, at: _At) -> _At | None:
    """The packed dimension after an operator that treats its pieces separately. None for any other operator."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or "info" not in node.meta:
        return None
    before, after = shape_of(node.all_input_nodes[0]), shape_of(node)
    if node.target is aten.reshape.default:
        return _after_reshape(before, after, at)
    rest = [n for n in node.args[1:] if isinstance(n, int)]
    if node.target is aten.transpose.int:
        a, b = (d % len(before) for d in rest)
        return replace(at, dim={a: b, b: a}.get(at.dim, at.dim))
    if node.target is aten.unsqueeze.default:
        return replace(at, dim=at.dim + (rest[0] % len(after) <= at.dim))
    elementwise = node.target is aten.to.dtype or torch.Tag.pointwise in getattr(node.target, "tags", ())
    return at if elementwise and not is_random(node) and before == after else None


def _after_reshape(before: Sequence[int], after: Sequence[int], at: _At) -> _At | None:
    """The outermost factor of the packed dimension, if the reshape only splits this dimension. Otherwise None."""
    size = before[at.dim]
    for dim in reversed(range(len(after))):
        splits = any(prod(after[dim:end]) == size for end in range(dim + 1, len(after) + 1))
        if after[dim] > 1 and prod(after[:dim]) == prod(before[: at.dim]) and splits:
            return _At(dim=dim, rows=at.rows * (size // after[dim]))
    return None


def _partition(takes: Sequence[_Take], size: int) -> tuple[_Interval, ...] | None:
    """The pieces of a dimension. None if slices overlap, or are aligned and of one size: these are a product."""
    wanted = sorted({take.rows for take in takes})
    lengths = {stop - start for start, stop in wanted}
    if any(stop > start for (_, stop), (start, _) in pairwise(wanted)):
        return None
    if len(lengths) == 1 and all(n % min(lengths) == 0 for n in (size, *(start for start, _ in wanted))):
        return None
    cuts = [0, *(start for start, _ in wanted[1:]), size]
    pieces = tuple(pairwise(cuts))
    divisible = all(n % take.at.rows == 0 for take in takes for n in _piece_with(pieces, take))
    return pieces if len(pieces) > 1 and divisible else None


def _piece_with(pieces: Sequence[_Interval], take: _Take) -> _Interval:
    return next(p for p in pieces if p[0] <= take.rows[0] and take.rows[1] <= p[1])


# ---- the rewrite of the graph ----


def _cut(flat: Flat, packing: _Packing) -> None:
    """Replace each linear by one linear per piece, and copy the operators between the linear and its slices."""
    weights = dict(zip(packing.pieces, _pieces(flat, packing.weight, packing.dim, packing.pieces), strict=True))
    biases = {
        bias: dict(zip(packing.pieces, _pieces(flat, bias, 0, packing.pieces), strict=True)) for bias in packing.biases
    }
    for linear, takes in packing.takes.items():
        done: dict[tuple[fx.Node, _Interval], fx.Node] = {}
        for piece in packing.pieces:
            weight = weights[piece]
            if packing.dim == 1:
                weight = compute(linear, aten.t.default, weight, like=arg(linear, 1))
            bias = tuple(biases[arg(linear, 2)][piece] for _ in linear.args[2:] if linear.args[2] is not None)
            result = value(linear).narrow(-1, piece[0], piece[1] - piece[0])
            done[linear, piece] = put(linear, aten.linear.default, (linear.args[0], weight, *bias), result)
        for take in takes:
            _replace(linear, take, _piece_with(packing.pieces, take), done)


def _replace(linear: fx.Node, take: _Take, piece: _Interval, done: dict[tuple[fx.Node, _Interval], fx.Node]) -> None:
    """Make a slice read its piece. `done` holds the operators that already exist for pieces."""
    source = done[linear, piece]
    for node, at in take.path:
        if (node, piece) not in done:
            copied: Any = fx.map_arg((node.args, node.kwargs), {node.all_input_nodes[0]: source}.__getitem__)
            args, kwargs = copied
            if node.target is aten.reshape.default:
                units = (piece[1] - piece[0]) // at.rows
                args = (source, [*shape_of(node)[: at.dim], units, *shape_of(node)[at.dim + 1 :]])
            done[node, piece] = compute(node, node.target, *args, **kwargs)
        source = done[node, piece]
    dim, start = take.at.dim, (take.rows[0] - piece[0]) // take.at.rows
    if take.node.target is aten.select.int:
        take.node.args = (source, dim, start)
    elif take.rows != piece:
        end = start + shape_of(take.node)[dim]
        take.node.target, take.node.args = aten.slice.Tensor, (source, dim, start, end)
    else:
        take.node.replace_all_uses_with(source)


def _pieces(flat: Flat, whole: fx.Node, dim: int, pieces: Sequence[_Interval]) -> Iterator[fx.Node]:
    """New placeholders for the pieces of a parameter, after the parameter's placeholder."""
    name, shape = flat.placeholders[whole.name][1], shape_of(whole)
    for start, stop in reversed(pieces):
        part = PartOf(name=name, dim=dim, start=start, stop=stop, shape=shape)
        with flat.graph.inserting_after(whole):
            node = flat.graph.placeholder(f"{whole.name}_{start}_{stop}")
        rows = value(whole).narrow(dim, start, stop - start)
        node.meta = whole.meta | {"val": rows, "info": replace(whole.meta["info"], shape=part.piece_shape)}
        flat.placeholders[node.name] = ("parameter", part.piece_name)
        flat.parts[part.piece_name] = part
    inserted = whole
    for _ in pieces:
        inserted = inserted.next
        yield inserted
