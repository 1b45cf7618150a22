"""The collectives of a block's local graph, with the bytes of the tensors that they work on."""

from collections.abc import Iterator, Sequence
from math import prod

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
    generated = local_graph(
        analysis, block, index, labels, mesh, keep=keep, regather=regather, fuse=True, loss_chunks=loss_chunks
    )
    for node in generated.graph.nodes:
        conversion = conversion_of(node.target)
        wires: tuple[tuple[str, Collective | None], ...] = ()
        if conversion is not None:
            forward, backward = conversion.wire
            wires = (("forward", forward), ("backward", backward if _source(node).meta["differentiable"] else None))
        elif node.target in (gather_linear, kept_gather_linear):
            wires = (("forward", "all_gather"), ("backward", "reduce_scatter"))
            wires += (("backward", "all_gather"),) if node.target is gather_linear else ()
        elif node.target is vocab_parallel_cross_entropy_sum:
            yield from _of_loss(node, analysis, index, mesh)
        elif node.target in (causal_attention, ring_attention):
            yield from _of_attention(node, analysis, index, mesh, labels)
        elif node.target is route_to_experts:
            yield from _of_route(node, analysis, index, mesh)
        elif node.target is loss_in_chunks:
            yield from _of_loss_in_chunks(node, analysis, index, mesh)
        for when, collective in wires:
            if collective is not None:
                yield str(node.args[1].target), when, collective, _whole_bytes(node, analysis, index, mesh)


def _source(node: fx.Node) -> fx.Node:
    """The value of the captured block that a chain of conversions starts from."""
    while "differentiable" not in node.meta:
        source = node.args[0]
        assert isinstance(source, fx.Node), node
        node = source
    return node


def _whole_bytes(node: fx.Node, analysis: Analysis, index: int, mesh: Mesh) -> float:
    """Bytes of a converted value before it is scattered or after it is gathered."""
    mesh_dim = node.args[1]
    assert isinstance(mesh_dim, fx.Node)
    source, here = _source(node), mesh.indices(str(mesh_dim.target))
    # the splits of other mesh dimensions do not change here; "types" of a fused gather are the types of its input
    held = node.meta.get("types") or _typed(node)
    dims = analysis.dims[index][source.meta["value"]]
    return prod(dims.shape) * _item_bytes(source, analysis, index) / _split_by_others(held, mesh, here)


def _split_by_others(types: Sequence[Type], mesh: Mesh, here: Sequence[int]) -> int:
    """The factor by which the other mesh dimensions, outside a collective, divide a value."""
    pairs = enumerate(zip(types, mesh.degrees, strict=True))
    return prod(degree for i, (t, degree) in pairs if i not in here and t.kind == "S")


def _typed(node: fx.Node) -> tuple[Type, ...]:
    source = node.args[0]
    assert isinstance(source, fx.Node), node
    types: tuple[Type, ...] = source.meta["types"]
    return types


def _item_bytes(source: fx.Node, analysis: Analysis, index: int) -> int:
    value: str = source.meta["value"]
    for call, names in zip(analysis.calls[index].values(), analysis.operands[index].values(), strict=True):
        if value in names:
            return int(call.operands[names.index(value)].dtype.itemsize)
    made_by = analysis.calls[index].get(value)
    return int(made_by.output.dtype.itemsize) if made_by is not None else 4


def _of_loss(node: fx.Node, analysis: Analysis, index: int, mesh: Mesh) -> Iterator[tuple[str, str, Collective, float]]:
    """The vocabulary-parallel loss: a maximum, and a sum of two numbers per token (`autopar.lowering.vocabulary`)."""
    dim = str(node.args[-1].target) if isinstance(node.args[-1], fx.Node) else ""
    first = node if node.meta["operand_types"] else node.args[0]  # before it, classes may be moved behind the tokens
    assert isinstance(first, fx.Node)
    logits, target = analysis.calls[index][node.name].operands[:2]
    types: tuple[Type, ...] = first.meta["operand_types"][1]
    tokens = prod(target.shape) * logits.dtype.itemsize / _split_by_others(types, mesh, mesh.indices(dim))
    for count in (1, 2):
        yield dim, "forward", "all_reduce", count * tokens


