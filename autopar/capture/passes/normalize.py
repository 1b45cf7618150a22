"""Normalisation passes. Each pass is a small function over one fx graph, and `PASSES` has their order.

After the passes, every node is a functional ATen operator with one tensor output, and has ``meta["info"]``.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import arg, compute, operator_name, output_nodes, put, replace_node, rewrite, traced_info
from autopar.capture.nodes import value as _value
from autopar.capture.passes.aliases import one_name
from autopar.capture.passes.autocast import write_casts
from autopar.capture.passes.control_flow import inline_regions
from autopar.capture.passes.embedding_bags import BAGS
from autopar.capture.passes.experts import HISTOGRAMS, one_grouped_product, operators_of_libraries
from autopar.capture.passes.in_place import COPIES, functionalise
from autopar.capture.passes.losses import LOSSES, open_composites
from autopar.capture.passes.own_rows import own_rows
from autopar.capture.passes.recurrent import CELLS, LAYERS
from autopar.capture.passes.routing import tokens_are_parallel
from autopar.capture.passes.several_outputs import one_output_each
from autopar.errors import CaptureError
from autopar.rules.rule import TensorInfo

DROPPED = {aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten.sym_constrain_range_for_size.default}
IDENTITY = {aten.alias.default, aten.contiguous.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
CONVERSIONS = {getattr(op, name) for op in (aten.to, aten._to_copy, aten.type_as) for name in op.overloads()}
RESHAPES = {aten.view.default, aten._unsafe_view.default}
UNINITIALISED = {
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
}
_WITHOUT_DERIVATIVE = ("bernoulli", "binomial", "multinomial", "poisson")  # draws from their operand
_TRANSPOSES = {aten.t.default, aten.numpy_T.default}
SPARSE = ("sparse", "sparse_grad")  # arguments of lookups

NEW: Mapping[Any, float | None] = {aten.new_zeros.default: 0, aten.new_ones.default: 1, aten.new_full.default: None}


def drop_no_ops(graph: fx.Graph) -> None:
    """Drop assertions, aliases and casts without effect. `view` becomes `reshape`."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in DROPPED:
            graph.erase_node(node)
        elif node.target in IDENTITY or _is_no_op(node):
            replace_node(node, arg(node, 0))
        elif node.target in RESHAPES:
            node.target = aten.reshape.default
        elif node.target in CONVERSIONS:
            node.args, node.kwargs = (node.args[0], _value(node).dtype), {}
            node.target = aten.to.dtype


def _is_no_op(node: fx.Node) -> bool:
    if node.target in CONVERSIONS:
        source, out = _value(arg(node, 0)), _value(node)
        return bool(source.dtype == out.dtype)  # all values of a rank lie on its device
    if node.target in (aten.expand.default, aten.reshape.default, aten.view.default, aten.slice.Tensor):
        return tuple(_value(arg(node, 0)).shape) == tuple(_value(node).shape)
    return node.target is aten.dropout.default and bool(node.args[1] == 0 or not node.args[2])


def dense_operands(graph: fx.Graph) -> None:
    """Give `as_strided` one dimension in the memory order of the capture: a rank may hold another order."""
    for node in graph.nodes:
        if node.target is not aten.as_strided.default:
            continue
        source = _value(arg(node, 0))
        order = sorted(range(source.dim()), key=lambda dim: -source.stride(dim))
        if not source.permute(order).is_contiguous():
            raise CaptureError("as_strided of a part of a tensor reads elements beside it; call contiguous() before")
        dense = compute(node, aten.reshape.default, compute(node, aten.permute.default, arg(node, 0), order), [-1])
        offset = int(node.args[3]) - source.storage_offset() if len(node.args) > 3 and node.args[3] else 0
        node.args = (dense, *node.args[1:3], offset)


def dense_gradients(graph: fx.Graph) -> None:
    """Give lookups dense gradients. They have the same values as sparse ones, and ranks can sum and shard them."""
    for node in graph.nodes:
        for k, declared in enumerate(getattr(getattr(node.target, "_schema", None), "arguments", ())):
            if declared.name in SPARSE and k < len(node.args):
                node.update_arg(k, False)
            elif declared.name in SPARSE and declared.name in node.kwargs:
                node.update_kwarg(declared.name, False)


