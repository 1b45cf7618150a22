"""Constant subgraphs: what depends on no input and no parameter is taken out and evaluated once.

Masks are recognised by value at the small size of the second capture: a causal mask becomes ``is_causal=True``, so
that no rank ever holds a sequence × sequence tensor and flash kernels stay usable.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.trace.nodes import function

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default


def constant_nodes(graph: fx.Graph, kinds: Mapping[str, str]) -> list[fx.Node]:
    """Nodes that depend on buffers and literals alone, in graph order. `kinds` maps placeholder names to kinds."""
    constant: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            is_constant = kinds.get(node.name) in ("buffer", "lifted")
        else:
            computed = node.op == "get_attr" or (node.op == "call_function" and not is_random(node))
            is_constant = computed and all(n in constant for n in node.all_input_nodes)
        if is_constant:
            constant[node] = None
    return list(constant)


def is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def closure(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes and everything they depend on, in graph order."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return sorted(found)


def on_device(kwargs: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Arguments of a creating operator with its captured device replaced."""
    return {k: (device if k == "device" else v) for k, v in kwargs.items() if k != "pin_memory"}


def evaluate(wanted: fx.Node, leaf: Callable[[fx.Node], torch.Tensor], device: str = "cpu") -> torch.Tensor:
    """Value of a constant node on a device; `leaf` gives placeholders and attributes."""
    values: dict[fx.Node, Any] = {}
    for node in closure([wanted]):
        if node.op in ("placeholder", "get_attr"):
            values[node] = leaf(node)
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
            values[node] = function(node)(*args, **on_device(kwargs, device))
    result: torch.Tensor = values[wanted]
    return result


def is_causal_mask(mask: torch.Tensor) -> bool:
    """Whether a mask over (..., query, key) allows exactly the keys not after the query."""
    rows, columns = mask.shape[-2:]
    if rows != columns or rows < 2:
        return False
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((mask[~allowed] < -1e4).all()):
        return False
    triangle = torch.ones(rows, columns, dtype=torch.bool).tril()
    return bool((allowed == triangle).all())


def recognise_causal(graph: fx.Graph, small: fx.Graph, small_leaf: Callable[[fx.Node], torch.Tensor]) -> int:
    """Replace constant causal masks of attention by ``is_causal=True``; returns how many were replaced.

    `small` is the same graph captured at a small size. Masks that need a value that is not at hand stay.
    """
    twins = dict(zip(graph.nodes, small.nodes, strict=True))
    known: dict[fx.Node, bool] = {}
    replaced = 0
    for node in graph.nodes:
        mask = attention_mask(node)
        if mask is None or any(n.op == "placeholder" for n in closure([mask])):
            continue
        if mask not in known:
            known[mask] = is_causal_mask(evaluate(twins[mask], small_leaf))
        if known[mask]:
            dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
            rest = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
            node.args, node.kwargs = (*node.args[:3], None, dropout, True), rest
            replaced += 1
    return replaced


def attention_mask(node: fx.Node) -> fx.Node | None:
    """The mask operand of an attention node, None for other nodes and for attention without one."""
    if node.target is not SDPA:
        return None
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None


def merge_equal(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Common subexpressions among constant nodes become one: every layer asks for the same rotary table."""
    seen: dict[Any, fx.Node] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        key = (node.target, repr((node.args, sorted(node.kwargs.items()))))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
