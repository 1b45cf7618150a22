"""In-place operators become functional. Each buffer that the forward pass changes becomes state with a new value."""

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import Compute, Rewrite, cast_to, compute, replace_node, value
from autopar.capture.passes.batch_norm import replace_batch_norm
from autopar.errors import CaptureError


def needs_decomposition(module: fx.GraphModule, changeable: Mapping[str, str]) -> bool:
    """Whether a graph holds in-place operators that only export's own decomposition makes functional."""
    changes = [node for node in module.graph.nodes if _in_place(node)]
    if any(map(_is_aliased, changes)):
        return True
    # `torch.vmap`, whose operators act on tensors with a hidden dimension
    if any(getattr(node.target, "__name__", "") == "_vmap_increment_nesting" for node in module.graph.nodes):
        return True
    if any(value.op == "placeholder" and value.name not in changeable for value in map(_first, changes)):
        return True
    regions = [m for m in module.modules() if isinstance(m, fx.GraphModule) and m is not module]
    return any(_in_place(node) for region in regions for node in region.graph.nodes)


def change_views_by_copies(graph: fx.Graph) -> None:
    """Write `x.op_()` as `x.copy_(x.op())` if x is a view: export gives some results strides that `view` refuses."""
    for node in list(graph.nodes):
        twin = _functional_twin(node) if _in_place(node) and _is_view(_first(node)) else None
        if twin not in (None, aten.copy.default):
            new = compute(node, twin, *_arguments(node, twin), **node.kwargs)
            node.target, node.args, node.kwargs = aten.copy_.default, (_first(node), new), {}


def functionalise(graph: fx.Graph, buffers: Mapping[str, str]) -> dict[str, fx.Node]:
    """Make in-place operators and batch norm's statistics functional. Returns the last values of changed buffers."""
    last: dict[str, fx.Node] = {}
    holds: dict[fx.Node, str] = {n: buffers[n.name] for n in graph.nodes if n.op == "placeholder" and n.name in buffers}
    for node in list(graph.nodes):
        for old, new in [(_first(node), _functional(node))] if _in_place(node) else replace_batch_norm(node):
            for user in [u for u in old.users if u > new and u is not new]:
                user.replace_input_with(old, new)
            if old in holds:
                holds[new] = holds[old]
                last[holds[old]] = new
    return last


def _in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def _first(node: fx.Node) -> Any:
    return node.args[0]


def _functional_twin(node: fx.Node) -> Any:
    """The functional form of an in-place operator. None if there is none."""
    schema = node.target._schema  # type: ignore[union-attr]
    name = schema.name.split("::")[1]
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    if packet is None:
        return None
    kinds = _kinds(schema)  # the twin of `pow_.Scalar` is `pow.Tensor_Scalar`, and not `pow.Scalar`
    names = (schema.overload_name or "default", *packet.overloads())
    twins = (getattr(packet, each) for each in names if each in packet.overloads())
    plain = (t for t in twins if not t._schema.is_mutable and len(t._schema.returns) == 1)
    return next((t for t in plain if _kinds(t._schema) == kinds), None)


def _kinds(schema: Any) -> list[str]:
    """The types of an operator's arguments."""
    return [str(argument.type) for argument in schema.arguments if argument.name != "out"]


def _arguments(node: fx.Node, twin: Any) -> tuple[Any, ...]:
    """The positional arguments of a node, with defaults that a trace leaves out and the twin needs."""
    given = list(node.args)
    places = [argument for argument in node.target._schema.arguments if not argument.kwarg_only]  # type: ignore[union-attr]
    for argument, other in list(zip(places, twin._schema.arguments, strict=False))[len(given) :]:
        if argument.name in node.kwargs or argument.default_value == other.default_value:
            break
        given.append(argument.default_value)
    return tuple(given)


