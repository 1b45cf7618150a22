"""Losses as sums, counts and divisions, which ranks and micro-batches add up separately."""

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar._torch.operators import aten
from autopar.capture.nodes import argument, compute, is_random, replace_node, value
from autopar.capture.passes.in_place import functionalise
from autopar.errors import CaptureError
from autopar.ir.precision import is_low
from autopar.rules.registry import has_rule

NONE, MEAN, SUM = 0, 1, 2
_CLASSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)


def open_composites(graph: fx.Graph) -> None:
    """Replace every operator that has no rule by the operators that torch makes of it, such as those of a loss."""
    for node in list(graph.nodes):
        target: Any = node.target
        can_decompose = getattr(target, "_can_decompose", None)
        if can_decompose is None or target.namespace == "autopar" or has_rule(target) or not can_decompose():
            continue
        if is_random(node) or not isinstance(value(node), torch.Tensor):
            continue
        opened = _decomposed(node)
        if opened is None:
            continue
        values: dict[fx.Node, Any] = dict(zip(opened.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
        with graph.inserting_before(node):
            for inner in opened.nodes:
                if inner.op == "call_function":
                    values[inner] = graph.node_copy(inner, values.__getitem__)
                    values[inner].meta = dict(node.meta) | {"val": value(inner)}
        replace_node(node, values[opened.output_node().args[0]])  # type: ignore[index]


def _decomposed(node: fx.Node) -> fx.Graph | None:
    """The graph of an operator's own decomposition. None if torch cannot trace it, or it holds tensors of its own."""
    operands = node.all_input_nodes

    def run(*tensors: torch.Tensor) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), dict(zip(operands, tensors, strict=True)).__getitem__)
        return node.target.decompose(*args, **kwargs)  # type: ignore[union-attr]

    try:
        graph = make_fx(run)(*(value(operand) for operand in operands)).graph
        functionalise(graph, {})
    except (RuntimeError, NotImplementedError, CaptureError):
        return None
    ops = {inner.op for inner in graph.nodes}
    return graph if ops <= {"placeholder", "call_function", "output"} else None


def split_mean_losses(graph: fx.Graph) -> None:
    """Split a mean over classes into sum, count and division, in float32 for 16 bits, which hold no count above 256."""
    for node in list(graph.nodes):
        if node.target not in _CLASSES or argument(node, "reduction") == NONE:
            continue
        logits, target = node.args[0], node.args[1]
        by_id, is_mean = not value(target).dtype.is_floating_point, argument(node, "reduction") == MEAN
        low = value(node).dtype
        wide = torch.float32 if is_low(low) else low
        with graph.inserting_before(node):
            weight = argument(node, "weight")
            if wide != low:
                logits = compute(graph, node, aten.to.dtype, logits, wide)
                weight = weight if weight is None else compute(graph, node, aten.to.dtype, weight, wide)
            if by_id or not is_mean:
                total = _like(graph, node, logits, weight, SUM)
                total.meta["val"] = value(node).to(wide)
                if is_mean:
                    count = _count(graph, node, target, weight, wide)
                    total = compute(graph, node, aten.div.Tensor, total, count)
            else:  # probabilities: torch divides by the number of rows
                total = _like(graph, node, logits, weight, NONE)
                total.meta["val"] = value(target).to(wide).select(1 if value(target).dim() > 1 else 0, 0)
                total = compute(graph, node, aten.mean.default, total)
            if wide != low and any(user.op != "output" for user in node.users):
                total = compute(graph, node, aten.to.dtype, total, low)
        replace_node(node, total)


def _like(graph: fx.Graph, node: fx.Node, logits: Any, weight: Any, reduction: int) -> fx.Node:
    """The loss with another reduction. Its value is not computed: logits and targets may lie on different devices."""
    named = [declared.name for declared in node.target._schema.arguments[4:]]  # type: ignore[union-attr]
    rest = (argument(node, name) for name in named)
    new = graph.call_function(node.target, (logits, node.args[1], weight, reduction, *rest))  # type: ignore[arg-type]
    new.meta = dict(node.meta)
    return new


def _count(graph: fx.Graph, node: fx.Node, target: Any, weight: Any, dtype: torch.dtype) -> fx.Node:
    """The number of targets that count, or the sum of their class weights."""
    valid = compute(graph, node, aten.ne.Scalar, target, argument(node, "ignore_index"))
    if weight is None:
        return compute(graph, node, aten.to.dtype, compute(graph, node, aten.sum.default, valid), dtype)
    ignored = compute(graph, node, aten.logical_not.default, valid)
    classes = compute(graph, node, aten.masked_fill.Scalar, target, ignored, 0)
    picked = compute(graph, node, aten.index.Tensor, weight, [classes])
    return compute(graph, node, aten.sum.default, compute(graph, node, aten.mul.Tensor, picked, valid))
