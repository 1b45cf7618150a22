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


class GraphWriter:
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
        self.graph = fx.Graph()
        self.block, self.mesh, self.dims, self.device, self.join = block, mesh, dims, device, join
        self.rows = rows
        self.routes: dict[str, fx.Node] = {}
        self.values: dict[str, fx.Node] = {}
        self.converted: dict[tuple[str, Types], fx.Node] = {}
        self.attributes: dict[str, fx.Node] = {}
        self.operands: dict[tuple[str, str], fx.Node] = {}

    def mesh_dim(self, name: str) -> fx.Node:
        if name not in self.attributes:
            first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
            with self.graph.inserting_before(first) if first else self.graph.inserting_after(None):
                self.attributes[name] = self.graph.get_attr(name)
        return self.attributes[name]

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
            self.converted[key] = self.convert(self.values[name], self.dims[name], source, target)
        return self.converted[key]

    def convert(self, node: fx.Node, dims: Dims, source: Types, target: Types) -> fx.Node:
        """One conversion per differing mesh dimension, or pair of them."""
        current, name = list(source), node.name
        order = steps(dims, source, target, self.mesh)
        if not self.join:
            order = [(i,) for indices in order for i in indices]
        for indices in order:
            before = tuple(current)
            for i in indices:
                current[i] = target[i]
            if any(t[indices[0]].by_expert for t in (before, current)):
                node = self.convert_rows(name, node, before[indices[0]], indices[0])
                _describe(node, tuple(current), {})
            else:
                node = self.convert_one(name, node, dims, before, tuple(current), indices)
        return node

    def convert_rows(self, value: str, node: fx.Node, source: Type, index: int) -> fx.Node:
        """Sorted rows on the ranks of their experts, or back on those of their tokens; of an order, a rank's part."""
        order, mesh_dim = self.rows.orders[value], self.mesh_dim(self.mesh.names[index])
        arguments = (
            self.values[order],
            self.operands[order, self.rows.chosen[order]],
            self.rows.count[order],
            mesh_dim,
        )
        if value == order:
            return self.graph.call_function(experts.part_of_experts, arguments, name=f"{value}_part")
        if order not in self.routes:
            self.routes[order] = self.graph.call_function(experts.route_to_experts, arguments, name=f"{order}_route")
        route = self.routes[order]
        if value in self.rows.numbers and not source.by_expert:
            return self.graph.call_function(experts.expert_numbers, (route,), name=f"{value}_moved")
        function = experts.rows_to_tokens if source.by_expert else experts.rows_to_experts
        return self.graph.call_function(function, (node, mesh_dim, route), name=f"{value}_moved")

    def convert_one(
        self, value: str, node: fx.Node, dims: Dims, source: Types, target: Types, indices: tuple[int, ...]
    ) -> fx.Node:
        """`node` after one conversion. Its name begins with the name of the `value`, such as ``out_summed``."""
        i = indices[0]
        a, b = source[i], target[i]
        degrees = self.mesh.degrees
        a, b = (S(t.dim) if t.kind == "S" and dims.is_outermost(t, source, degrees) else t for t in (a, b))
        inner = [t for t in (a, b) if t.kind == "S" and t.position > 0]
        name = self.mesh.names[i] if len(indices) == 1 else self.mesh.joined(i)
        assert name is not None
        mesh_dim = self.mesh_dim(name)
        uneven = len(indices) == 1  # joined shards are even
        cuts: dict[int, list[int]] = {}
        if inner:
            cuts = {
                d: sorted({t.position for t in (a, b) if t.kind == "S" and t.dim == d and t.position > 0})
                for d in {t.dim for t in inner}
            }
            node = self.reshape(node, _cut(dims.local_sizes(source, degrees), cuts))
            _describe(node, source, cuts)
            a, b = _moved(a, cuts), _moved(b, cuts)
        if uneven:
            before = _cut(dims.local_sizes(source, degrees), cuts)
            node = self.pad(node, before, source, b, _size(dims, target[i]), degrees[i], cuts)
        shards = (t.dim for t in (a, b) if t.kind == "S")
        result = f"{value}_{_RESULT[a.kind, b.kind]}"
        node = self.graph.call_function(CONVERT[a.kind, b.kind], (node, mesh_dim, *shards), name=result)
        _describe(node, target, cuts)
        if uneven and a.kind == "S" and _size(dims, source[i]) % degrees[i]:
            size = _cut(dims.local_sizes(target, degrees), cuts)[a.dim]
            node = self.graph.call_function(torch.ops.aten.slice.Tensor, (node, a.dim, 0, size))
            _describe(node, target, cuts)
        if inner:
            node = self.reshape(node, dims.local_shape(target, degrees))
            _describe(node, target, {})
        return node

    def pad(
        self, node: fx.Node, shape: Sequence[int], types: Types, to: Type, size: int, degree: int, cuts: Cuts
    ) -> fx.Node:
        """Zeros behind an axis of `size` that is about to be split unevenly."""
        if to.kind != "S" or size % degree == 0:
            return node
        missing = (chunk(size, degree) * degree - size) * (shape[to.dim] // size)
        pads = [0, 0] * (len(shape) - 1 - to.dim) + [0, missing]
        node = self.graph.call_function(torch.ops.aten.constant_pad_nd.default, (node, pads))
        _describe(node, types, cuts)
        return node

    def reshape(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        return self.graph.call_function(torch.ops.aten.reshape.default, (node, list(shape)))

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


def _describe(node: fx.Node, types: Types, cuts: Cuts) -> None:
    """Notes for the type check: the types of a converted value whose dimensions are cut."""
    node.meta["types"] = tuple(_moved(t, cuts) for t in types)
