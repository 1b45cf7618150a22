"""Random operators of generated code: each draws from the stream of the mesh dimensions that split its output.

Ranks that hold the same values then draw the same numbers, and ranks that hold different parts draw independent ones.
The runtime's streams are `autopar.runtime.codegen.randomness.RandomStream`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.ir.sharding import Mesh
from autopar.lowering.communicator import RandomNumbers

_SDPA = aten.scaled_dot_product_attention.default
_DROPS = {aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default}


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return x * mask * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return grads[0] * mask * ctx.scale, None, None


def dropout(x: torch.Tensor, probability: float, stream: RandomNumbers) -> torch.Tensor:
    """Zero elements with the given probability and scale the others; saves one byte an element for backward."""
    if not stream.training:
        return x
    if probability >= 1:
        return torch.zeros_like(x) * x
    out: torch.Tensor = _Dropout.apply(x, stream.keep_mask(x, probability), 1 / (1 - probability))
    return out


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


def bind_streams(graph: fx.Graph, mesh: Mesh) -> Mapping[str, tuple[str, ...]]:
    """Rewrite random operators in place.

    Returns:
        The attributes of the streams that the graph reads, with the mesh dimensions of each stream.
    """
    streams: dict[str, tuple[str, ...]] = {}
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
            call = drawn_in_training if node.target in _DROPS else drawn
            node.args, node.target = (attributes[name], node.target, *node.args), call
    return streams


def _draws(node: fx.Node) -> bool:
    if node.target is aten.dropout.default or node.target in _DROPS:
        return bool(node.args[2])
    if node.target is _SDPA:
        probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(probability != 0)
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
