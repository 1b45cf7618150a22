"""The collectives of a block's local graph, with the bytes of the tensors that they work on."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from torch import fx

from autopar.capture.analysis import Analysis
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Block
from autopar.ir.sharding import Mesh, Type
from autopar.lowering.context_attention import causal_attention
from autopar.lowering.conversions import Collective
from autopar.lowering.experts import COUNT_BYTES, route_to_experts
from autopar.lowering.functions import conversion_of
from autopar.lowering.gather_linear import gather_linear, kept_gather_linear
from autopar.lowering.local_graph import local_graph
from autopar.lowering.loss_chunks import loss_in_chunks
from autopar.lowering.ring_attention import ring_attention
from autopar.lowering.vocabulary import vocab_parallel_cross_entropy_sum
from autopar.rules.variants import WIDTH_OF_SUMS, by_label, exchanges, variants

# bytes of a value with these types over the ranks of a mesh dimension, with as many bytes per element if given
_Whole = Callable[[str, Sequence[Type], str, int], float]


def collectives_of(
    analysis: Analysis,
    block: Block,
    index: int,
    labels: BlockLabels,
    mesh: Mesh,
    *,
    keep: Sequence[str] | None = None,
    regather: bool = False,
    loss_chunks: int = 1,
) -> Iterator[tuple[str, str, Collective, float]]:
    """Every collective of a block: mesh dimension, "forward" or "backward", kind, and bytes of the whole tensor."""
    infos = {node.name: node.meta["info"] for node in block.graph.nodes if "info" in node.meta}
    generated = local_graph(
        analysis, block, index, labels, mesh, keep=keep, regather=regather, fuse=True, loss_chunks=loss_chunks
    )

    def whole(value: str, types: Sequence[Type], dim: str, width: int) -> float:
        """The splits of other mesh dimensions do not change in the collective."""
        here, pairs = mesh.indices(dim), enumerate(zip(types, mesh.degrees, strict=True))
        others = prod(degree for i, (t, degree) in pairs if i not in here and t.kind == "S")
        return float(prod(infos[value].shape) * (width or infos[value].dtype.itemsize) / others)

    for node in generated.graph.nodes:
        conversion, value = conversion_of(node.target), node.meta.get("value", node.name)
        names = analysis.operands[index].get(value, ())
        if conversion is not None or node.target in (gather_linear, kept_gather_linear):
            yield from _of_conversion(node, whole)
        elif node.target is vocab_parallel_cross_entropy_sum:
            first: Any = node if node.meta["operand_types"] else node.args[0]  # classes may be moved behind the tokens
            dim, item = str(node.args[-1].target), infos[names[0]].dtype.itemsize
            size = whole(names[1], first.meta["operand_types"][1], dim, item)
            yield from ((dim, "forward", "all_reduce", count * size) for count in (1, 2))  # a maximum, and two sums
        elif node.target in (causal_attention, ring_attention):
            dim = str(node.args[-1].target)
            label = labels.labels[node.meta["key"]][mesh.indices(dim)[0]]
            bound, degree, values = analysis.bounds[index][value], mesh.degree_of(dim), (*names, value)
            types = (*node.meta["operand_types"], node.meta["types"])
            for sent in exchanges(bound.rule, by_label(variants(bound, degree), label)):
                least = WIDTH_OF_SUMS if sent.sums else 0
                widths = [max(infos[values[k]].dtype.itemsize, least) for k in sent.operands]
                each = (whole(values[k], types[k], dim, n) for k, n in zip(sent.operands, widths, strict=True))
                size = sum(each, start=0.0) / (2 if sent.is_half else 1)
                when = "forward" if sent.is_forward else "backward"
                yield from [(dim, when, sent.collective, size)] * (sent.per_rank * degree + sent.more)
        elif node.target is route_to_experts:
            order, chosen, _, mesh_dim = node.args
            dim, item = str(mesh_dim.target), infos[_source(chosen).meta["value"]].dtype.itemsize
            yield dim, "forward", "all_to_all", COUNT_BYTES * mesh.degree_of(dim) ** 2
            yield dim, "forward", "all_to_all", whole(order.meta["value"], order.meta["types"], dim, item)
        elif node.target is loss_in_chunks:
            yield from _of_loss_in_chunks(node, names[1], max(infos[names[0]].dtype.itemsize, 4), whole)


def _source(node: fx.Node) -> fx.Node:
    """The value of the captured block that a chain of conversions starts from."""
    while "differentiable" not in node.meta:
        source = node.args[0]
        assert isinstance(source, fx.Node), node
        node = source
    return node


def _of_conversion(node: fx.Node, whole: _Whole) -> Iterator[tuple[str, str, Collective, float]]:
    """A conversion, or a gather that is fused with products."""
    before: Any = node.args[0]
    mesh_dim: Any = node.args[1]
    conversion, source, dim = conversion_of(node.target), _source(node), str(mesh_dim.target)
    if conversion is None:
        passes: list[tuple[str, Collective | None]] = [("forward", "all_gather"), ("backward", "reduce_scatter")]
        passes += [("backward", "all_gather")] * (node.target is gather_linear)
    else:
        forward, backward = conversion.wire
        passes = [("forward", forward), ("backward", backward if source.meta["differentiable"] else None)]
    held = node.meta.get("types") or before.meta["types"]  # a fused gather has none, its input has
    size = whole(source.meta["value"], held, dim, 0)
    yield from ((dim, when, collective, size) for when, collective in passes if collective is not None)


def _of_loss_in_chunks(
    node: fx.Node, target: str, item: int, whole: _Whole
) -> Iterator[tuple[str, str, Collective, float]]:
    """The loss in chunks: of every chunk a maximum and two sums, and the gathers of its hidden states."""
    hidden: Any = node.args[0]
    chunks, vocabulary, gathered = (node.args[k] for k in (4, 8, 9))
    assert isinstance(chunks, int)
    if isinstance(vocabulary, fx.Node):
        dim = str(vocabulary.target)
        size = whole(target, node.meta["operand_types"][1], dim, item)
        yield from ((dim, "forward", "all_reduce", count * size / chunks) for count in (1, 2) * chunks)
    if isinstance(gathered, fx.Node):
        dim = str(gathered.target)
        part = whole(_source(hidden).meta["value"], hidden.meta["types"], dim, 0) / chunks
        kinds: list[tuple[str, Collective]] = [("forward", "all_gather"), ("backward", "all_gather")]
        kinds += [("backward", "reduce_scatter")]
        yield from ((dim, when, collective, part) for when, collective in kinds * chunks)