def spell_plainly(graph: fx.Graph) -> None:
    """Give each operator one form. Uninitialised memory becomes zeros, because it would differ between ranks."""
    for node in list(graph.nodes):
        if node.target is aten.pad.default and (len(node.args) < 3 or node.args[2] == "constant"):
            value = node.args[3] if len(node.args) > 3 else node.kwargs.get("value", 0.0)
            node.target, node.args, node.kwargs = aten.constant_pad_nd.default, (*node.args[:2], value or 0.0), {}
        elif node.target in (aten.reshape.default, aten.reshape_as.default, aten.view_as.default):
            node.target = aten.reshape.default
            node.args = (node.args[0], list(_value(node).shape))
        elif node.target in UNINITIALISED:
            node.target = UNINITIALISED[node.target]
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}
        if node.target in NEW:
            _fill_without_operand(node, NEW[node.target])


def _fill_without_operand(node: fx.Node, value: float | None) -> None:
    """Replace ``x.new_zeros(shape)`` by `full`, or for x's shape by `full_like`, because the result has x's axes."""
    shape = list(_value(node).shape)
    fill = node.args[2] if value is None else value
    if isinstance(fill, fx.Node):
        return
    dtype = node.kwargs.get("dtype") or _value(arg(node, 0)).dtype
    kwargs = {"dtype": dtype, "device": node.kwargs.get("device") or _value(arg(node, 0)).device}
    if shape == list(_value(arg(node, 0)).shape):
        node.target, node.args, node.kwargs = aten.full_like.default, (arg(node, 0), fill), {"dtype": dtype}
    else:
        node.target, node.args, node.kwargs = aten.full.default, (shape, fill), kwargs


def flat_addmm_to_linear(graph: fx.Graph) -> None:
    """Replace `addmm` between two reshapes (GPT-2's Conv1D) by `linear` on the unflattened value."""
    for node in list(graph.nodes):
        if node.target is not aten.addmm.default or len(node.args) > 3 or node.kwargs:
            continue
        bias, flat, weight = node.args
        outer = (*_value(flat.args[0]).shape[:-1], _value(node).shape[1]) if flat.target is aten.reshape.default else ()
        if not outer or _value(flat.args[0]).shape[-1] != _value(flat).shape[-1]:
            continue
        if any(u.target is not aten.reshape.default or tuple(_value(u).shape) != outer for u in node.users):
            continue
        turned = put(node, aten.t.default, (weight,), _value(weight).t())
        linear = put(node, aten.linear.default, (flat.args[0], turned, bias), _value(node).new_empty(outer))
        for user in list(node.users):
            replace_node(user, linear)
        graph.erase_node(node)


def matmul_to_linear(graph: fx.Graph) -> None:
    """Replace ``x @ w.T`` and ``x @ w.T + b`` by `linear`, if weight (out, in) and bias (out,) are placeholders."""
    for node in list(graph.nodes):
        if node.target not in (aten.matmul.default, aten.mm.default):
            continue
        turned = arg(node, 1)
        if turned.target not in _TRANSPOSES or arg(turned, 0).op != "placeholder":
            continue
        weight = arg(turned, 0)
        if weight.meta["val"].dim() != 2 or arg(node, 0).meta["val"].dim() < 2:
            continue
        last, bias = _with_bias(node, weight)
        last.replace_all_uses_with(put(last, aten.linear.default, (node.args[0], weight, *bias), _value(last)))


