"""A captured program as bytes, for another process of the same installation. Reading takes milliseconds.

fx graphs become plain data: each node has the numbers of its operand nodes. Annotations that only capture itself reads,
such as fake tensors, are dropped. The bytes are a pickle, so read no bytes from other sources.
"""

import io
import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar._torch.private import operator_parts
from autopar.capture.record.read import define
from autopar.ir.program import Program

KEPT = (
    "info",
    "key",
    "batch_power",
    "literal",
)  # the keys of `fx.Node.meta` that a folded program needs


@dataclass(frozen=True, slots=True)
class _Operand:
    """A reference to the node with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class _Node:
    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    meta: dict[str, Any]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, fx.Graph):
            return _graph_of, (_nodes_of(value),)
        parts = operator_parts(value)
        return NotImplemented if parts is None else (_operator_of, parts)


def to_bytes(program: Program) -> bytes:
    """The program as bytes, for `from_bytes`."""
    out = io.BytesIO()
    _Pickler(out).dump(replace(program, analysis=None))  # the analysis has functions of rules, and can be made again
    return out.getvalue()


def from_bytes(written: bytes) -> Program:
    """A program with the same blocks, names and annotations as the one that was written."""
    found = pickle.loads(written)
    assert isinstance(found, Program), type(found)
    return found


def _nodes_of(graph: fx.Graph) -> list[_Node]:
    numbers = {node: number for number, node in enumerate(graph.nodes)}

    def operand(node: fx.Node) -> Any:
        return _Operand(numbers[node])

    def plain(value: Any) -> Any:
        return fx.map_arg(value, operand)

    return [
        _Node(n.op, n.name, n.target, plain(n.args), plain(n.kwargs), {k: n.meta[k] for k in KEPT if k in n.meta})
        for n in graph.nodes
    ]


def _graph_of(nodes: list[_Node]) -> fx.Graph:
    graph = fx.Graph()
    made: list[fx.Node] = []

    def linked(value: Any) -> Any:
        if isinstance(value, _Operand):
            return made[value.number]
        if isinstance(value, (list, tuple)):
            return type(value)(linked(one) for one in value)
        if isinstance(value, dict):
            return {key: linked(one) for key, one in value.items()}
        if isinstance(value, slice):
            return slice(linked(value.start), linked(value.stop), linked(value.step))
        return value

    for one in nodes:
        node = graph.create_node(one.op, one.target, linked(one.args), linked(one.kwargs), one.name)
        assert node.name == one.name, (node.name, one.name)
        node.meta = one.meta
        made.append(node)
    return graph


def _operator_of(namespace: str, name: str, overload: str) -> Any:
    if namespace == "autopar":  # a process without a capture has not defined this operator yet
        define(name, overload)
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
