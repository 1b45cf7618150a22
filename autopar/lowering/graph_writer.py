"""Writes one rank's graph of a block, operator by operator, with the conversion that each use needs.

A value has a source type on every mesh dimension, a use a destination type. A conversion belongs to a value and a
destination type. It is emitted once and shared by all uses.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import fx

from autopar.capture.analysis import Analysis
from autopar.errors import PlanError
from autopar.ir.program import Block
from autopar.ir.sharding import Dims, Mesh, S, Type, chunk, moves_along, same, steps
from autopar.lowering import experts
from autopar.lowering.context_attention import causal_attention
from autopar.lowering.functions import CONVERT
from autopar.lowering.ring_attention import ring_attention
from autopar.lowering.vocabulary import vocab_parallel_cross_entropy_sum, vocab_parallel_embedding
from autopar.rules.routed import PRODUCT, TAKE
from autopar.rules.rule import Call, MeshDimRef, Slot
from autopar.rules.variants import Bound, Variant

_REWRITES = (
    vocab_parallel_embedding, vocab_parallel_cross_entropy_sum, causal_attention, ring_attention,
    experts.product_of_experts,
)  # fmt: skip
REWRITES: Mapping[str, Callable[..., torch.Tensor]] = {f.__name__: f for f in _REWRITES}  # the names that rules emit
_SAME_ELEMENTS = (torch.ops.aten.reshape.default, torch.ops.aten.view.default, torch.ops.aten.flatten.using_ints)
_RESULT = {  # the end of a converted value's name, by its old and new kind of type
    ("P", "I"): "summed", ("P", "R"): "summed", ("P", "S"): "scattered", ("S", "I"): "gathered", ("S", "R"): "gathered",
    ("S", "S"): "moved", ("I", "S"): "shard", ("R", "S"): "shard", ("I", "R"): "replicate", ("R", "I"): "invariant",
    ("I", "P"): "partial", ("R", "P"): "partial", ("S", "P"): "partial",
}  # fmt: skip
Types = tuple[Type, ...]
Cuts = Mapping[int, Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class SortedRows:
    """The values of a block that have sorted rows (`autopar.rules.routed`)."""

    ragged: Mapping[str, frozenset[int]]
    orders: Mapping[str, str]  # the order of each value
    chosen: Mapping[str, str]  # the numbers of experts that an order sorts
    count: Mapping[str, int]  # of experts
    numbers: frozenset[str]  # values that have the sorted numbers
    choices: frozenset[str]  # values that have them in the order of tokens, before views


def sorted_rows(analysis: Analysis, index: int) -> SortedRows:
    calls, operands, orders = analysis.calls[index], analysis.operands[index], analysis.orders[index]
    chosen = {order: operands[order][0] for order in dict.fromkeys(orders.values())}

    def before_views(name: str) -> str:
        while name in calls and calls[name].target in _SAME_ELEMENTS:
            name = operands[name][0]
        return name

    taken = {name for name in orders if calls[name].target is TAKE}
    return SortedRows(
        ragged=analysis.ragged[index],
        orders=orders,
        chosen=chosen,
        count={orders[n]: c.operands[1].shape[0] for n, c in calls.items() if c.target is PRODUCT and n in orders},
        numbers=frozenset(n for n in taken if before_views(operands[n][0]) == before_views(chosen[orders[n]])),
        choices=frozenset(before_views(name) for name in chosen.values()).intersection(calls),
    )


class Converter:
    """Converts values between types: `emit` gives the result of a function, and `mesh_dim` its mesh dimension."""

    def __init__(
        self, mesh: Mesh, mesh_dim: Callable[[str], Any], emit: Callable[..., Any], *, join: bool = True
    ) -> None:
        self.mesh, self.mesh_dim, self.emit, self.join = mesh, mesh_dim, emit, join

    def convert(self, value: Any, dims: Dims, source: Types, target: Types, name: str = "") -> Any:
        """One conversion per differing mesh dimension, or pair of them. Results have names that begin with `name`."""
        current = source
        order = steps(dims, source, target, self.mesh)
        if not self.join:
            order = [(i,) for indices in order for i in indices]
        for indices in order:
            before = current
            current = tuple(target[i] if i in indices else t for i, t in enumerate(current))
            value = self.convert_one(name, value, dims, before, current, indices)
        return value

    def convert_one(
        self, name: str, value: Any, dims: Dims, source: Types, target: Types, indices: tuple[int, ...]
    ) -> Any:
        """The value after one conversion, such as ``out_summed`` of ``out``."""
        i, degrees = indices[0], self.mesh.degrees
        a, b = (
            S(t.dim) if t.kind == "S" and dims.is_outermost(t, source, degrees) else t for t in (source[i], target[i])
        )
        inner = [t for t in (a, b) if t.kind == "S" and t.position > 0]
        cuts = {t.dim: sorted({u.position for u in inner if u.dim == t.dim}) for t in inner}
        over = self.mesh.names[i] if len(indices) == 1 else self.mesh.joined(i)
        assert over is not None
        mesh_dim = self.mesh_dim(over)
        uneven = len(indices) == 1  # joined shards are even
        if cuts:
            value = self.reshape(value, _cut(dims.local_sizes(source, degrees), cuts), source, cuts)
            a, b = _moved(a, cuts), _moved(b, cuts)
        if uneven:
            before = _cut(dims.local_sizes(source, degrees), cuts)
            value = self.pad(value, before, source, b, _size(dims, target[i]), degrees[i], cuts)
        shards = (t.dim for t in (a, b) if t.kind == "S")
        result = f"{name}_{_RESULT[a.kind, b.kind]}"
        value = self.emit(CONVERT[a.kind, b.kind], (value, mesh_dim, *shards), target, cuts, result)
        if uneven and a.kind == "S" and _size(dims, source[i]) % degrees[i]:
            size = _cut(dims.local_sizes(target, degrees), cuts)[a.dim]
            value = self.emit(torch.ops.aten.slice.Tensor, (value, a.dim, 0, size), target, cuts)
        return self.reshape(value, dims.local_shape(target, degrees), target, {}) if cuts else value

    def pad(self, value: Any, shape: Sequence[int], types: Types, to: Type, size: int, degree: int, cuts: Cuts) -> Any:
        """Zeros behind an axis of `size` that is about to be split unevenly."""
        if to.kind != "S" or size % degree == 0:
            return value
        missing = (chunk(size, degree) * degree - size) * (shape[to.dim] // size)
        pads = [0, 0] * (len(shape) - 1 - to.dim) + [0, missing]
        return self.emit(torch.ops.aten.constant_pad_nd.default, (value, pads), types, cuts)

    def reshape(self, value: Any, shape: Sequence[int], types: Types, cuts: Cuts) -> Any:
        return self.emit(torch.ops.aten.reshape.default, (value, list(shape)), types, cuts)


class GraphWriter(Converter):
    """Writes one block's graph; holds the conversions made so far."""

    def __init__(
        self,
        block: Block,
        mesh: Mesh,
        dims: Mapping[str, Dims],
        rows: "SortedRows",
        device: str,
        join: bool,
    ) -> None:
        super().__init__(mesh, self.attribute, self.conversion, join=join)
        self.graph = fx.Graph()
        self.block, self.dims, self.device = block, dims, device
        self.rows = rows
        self.routes: dict[str, fx.Node] = {}
        self.values: dict[str, fx.Node] = {}
        self.converted: dict[tuple[str, Types], fx.Node] = {}
        self.attributes: dict[str, fx.Node] = {}
        self.operands: dict[tuple[str, str], fx.Node] = {}

    def attribute(self, name: str) -> fx.Node:
        """The mesh dimension that the graph reads."""
        if name not in self.attributes:
            first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
            with self.graph.inserting_before(first) if first else self.graph.inserting_after(None):
                self.attributes[name] = self.graph.get_attr(name)
        return self.attributes[name]

    def conversion(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], types: Types, cuts: Cuts, name: str = ""
    ) -> fx.Node:
        """A function that converts a value, with the types of its result, whose dimensions are cut."""
        node = self.graph.call_function(function, arguments, name=name or None)
        node.meta["types"] = tuple(_moved(t, cuts) for t in types)
        return node

    def use(self, name: str, target: Types) -> fx.Node:
        """The value `name` in the wanted types."""
        source, flows = self.values[name].meta["types"], self.values[name].meta["differentiable"]
        target = tuple(s if same(s, t, flows) else t for s, t in zip(source, target, strict=True))
        if target == source:
            return self.values[name]
        key = (name, target)
        ragged, is_order = self.rows.ragged.get(name, frozenset()), self.rows.orders.get(name) == name
        pairs = zip(source, target, strict=True)
        if ragged and any(moves_along(s, t, ragged, is_order=is_order) for s, t in pairs):
            raise PlanError(
                f"block {self.block.name}: {name} has rows in the order of a rank's own tokens, and the plan moves "
                "them between ranks; plan again"
            )
        if key not in self.converted:
            value = self.values[name]
            self.converted[key] = self.convert(value, self.dims[name], source, target, value.name)
        return self.converted[key]

    def convert_one(
        self, name: str, value: Any, dims: Dims, source: Types, target: Types, indices: tuple[int, ...]
    ) -> fx.Node:
        """As for other values. Sorted rows go to the ranks of their experts, or back to the ranks of their tokens."""
        i = indices[0]
        if not (source[i].by_expert or target[i].by_expert):
            node: fx.Node = super().convert_one(name, value, dims, source, target, indices)
            return node
        order, mesh_dim = self.rows.orders[name], self.mesh_dim(self.mesh.names[i])
        arguments = (
            self.values[order],
            self.operands[order, self.rows.chosen[order]],
            self.rows.count[order],
            mesh_dim,
        )
        if name == order:
            return self.conversion(experts.part_of_experts, arguments, target, {}, f"{name}_part")
        if order not in self.routes:
            self.routes[order] = self.graph.call_function(experts.route_to_experts, arguments, name=f"{order}_route")
        route = self.routes[order]
        if name in self.rows.numbers and not source[i].by_expert:
            return self.conversion(experts.expert_numbers, (route,), target, {}, f"{name}_moved")
        function = experts.rows_to_tokens if source[i].by_expert else experts.rows_to_experts
        return self.conversion(function, (value, mesh_dim, route), target, {}, f"{name}_moved")

    def operator(
        self, node: fx.Node, bound: Bound, call: Call, names: Sequence[str], chosen: Sequence[Variant]
    ) -> None:
        """Emit one operator under one variant per mesh dimension."""
        operands = []
        types: list[Types] = []
        for k, name in enumerate(names):
            wanted = tuple(v.operands[k] for v in chosen)
            operands.append(self.use(name, wanted))
            types.append(wanted)
        self.operands |= {(node.name, name): operand for name, operand in zip(names, operands, strict=True)}
        out_types = tuple(v.output for v in chosen)
        degrees = self.mesh.degrees
        split: dict[str, list[tuple[str, int]]] = {}
        for mesh_name, degree, variant in zip(self.mesh.names, degrees, chosen, strict=True):
            if variant.factor:
                split.setdefault(variant.split_as, []).append((mesh_name, degree))
        shapes = (_shape_on_rank(d, t, degrees) for d, t in zip(bound.operands, types, strict=True))
        output = _shape_on_rank(bound.output, out_types, degrees)
        steps = bound.rule.steps(call.on_one_rank(shapes, output, {f: tuple(m) for f, m in split.items()}))
        previous: fx.Node | None = None
        for step in steps:
            target = REWRITES[step.target] if isinstance(step.target, str) else step.target
            args = self.fill(step.args, operands, previous)
            kwargs = self.fill(dict(step.kwargs), operands, previous)
            if "device" in kwargs:
                kwargs["device"] = self.device
                kwargs.pop("pin_memory", None)
            previous = self.graph.create_node(
                "call_function", target, args, kwargs, node.name if step is steps[-1] else None
            )
            previous.meta["key"] = node.meta["key"]
            previous.meta["operand_types"] = tuple(types) if step is steps[0] else ()
            previous.meta["types"], previous.meta["rewritten"] = out_types, len(steps) > 1
        assert previous is not None
        self.define(node.name, previous, out_types, node.meta["info"].differentiable)

    def fill(self, value: Any, operands: Sequence[fx.Node], previous: fx.Node | None) -> Any:
        if isinstance(value, Slot):
            return previous if value.index < 0 else operands[value.index]
        if isinstance(value, MeshDimRef):
            return self.mesh_dim(value.name)
        if isinstance(value, fx.Node):  # a scalar argument of the block
            return self.values[value.name]
        if isinstance(value, (list, tuple)):
            return type(value)(self.fill(v, operands, previous) for v in value)
        if isinstance(value, dict):
            return {k: self.fill(v, operands, previous) for k, v in value.items()}
        return value

    def define(self, name: str, node: fx.Node, types: Types, differentiable: bool) -> None:
        if name in self.rows.choices and self.mesh.owning("experts"):
            chosen, node = node, self.graph.call_function(experts.kept_choice, (node,), name=f"{name}_kept")
            chosen.meta |= {"value": name, "types": types, "differentiable": differentiable}
        self.values[name] = node
        node.meta |= {"value": name, "types": types, "differentiable": differentiable}


