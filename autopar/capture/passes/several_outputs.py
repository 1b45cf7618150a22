"""Operators with several outputs become operators with one output each."""

import operator
from typing import cast

from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import argument, is_random, operator_name, positional, put, value
from autopar.capture.passes.recurrent import RECURRENT
from autopar.errors import CaptureError
from autopar.rules.operators import output_of

PIECES = ("split", "chunk", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit")
PICKS_MANY = ("topk", "sort", "cummax", "cummin")
PICKS_ONE = ("max", "min", "kthvalue", "median", "nanmedian", "mode")
Outputs = dict[int, fx.Node]


def one_output_each(graph: fx.Graph) -> None:
    """Rewrite the graph until every node has one tensor output.

    - `split`, `chunk` and `unbind` become slices and selects. `broadcast_tensors` becomes `expand`.
    - `topk`, `sort`, and `max` over a dimension return their indices, and `gather` returns the values.
    - `var_mean` becomes two reductions.
    - Any other operator runs once per used output.

    Raises `CaptureError` if an operator would draw different random numbers for each output.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(value(node), (list, tuple)):
            continue
        outputs: Outputs = {}
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise CaptureError(
                    f"operator {node.target} has several outputs, and the model uses them as one value; unpack them"
                )
            if user.users:
                user.replace_all_uses_with(_output(node, user, outputs))
            graph.erase_node(user)
        graph.erase_node(node)


def _output(node: fx.Node, user: fx.Node, outputs: Outputs) -> fx.Node:
    name, index, result = operator_name(node), positional(user, 1), value(user)
    if name == "unbind":
        dim = argument(node, "dim")
        return put(user, aten.select.int, (node.args[0], dim, index), result)
    if name in PIECES:
        return _piece(node, user)
    if name == "broadcast_tensors":
        source = cast("list[fx.Node]", node.args[0])[index]
        return put(user, aten.expand.default, (source, list(result.shape)), result)
    if (name in PICKS_MANY or name in PICKS_ONE) and len(value(node)) == 2:
        return _picked(node, user, outputs)
    if name in ("var_mean", "std_mean"):
        return _moment(node, user)
    if name == "native_dropout" and index == 0:
        trains = argument(node, "train") is not False  # by default it drops
        return put(user, aten.dropout.default, (*node.args[:2], trains), result)
    refuse_random(node)
    return put(user, output_of(node.target, index), node.args, result, **node.kwargs)


def _piece(node: fx.Node, user: fx.Node) -> fx.Node:
    index = positional(user, 1)
    whole, parts = value(node.args[0]), value(node)
    dim = next((d for d in range(whole.dim()) if parts[0].shape[d] != whole.shape[d]), 0)
    if operator_name(node) in ("split", "chunk", "split_with_sizes", "tensor_split"):
        dim = argument(node, "dim")
    start = sum(part.shape[dim] for part in parts[:index])
    bounds = (node.args[0], dim, start, start + parts[index].shape[dim])
    return put(user, aten.slice.Tensor, bounds, value(user))


def _picked(node: fx.Node, user: fx.Node, outputs: Outputs) -> fx.Node:
    """The operator returns the indices, and `gather` the values, so that gradients reach the picked elements."""
    indices = value(node)[1]
    if 1 not in outputs:
        outputs[1] = put(node, output_of(node.target, 1), node.args, indices, user, **node.kwargs)
    if positional(user, 1) == 1:
        return outputs[1]
    source, dim = node.args[0], argument(node, "dim")
    if operator_name(node) in PICKS_MANY or argument(node, "keepdim") or not value(source).dim():
        return put(user, aten.gather.default, (source, dim, outputs[1]), value(user))
    kept = put(user, aten.unsqueeze.default, (outputs[1], dim), indices.unsqueeze(dim))
    picked = put(user, aten.gather.default, (source, dim, kept), value(user).unsqueeze(dim))
    return put(user, aten.squeeze.dim, (picked, dim), value(user))


def _moment(node: fx.Node, user: fx.Node) -> fx.Node:
    """One output of `var_mean` or `std_mean`: a variance or standard deviation, or a mean."""
    overload = node.target._overloadname  # type: ignore[union-attr]
    if positional(user, 1) == 0:
        packet = aten.var if operator_name(node) == "var_mean" else aten.std
        spread = getattr(packet, overload)
        return put(user, spread, node.args, value(user), **node.kwargs)
    if overload == "default":
        return put(user, aten.mean.default, (node.args[0],), value(user))
    dims = (argument(node, "dim"), argument(node, "keepdim"))
    return put(user, aten.mean.dim, (node.args[0], *dims), value(user))


def refuse_random(node: fx.Node) -> None:
    """Raise `CaptureError` for an operator that draws random numbers, because each output would draw new ones."""
    name = operator_name(node)
    draws = is_random(node)
    if name in RECURRENT:  # dropout is only between layers
        draws = bool(argument(node, "dropout") and argument(node, "train") and argument(node, "num_layers") > 1)
    if draws:
        remedy = "set its dropout to 0" if name in RECURRENT else "write it with dropout or bernoulli instead"
        raise CaptureError(f"operator {node.target} draws random numbers and has several outputs; {remedy}")