def _with_bias(node: fx.Node, weight: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The addition of a bias to a product, with the bias, if it is the product's only use. Otherwise the product."""
    only = next(iter(node.users)) if len(node.users) == 1 else node
    if only.target is not aten.add.Tensor or only.args[0] is not node or only.kwargs:
        return node, ()
    bias = only.args[1]
    if not isinstance(bias, fx.Node) or bias.op != "placeholder":
        return node, ()
    value, product = bias.meta["val"], node.meta["val"]
    fits = tuple(value.shape) == (weight.meta["val"].shape[0],) and value.dtype == product.dtype
    return (only, (bias,)) if fits else (node, ())


def remove_dead(graph: fx.Graph) -> None:
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


GraphPass = Callable[[fx.Graph], None]
PASSES: tuple[GraphPass, ...] = (
    one_name,
    dense_gradients,
    drop_no_ops,
    partial(rewrite, table=BAGS),
    partial(rewrite, table=LAYERS),
    partial(rewrite, table=CELLS),
    one_output_each,
    partial(rewrite, table=COPIES),
    dense_operands,
    drop_no_ops,
    spell_plainly,
    flat_addmm_to_linear,
    matmul_to_linear,
    operators_of_libraries,
    partial(rewrite, table=HISTOGRAMS),
    one_grouped_product,
    tokens_are_parallel,
    own_rows,
    open_composites,
    drop_no_ops,
    one_output_each,
    spell_plainly,
    partial(rewrite, table=LOSSES),
    remove_dead,
)


def normalise(
    graph: fx.Graph, root: fx.GraphModule, trainable: frozenset[str], buffers: Mapping[str, str], num_updates: int = 0
) -> tuple[str, ...]:
    """Apply all passes in place. Returns the buffers that operators change, whose new values are the last outputs."""
    inline_regions(graph, root)
    write_casts(graph)
    updates = functionalise(graph, buffers)
    output = graph.output_node()
    output.args = ((*output_nodes(graph), *updates.values()),)
    for graph_pass in PASSES:
        graph_pass(graph)
    own_outputs(graph, num_updates + len(updates))
    for node in graph.nodes:
        if operator_name(node) in _WITHOUT_DERIVATIVE:
            node.meta["no_grad"] = True
    add_info(graph, root, trainable)
    cut_no_grad(graph)
    graph.lint()
    return tuple(updates)


def detach_regions(module: fx.GraphModule) -> None:
    """Detach the operands of no-grad regions, because a decomposition of the graph forgets the regions."""
    for node in module.graph.nodes:
        if getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled" and node.args[0] is False:
            region = getattr(module, str(node.args[1].target))
            for inner in region.graph.find_nodes(op="placeholder"):
                with region.graph.inserting_after(inner):
                    cut = region.graph.call_function(aten.detach.default, (inner,))
                inner.replace_all_uses_with(cut, lambda user, cut=cut: user is not cut)
            region.recompile()


def own_outputs(graph: fx.Graph, count: int) -> None:
    """Make each of the last `count` outputs a separate value, which is no placeholder and no other output."""
    results = list(output_nodes(graph))
    for k in range(len(results) - count, len(results)):
        if results[k].op != "call_function" or results.count(results[k]) > 1:
            results[k] = compute(graph.output_node(), aten.clone.default, results[k], like=results[k])
    graph.output_node().args = (tuple(results),)


def cut_no_grad(graph: fx.Graph) -> None:
    """Detach the differentiable operands of operators in no-grad regions, so that they get no cotangent."""
    for node in list(graph.nodes):
        if not node.meta.get("no_grad"):
            continue
        for operand in node.all_input_nodes:
            info: TensorInfo | None = operand.meta.get("info")
            if info is not None and info.differentiable:
                cut = compute(node, aten.detach.default, operand, like=operand)
                cut.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
                node.replace_input_with(operand, cut)


def add_info(graph: fx.Graph, root: fx.GraphModule, trainable: frozenset[str]) -> None:
    """Set ``meta["info"]`` of every node from its traced value. It is differentiable if it may get a cotangent."""
    for node in graph.nodes:
        value = _value(node)
        if node.op == "get_attr" and value is None:
            value = getattr(root, str(node.target))
        if node.op == "output" or value is None:
            continue
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise CaptureError(
                f"operator {node.target} returns a {kind}, not one tensor; use an operator that returns a tensor"
            )
        info = traced_info(node, value)
        node.meta["info"] = replace(info, differentiable=True) if node.name in trainable else info