def _shape_on_rank(dims: Dims, types: Types, degrees: Sequence[int]) -> tuple[int, ...]:
    """The shape of one rank's part, with -1 for a number of rows that depends on the data."""
    unknown = {t.dim for t in types if t.by_expert}
    return tuple(-1 if d in unknown else size for d, size in enumerate(dims.local_shape(types, degrees)))


def _size(dims: Dims, t: Type) -> int:
    """Elements of the axis that a shard splits."""
    return dims.sizes[t.dim][t.position] if t.kind == "S" else 1


def _cut(sizes: Sequence[Sequence[int]], cuts: Cuts) -> list[int]:
    shape: list[int] = []
    for d, dim in enumerate(sizes):
        edges = [0, *cuts.get(d, ()), len(dim)]
        shape.extend(prod(dim[a:b]) for a, b in pairwise(edges))
    return shape


def _moved(t: Type, cuts: Cuts) -> Type:
    """Where a shard's axis begins after the dimensions are cut at the given positions."""
    if t.kind != "S":
        return t
    before = sum(len(c) for d, c in cuts.items() if d < t.dim)
    begins = [0, *cuts.get(t.dim, ())]
    part = bisect_right(begins, t.position) - 1
    return Type("S", t.dim + before + part, t.position - begins[part])