def _of_attention(
    node: fx.Node, analysis: Analysis, index: int, mesh: Mesh, labels: BlockLabels
) -> Iterator[tuple[str, str, Collective, float]]:
    """The messages between ranks that share a sequence (`autopar.rules.variants.exchanges`)."""
    assert isinstance(node.args[-1], fx.Node)
    dim, value = str(node.args[-1].target), node.meta["value"]
    call, bound, here = analysis.calls[index][value], analysis.bounds[index][value], mesh.indices(dim)
    degree, label = mesh.degree_of(dim), labels.labels[node.meta["key"]][here[0]]
    infos, types = (*call.operands, call.output), (*node.meta["operand_types"], node.meta["types"])
    for sent in exchanges(bound.rule, by_label(variants(bound, degree), label)):
        whole = 0.0
        for k in sent.operands:
            item = max(infos[k].dtype.itemsize, WIDTH_OF_SUMS if sent.sums else 0)
            whole += prod(infos[k].shape) * item / _split_by_others(types[k], mesh, here)
        for _ in range(sent.per_rank * degree + sent.more):
            yield dim, "forward" if sent.is_forward else "backward", sent.collective, whole / (2 if sent.is_half else 1)


def _of_route(
    node: fx.Node, analysis: Analysis, index: int, mesh: Mesh
) -> Iterator[tuple[str, str, Collective, float]]:
    """The counts of rows for every rank, and the experts of rows (`autopar.lowering.experts`)."""
    order, chosen, _, mesh_dim = node.args
    assert isinstance(order, fx.Node) and isinstance(chosen, fx.Node) and isinstance(mesh_dim, fx.Node)
    dim = str(mesh_dim.target)
    degree, item = mesh.degree_of(dim), _item_bytes(_source(chosen), analysis, index)
    rows = prod(analysis.dims[index][order.meta["value"]].shape)
    yield dim, "forward", "all_to_all", COUNT_BYTES * degree**2
    yield dim, "forward", "all_to_all", rows * item / _split_by_others(order.meta["types"], mesh, mesh.indices(dim))


def _of_loss_in_chunks(
    node: fx.Node, analysis: Analysis, index: int, mesh: Mesh
) -> Iterator[tuple[str, str, Collective, float]]:
    """The loss in chunks: of every chunk what `_of_loss` sends, and the gathers of its hidden states."""
    _, target, _, _, chunks, _, _, _, vocabulary, gathered, _ = node.args
    assert isinstance(target, fx.Node) and isinstance(chunks, int)
    types: tuple[Type, ...] = node.meta["operand_types"][1]
    call = analysis.calls[index][node.meta["value"]]
    if isinstance(vocabulary, fx.Node):
        dim = str(vocabulary.target)
        others = _split_by_others(types, mesh, mesh.indices(dim))
        size = prod(call.operands[1].shape) * max(call.operands[0].dtype.itemsize, 4) / others
        for count in (1, 2) * chunks:
            yield dim, "forward", "all_reduce", count * size / chunks
    if isinstance(gathered, fx.Node):
        hidden = node.args[0]
        assert isinstance(hidden, fx.Node)
        held: tuple[Type, ...] = hidden.meta["types"]
        source, others = _source(hidden), _split_by_others(held, mesh, mesh.indices(str(gathered.target)))
        elements = prod(analysis.dims[index][source.meta["value"]].shape)
        whole = elements * _item_bytes(source, analysis, index) / others
        for _ in range(chunks):
            yield str(gathered.target), "forward", "all_gather", whole / chunks
            yield str(gathered.target), "backward", "all_gather", whole / chunks
            yield str(gathered.target), "backward", "reduce_scatter", whole / chunks
