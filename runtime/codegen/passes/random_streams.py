"""Random operators draw from the stream of the mesh dimensions that split their output."""

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.ir.sharding import Mesh
from autopar.runtime.codegen.randomness import attention_with_dropout, drawn, dropout

_SDPA = aten.scaled_dot_product_attention.default
_Streams = dict[str, tuple[str, ...]]


def bind_streams(graph: fx.Graph, mesh: Mesh) -> _Streams:
    """Rewrite random operators in place; returns attribute name -> mesh dimensions of the streams the graph reads."""
    streams: _Streams = {}
    attributes: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _draws(node):
            continue
        types = node.meta["types"]
        split = tuple(n for n, t in zip(mesh.names, types, strict=True) if t.kind == "S")
        name = "_".join(("random", *split))
        if name not in streams:
            streams[name] = split
            first = next(n for n in graph.nodes if n.op != "placeholder")
            with graph.inserting_before(first):
                attributes[name] = graph.get_attr(name)
        if node.target is aten.dropout.default:
            node.args, node.target = (node.args[0], node.args[1], attributes[name]), dropout
        elif node.target is _SDPA:
            node.args, node.target = (attributes[name], *node.args), attention_with_dropout
        else:
            node.args, node.target = (attributes[name], node.target, *node.args), drawn
    return streams


def _draws(node: fx.Node) -> bool:
    if node.target is aten.dropout.default:
        return bool(node.args[2])
    if node.target is _SDPA:
        probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(probability != 0)
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
