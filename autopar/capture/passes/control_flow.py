"""Regions that PyTorch keeps as one operator: `scan` and `map` are unrolled, `cond` computes both branches.

The operators of a region of `torch.autocast` or without gradients note it: `noted_region`, ``meta["no_grad"]``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar._torch.private import HigherOrderOperator
from autopar.capture.nodes import compute, inlined, replace_node, value
from autopar.capture.passes.autocast import noted_region
from autopar.errors import CaptureError

MAX_STEPS = 4096
_Run = Callable[..., list[Any]]  # of a region and its inputs, and the metadata of its nodes


def inline_regions(graph: fx.Graph, root: fx.GraphModule) -> None:
    """Replace operators with regions by those of the regions. Both branches of `cond` run, and `where` chooses."""
    for node in list(graph.nodes):
        if not isinstance(node.target, HigherOrderOperator):
            continue
        name = node.target._name
        if name not in _OPENED:
            raise CaptureError(
                f"operator {name} cannot be split: its steps depend on values, or its regions are hidden. Use a "
                "Python loop of fixed length, torch.where, or a custom operator with a rule (autopar.register_rule)"
            )
        results = _OPENED[name](partial(_inlined, root, node), node)
        replace_node(node, results[0] if isinstance(value(node), torch.Tensor) else results)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)


def _inlined(
    root: fx.GraphModule,
    node: fx.Node,
    region: Any,
    inputs: Sequence[Any],
    meta: Mapping[str, Any] | None = None,
    missing: Mapping[str, Any] | None = None,
) -> list[Any]:
    """The results of one run of a region. Its nodes have other metadata: that of `node`, or `meta`."""
    module: fx.GraphModule = getattr(root, str(region.target))
    inline_regions(module.graph, module)
    stack = {"nn_module_stack": node.meta.get("nn_module_stack")}
    results = inlined(node, module.graph, inputs, stack if meta is None else meta, stack | dict(missing or {}))
    return [results] if isinstance(results, fx.Node) else list(results)


def _both_branches(run: _Run, node: fx.Node) -> list[Any]:
    arguments: Sequence[Any] = node.args
    chosen, first, second, operands = arguments[:4]
    taken, other = (run(region, operands) for region in (first, second))
    if isinstance(chosen, bool):
        return taken if chosen else other
    return [compute(node, aten.where.self, chosen, a, b) for a, b in zip(taken, other, strict=True)]


def _scanned(run: _Run, node: fx.Node) -> list[Any]:
    """The last state, and the results of all steps, stacked."""
    region, start, inputs, more = node.args[:4]
    state: list[Any] = list(start)  # type: ignore[arg-type]
    steps: list[list[Any]] = []
    for at in _steps(node, inputs):
        results = run(region, [*state, *at, *more])  # type: ignore[misc]
        state, out = results[: len(state)], results[len(state) :]
        steps.append(out)
    return [*state, *_stacked(node, steps)]


def _mapped(run: _Run, node: fx.Node) -> list[Any]:
    region, inputs, more = node.args[:3]
    return _stacked(node, [run(region, [*at, *more]) for at in _steps(node, inputs)])  # type: ignore[misc]


def _without_gradients(run: _Run, node: fx.Node) -> list[Any]:
    is_enabled, region, *inputs = node.args
    return run(region, inputs, {"no_grad": True} if is_enabled is False else {})


def _under_autocast(run: _Run, node: fx.Node) -> list[Any]:
    *settings, region = node.args[:5]
    return run(region, node.args[5:], {}, noted_region(settings))


_OPENED: Mapping[str, Callable[[_Run, fx.Node], list[Any]]] = {
    "cond": _both_branches,
    "scan": _scanned,
    "map_impl": _mapped,
    "wrap_with_set_grad_enabled": _without_gradients,
    "wrap_with_autocast": _under_autocast,
}


def _steps(node: fx.Node, inputs: Any) -> list[list[fx.Node]]:
    """The inputs of every step: element by element of dimension 0."""
    count = value(inputs[0]).shape[0]
    if count > MAX_STEPS:
        raise CaptureError(f"operator {node.target} has {count} steps; at most {MAX_STEPS} are unrolled")
    return [[compute(node, aten.select.int, x, 0, step) for x in inputs] for step in range(count)]


def _stacked(node: fx.Node, runs: Sequence[Sequence[Any]]) -> list[fx.Node]:
    return [compute(node, aten.stack.default, list(results), 0) for results in zip(*runs, strict=True)]
