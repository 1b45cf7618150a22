"""Constant subgraphs: nodes that depend on no input and no parameter are taken out and evaluated once.

Masks are recognised by their values at the small size of the second capture. A causal mask becomes ``is_causal=True``.
Then no rank holds a sequence × sequence tensor, and flash kernels stay usable.

A mask's code may hold a number that takes effect only at the real size, such as the width of a sliding window. Such a
mask is also evaluated at its real size. If it is too large to evaluate, the mask stays.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.flat_graph import Flat, literal_of
from autopar.capture.nodes import closure, computed_from, function, is_random, numbers_of, replace_node, value

_SDPA = aten.scaled_dot_product_attention.default
Leaf = Callable[[fx.Node], Any]  # from a node to its tensor
_MAX_INDEX = 2**22  # elements of an index that is evaluated
MAX_EVALUATED = 8192**2  # elements of a mask that is evaluated at its real size


def constant_nodes(graph: fx.Graph, kinds: Mapping[str, str]) -> list[fx.Node]:
    """The nodes that depend on buffers and literals alone, in graph order. `kinds` maps placeholder names to kinds."""
    leaves = (n for n in graph.nodes if n.op == "get_attr" or kinds.get(n.name) in ("buffer", "lifted"))
    constant = set(leaves)
    computed_from(constant, graph.nodes)
    return [node for node in graph.nodes if node in constant]


def with_device(kwargs: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """The keyword arguments of a creating operator with another device."""
    return {k: (device if k == "device" else v) for k, v in kwargs.items() if k != "pin_memory"}


def constant_value(wanted: fx.Node, leaf: Leaf, device: str = "cpu") -> torch.Tensor:
    """The value of a constant node on a device. `leaf` gives the values of placeholders and attributes."""
    values: dict[fx.Node, Any] = {}
    for node in closure([wanted]):
        if node.op in ("placeholder", "get_attr"):
            values[node] = leaf(node)
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
            values[node] = function(node)(*args, **with_device(kwargs, device))
    result: torch.Tensor = values[wanted]
    return result


def constant_of(node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on no input, parameter, buffer or random number. None if it is too large."""
    nodes = closure([node])
    if any(n.op != "call_function" or is_random(n) or value(n).numel() > _MAX_INDEX for n in nodes):
        return None
    return constant_value(node, value)


def is_causal_mask(mask: torch.Tensor) -> bool:
    """Whether a mask over (..., query, key) allows exactly the keys up to the query's position."""
    rows, columns = mask.shape[-2:]
    if rows != columns or rows < 2:
        return False
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((mask[~allowed] < -1e4).all()):
        return False
    triangle = torch.ones(rows, columns, dtype=torch.bool).tril()
    return bool((allowed == triangle).all())


def recognise_causal(flat: Flat, small: Flat) -> frozenset[int]:
    """Replace constant causal masks of attention by ``is_causal=True`` in both graphs; the changed nodes' places."""
    twins = dict(zip(flat.graph.nodes, small.graph.nodes, strict=True))
    known: dict[fx.Node, bool] = {}
    causal: set[int] = set()
    for place, node in enumerate(flat.graph.nodes):
        mask = attention_mask(node)
        if mask is None or any(n.op == "placeholder" for n in closure([mask])):
            continue
        if mask not in known:
            known[mask] = is_causal_mask(constant_value(twins[mask], partial(literal_of, small))) and (
                not hides_a_threshold(mask, twins[mask]) or is_causal_at_full_size(mask, partial(literal_of, flat))
            )
        if known[mask]:
            causal.add(place)
    for each in (flat.graph, small.graph):
        make_causal(each, causal)
    return frozenset(causal)


def make_causal(graph: fx.Graph, places: Container[int]) -> None:
    """Give the attention nodes at these places ``is_causal=True`` instead of a mask."""
    for place, node in enumerate(graph.nodes):
        if place in places:
            dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
            rest = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
            node.args, node.kwargs = (*node.args[:3], None, dropout, True), rest


def hides_a_threshold(mask: fx.Node, twin: fx.Node) -> bool:
    """Whether a mask's code has a number, equal in both captures, that takes effect only beyond the small size."""
    large, small = _rows(mask), _rows(twin)
    pairs = zip(closure([mask]), closure([twin]), strict=True)
    numbers = ([numbers_of([n.args, *n.kwargs.values()]) for n in pair] for pair in pairs)
    return any(a == b and small - 1 <= abs(a) < large for two in numbers for a, b in zip(*two, strict=True))


def is_causal_at_full_size(mask: fx.Node, leaf: Leaf) -> bool:
    """Whether a mask is causal at its real size. False if it is too large to evaluate, or depends on a meta tensor."""
    leaves = [leaf(node) for node in closure([mask]) if node.op == "get_attr"]
    if _rows(mask) ** 2 > MAX_EVALUATED or any(tensor.is_meta for tensor in leaves):
        return False
    return is_causal_mask(constant_value(mask, leaf))


def _rows(mask: fx.Node) -> int:
    return int(mask.meta["info"].shape[-1])


def attention_mask(node: fx.Node) -> fx.Node | None:
    """The mask operand of an attention node. None for other nodes, and for attention without a mask."""
    if node.target is not _SDPA:
        return None
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None


def merge_equal(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Merge equal constant nodes into one node. For example, every layer computes the same rotary table."""
    seen: dict[Any, fx.Node] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        key = (node.target, repr((node.args, sorted(node.kwargs.items()))))
        first = seen.setdefault(key, node)
        if first is not node:
            replace_node(node, first)
