"""Control flow that PyTorch keeps as one operator: `scan` and `map` are unrolled, `cond` computes both branches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar._torch.private import HigherOrderOperator
from autopar.capture.nodes import compute, inlined, replace_node, value
from autopar.errors import CaptureError

MAX_STEPS = 4096


def inline_control_flow(graph: fx.Graph, root: fx.GraphModule) -> None:
    """Replace control-flow operators by those of their regions. Both branches of `cond` run, and `where` chooses."""
    for node in list(graph.nodes):
        name = getattr(node.target, "_name", "") if node.op == "call_function" else ""
        if not isinstance(node.target, HigherOrderOperator):
            continue
        with graph.inserting_before(node):
            if name == "cond":
                results = _both_branches(graph, root, node)
            elif name == "scan":
                results = _scanned(graph, root, node)
            elif name == "map_impl":
                results = _mapped(graph, root, node)
            else:
                raise CaptureError(
                    f"operator {name} cannot be split: its steps depend on values, or its regions are hidden. Use a "
                    "Python loop of fixed length, torch.where, or a custom operator with a rule (autopar.register_rule)"
                )
        replace_node(node, results[0] if isinstance(value(node), torch.Tensor) else results)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)


def _inlined(graph: fx.Graph, root: fx.GraphModule, region: Any, inputs: Sequence[Any], like: fx.Node) -> list[Any]:
    """The results of one run of a region."""
    module: fx.GraphModule = getattr(root, str(region.target))
    inline_control_flow(module.graph, module)
    stack = {"nn_module_stack": like.meta.get("nn_module_stack")}
    results = inlined(graph, module.graph, inputs, stack, {})
    return [results] if isinstance(results, fx.Node) else list(results)


def _both_branches(graph: fx.Graph, root: fx.GraphModule, node: fx.Node) -> list[Any]:
    chosen: Any
    chosen, first, second, operands = node.args[:4]
    taken, other = (_inlined(graph, root, region, operands, node) for region in (first, second))  # type: ignore[arg-type]
    if isinstance(chosen, bool):
        return taken if chosen else other
    return [compute(graph, node, aten.where.self, chosen, a, b) for a, b in zip(taken, other, strict=True)]


def _scanned(graph: fx.Graph, root: fx.GraphModule, node: fx.Node) -> list[Any]:
    """The last state, and the results of all steps, stacked."""
    region, start, inputs, more = node.args[:4]
    state: list[Any] = list(start)  # type: ignore[arg-type]
    steps: list[list[Any]] = []
    for at in _steps(graph, node, inputs):
        results = _inlined(graph, root, region, [*state, *at, *more], node)  # type: ignore[misc]
        state, out = results[: len(state)], results[len(state) :]
        steps.append(out)
    return [*state, *_stacked(graph, node, steps)]


def _mapped(graph: fx.Graph, root: fx.GraphModule, node: fx.Node) -> list[Any]:
    region, inputs, more = node.args[:3]
    runs = [_inlined(graph, root, region, [*at, *more], node) for at in _steps(graph, node, inputs)]  # type: ignore[misc]
    return _stacked(graph, node, runs)


def _steps(graph: fx.Graph, node: fx.Node, inputs: Any) -> list[list[fx.Node]]:
    """The inputs of every step: element by element of dimension 0."""
    count = value(inputs[0]).shape[0]
    if count > MAX_STEPS:
        raise CaptureError(f"operator {node.target} has {count} steps; at most {MAX_STEPS} are unrolled")
    return [[compute(graph, node, aten.select.int, x, 0, step) for x in inputs] for step in range(count)]


def _stacked(graph: fx.Graph, node: fx.Node, runs: Sequence[Sequence[Any]]) -> list[fx.Node]:
    return [compute(graph, node, aten.stack.default, list(results), 0) for results in zip(*runs, strict=True)]