def _functional(node: fx.Node) -> fx.Node:
    """Replace an in-place operator. The new value has the shape and dtype of the old value."""
    target, twin = _first(node), _functional_twin(node)
    if twin is None or _is_aliased(node):
        where = list((node.meta.get("nn_module_stack") or {"": ("the model", "")}).values())[-1][0]
        raise CaptureError(
            f"in-place operator {node.target} in {where} changes a value that other code reads; write it out of place "
            "(x = x.op(...) instead of x.op_(...))"
        )
    named: Mapping[str, Any] = node.kwargs
    is_copy = twin is aten.copy.default
    new = _fitted(node, node.args[1] if is_copy else compute(node, twin, *_arguments(node, twin), **named))
    replace_node(node, new)
    assert target is not new
    return new


def _fitted(node: fx.Node, source: Any) -> fx.Node:
    """`source` in the shape and dtype of a node. The result is always a new node."""
    like = value(node)
    source = cast_to(partial(compute, node), source, like.dtype)
    if value(source).shape != like.shape:
        source = compute(node, aten.expand.default, source, list(like.shape))
    if source.op == "placeholder" or source in node.all_input_nodes:
        source = compute(node, aten.clone.default, source)
    fit: fx.Node = source
    return fit


def _joined_pieces(emit: Compute, node: fx.Node) -> fx.Node | None:
    """A `cat` for a write of consecutive rows: autograd differentiates no scatter of complex numbers."""
    if not value(node).is_complex():
        return None
    x, source, dim, start, end, step = (*node.args, *(0, None, None, 1)[len(node.args) - 2 :])[:6]
    is_one, size = node.target is aten.select_scatter.default, value(x).shape[cast("int", dim)]
    if is_one:
        start = cast("int", start) % size
        end = start + 1
    start, end, step = slice(start, end, step).indices(size)
    if step != 1 or start >= end:
        return None
    rows = emit(aten.unsqueeze.default, source, dim) if is_one else source
    kept = [emit(aten.slice.Tensor, x, dim, *r) for r in ((0, start), (end, size))]
    return emit(aten.cat.default, [kept[0], rows, kept[1]], dim)


def _masked_put(emit: Compute, node: fx.Node) -> fx.Node | None:
    """A `where` for `x[mask] = row`, if the same row, or number, is written for every true element."""
    x, source, indices = _first(node), node.args[2], list(cast("list[Any]", node.args[1]))
    mask, *others = indices
    if others or not isinstance(mask, fx.Node) or value(mask).dtype is not torch.bool:
        return None
    dim, sizes = value(x).dim(), list(value(source).shape)
    while sizes and sizes[0] == 1:
        sizes.pop(0)
    if len(sizes) > dim - value(mask).dim() or (len(node.args) > 3 and node.args[3]):
        return None
    shape = [*value(mask).shape, *[1] * (dim - value(mask).dim())]
    wide = emit(aten.reshape.default, mask, shape)
    row = emit(aten.reshape.default, source, [*[1] * (dim - len(sizes)), *sizes])
    return emit(aten.where.self, wide, row, x)


def _second_operand(emit: Compute, node: fx.Node) -> fx.Node:
    return _fitted(node, node.args[1])


# `copy`, `fill`, `index_put` with a mask, and writes into complex tensors
COPIES: Mapping[Any, Rewrite] = {
    aten.copy.default: _second_operand,
    aten.fill.Tensor: _second_operand,
    aten.index_put.default: _masked_put,
    aten.slice_scatter.default: _joined_pieces,
    aten.select_scatter.default: _joined_pieces,
}


def _is_view(node: Any) -> bool:
    """Whether a node's value may share memory with an operand."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source, index = node.args
        returns = getattr(getattr(source, "target", None), "_schema", None)
        return returns is None or len(returns.returns) == 1 or returns.returns[index].alias_info is not None
    if str(node.target).startswith(("aten.to.", "aten.type_as")):
        return bool(value(_first(node)).dtype == value(node).dtype)
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns) and not schema.is_mutable


def _is_aliased(node: fx.Node) -> bool:
    """Whether an in-place operator has no functional twin, or changes a value that is seen under another name."""
    target = _first(node)
    if not isinstance(target, fx.Node) or _functional_twin(node) is None or _is_view(target):
        return True
    views = [u for u in target.users if u < node and _is_view(u)]
    while views:
        view = views.pop()
        if any(user > node for user in view.users):
            return True
        views += [u for u in view.users if _is_view(u)]
    return False
