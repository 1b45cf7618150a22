"""Random operators of generated code: each draws from the stream of the mesh dimensions that split its output.

Ranks that hold the same values then draw the same numbers, and ranks that hold different parts draw independent ones.
The runtime's streams are `autopar.runtime.codegen.randomness.RandomStream`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import argument, is_random
from autopar.ir.sharding import Dims, Mesh, Type
from autopar.lowering.communicator import RandomNumbers
from autopar.rules.families.random import DROPS

_SDPA = aten.scaled_dot_product_attention.default
OTHER_DROPS = DROPS - {aten.dropout.default, _SDPA}  # of whole channels, or with other noise than zeros


def dropout(x: torch.Tensor, probability: float, stream: RandomNumbers) -> torch.Tensor:
    """Zero elements with the given probability and scale the others; saves one byte an element for backward."""
    if not stream.training:
        return x
    if probability >= 1:
        return torch.zeros_like(x) * x
    return x * stream.keep_mask(x, probability) * (1 / (1 - probability))


def drawn(stream: RandomNumbers, operator: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """An operator that draws from torch's default generator, seeded from `stream`; fused kernels included."""
    return stream.run(operator, *args, **kwargs)


def drawn_in_training(
    stream: RandomNumbers, operator: Callable[..., torch.Tensor], x: torch.Tensor, probability: float, train: bool
) -> torch.Tensor:
    """Dropout of whole channels or with other noise, drawn from `stream`; the identity in evaluation."""
    return stream.run(operator, x, probability, train) if stream.training else x


def attention_with_dropout(stream: RandomNumbers, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`scaled_dot_product_attention` whose dropout draws from `stream`; without dropout in evaluation."""
    if stream.training:
        return stream.run(_SDPA, *args, **kwargs)
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)) | kwargs
    out: torch.Tensor = _SDPA(*args[:3], **{**named, "dropout_p": 0.0})
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A value that an operator draws: the operator's key, the axes of the whole value, and its type on the mesh."""

    key: str
    is_dropout: bool
    dims: Dims
    types: tuple[Type, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUse:
    """The mesh dimensions that split the values of a random stream, and these values in the order of their draws."""

    mesh_dims: tuple[str, ...]
    draws: tuple[Draw, ...]


def bind_streams(graph: fx.Graph, mesh: Mesh, dims: Mapping[str, Dims]) -> Mapping[str, StreamUse]:
    """Rewrite random operators in place. `dims` are the axes of the graph's values by name."""
    streams: dict[str, StreamUse] = {}
    attributes: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not draws(node):
            continue
        types = node.meta["types"]
        split = tuple(n for n, t in zip(mesh.names, types, strict=True) if t.kind == "S")
        name = "_".join(("random", *split))
        if name not in streams:
            first = next(n for n in graph.nodes if n.op != "placeholder")
            with graph.inserting_before(first):
                attributes[name] = graph.get_attr(name)
        draw = Draw(key=node.meta["key"], is_dropout=node.target in DROPS, dims=dims[node.name], types=types)
        before = streams[name].draws if name in streams else ()
        streams[name] = StreamUse(mesh_dims=split, draws=(*before, draw))
        if node.target is aten.dropout.default:
            node.args, node.target = (node.args[0], node.args[1], attributes[name]), dropout
        elif node.target is _SDPA:
            node.args, node.target = (attributes[name], *node.args), attention_with_dropout
        else:
            call = drawn_in_training if node.target in OTHER_DROPS else drawn
            node.args, node.target = (attributes[name], node.target, *node.args), call
    return streams


def draws(node: fx.Node) -> bool:
    """Whether a node of a captured graph draws random numbers."""
    if node.target is aten.dropout.default or node.target in OTHER_DROPS:
        return bool(node.args[2])
    if node.target is _SDPA:
        return bool(argument(node, "dropout_p") != 0)
    return is_random(node)
