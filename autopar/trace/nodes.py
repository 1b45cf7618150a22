"""Typed access to fx nodes: torch types an argument as a wide union and a target as a function or a string."""

from collections.abc import Callable
from typing import Any

from torch import fx


def arg(node: fx.Node, index: int) -> fx.Node:
    """The positional argument at `index`, which must be a node."""
    value = node.args[index]
    assert isinstance(value, fx.Node), (node, index, value)
    return value


def int_arg(node: fx.Node, index: int) -> int:
    """The positional argument at `index`, which must be an integer."""
    value = node.args[index]
    assert isinstance(value, int), (node, index, value)
    return value


def output_nodes(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """What a graph returns; its output must be a flat sequence of nodes."""
    values: Any = graph.output_node().args[0]
    assert all(isinstance(value, fx.Node) for value in values), values
    return tuple(values)


def function(node: fx.Node) -> Callable[..., Any]:
    """The target of a `call_function` node."""
    assert not isinstance(node.target, str), node
    return node.target


def operator_name(node: fx.Node) -> str:
    """Name of the function that a node calls, for ATen operators without overload."""
    target = function(node)
    return str(target._opname if hasattr(target, "_opname") else target.__name__)
