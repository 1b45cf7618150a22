"""Random operators draw from the stream of the mesh dimensions that split their output."""

import torch
from torch import fx

from autopar.ir.sharding import Mesh
from autopar.runtime.randomness import attention_with_dropout, dropout

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
Streams = dict[str, tuple[str, ...]]


def bind_streams(graph: fx.Graph, mesh: Mesh) -> Streams:
    """Rewrite dropout in place; returns attribute name -> mesh dimensions of the streams that the graph reads."""
    streams: Streams = {}
    attributes: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        is_dropout = node.target is aten.dropout.default and node.args[2]
        if not is_dropout and not (node.target is SDPA and _probability(node)):
            continue
        types = node.meta["types"]
        split = tuple(n for n, t in zip(mesh.names, types, strict=True) if t.kind == "S")
        name = "_".join(("random", *split))
        if name not in streams:
            streams[name] = split
            first = next(n for n in graph.nodes if n.op != "placeholder")
            with graph.inserting_before(first):
                attributes[name] = graph.get_attr(name)
        if is_dropout:
            node.args = (node.args[0], node.args[1], attributes[name])
            node.target = dropout
        else:
            node.args = (attributes[name], *node.args)
            node.target = attention_with_dropout
    return streams


def _probability(node: fx.Node) -> float:
    value = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return float(value) if isinstance(value, (int, float)) else 1.0
