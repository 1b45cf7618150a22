"""One rank's graph of a block under its labels, every collective visible.

The graph calls operators of ATen and the functions of this package: conversions, rewrites and random operators. The
runtime and the cost model run the same graph (`autopar.lowering.communicator`), so the priced graph is the executed
graph. `autopar.lowering.graph_writer` writes its operators.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.analysis import Analysis
from autopar.capture.nodes import arg, argument, closure, output_nodes
from autopar.errors import PlanError
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Block
from autopar.ir.sharding import Mesh
from autopar.lowering.functions import all_gather_to_replicate
from autopar.lowering.gather_linear import gather_linear, kept_gather_linear
from autopar.lowering.graph_writer import REWRITES, GraphWriter, Types, sorted_rows
from autopar.lowering.loss_chunks import loss_in_chunks
from autopar.lowering.loss_region import LossRegion, chain_steps, region_of_block
from autopar.lowering.randomness import StreamUse, bind_streams
from autopar.rules.variants import Bound, Variant, by_label, rewrites_fit, variants

_LINEAR = torch.ops.aten.linear.default


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalGraph:
    """The generated graph of a block, the values it reads from its module, and the types of its ports and results."""

    graph: fx.Graph
    mesh_dims: tuple[str, ...]  # attributes: the mesh dimensions that it sends over
    streams: Mapping[str, StreamUse]  # attributes: random streams
    ports: Mapping[str, Types]
    results: Mapping[str, Types]
    operands: Mapping[tuple[str, str], fx.Node]  # before gathers are fused, by names of captured operator and operand


def _chosen_variants(bound: Bound, labels: Sequence[str], mesh: Mesh, where: str) -> list[Variant]:
    """The variant of every mesh dimension. Raises `PlanError` where a label is not legal."""
    chosen = []
    for name, degree, label in zip(mesh.names, mesh.degrees, labels, strict=True):
        try:
            chosen.append(by_label(variants(bound, degree), label))
        except KeyError as error:
            raise PlanError(f"{where}, mesh dimension {name}: {error.args[0]}") from error
    if not rewrites_fit(bound, chosen, mesh.degrees):
        raise PlanError(f"{where}: no rewrite for {tuple(labels)}; plan again")
    return chosen


def local_graph(
    analysis: Analysis,
    block: Block,
    index: int,
    labels: BlockLabels,
    mesh: Mesh,
    *,
    device: str = "cpu",
    keep: Sequence[str] | None = None,
    regather: bool = False,
    fuse: bool = False,
    join: bool = True,
    loss_chunks: int = 1,
) -> LocalGraph:
    """One rank's graph of a block. `functions` implement the names in `NAMES`; `keep` names the wanted outputs
    (default: all).

    `join` makes equal conversions on two neighbouring mesh dimensions one. With `fuse` a gather that feeds matrix
    products is fused with them (`fuse_gathers`), with `regather` too, and gathers again in backward. `loss_chunks` is
    the number of chunks of tokens in which the head's product and the loss run, if the block has them (`chunk_loss`).
    """
    writer = GraphWriter(block, mesh, analysis.dims[index], sorted_rows(analysis, index), device, join)
    flows = block.differentiable_ports
    for port in block.ports:
        node = writer.graph.placeholder(port)
        writer.define(port, node, tuple(labels.ports.get(port, ())), port in flows)
    kept = [n for n in output_nodes(block.graph) if keep is None or n.name in keep]
    needed = {node.name for node in closure(kept)}
    for node in block.graph.nodes:
        if node.op != "call_function" or node.name not in needed:
            continue
        bound = analysis.bounds[index][node.name]
        key = node.meta["key"]
        if key not in labels.labels:
            raise PlanError(f"block {block.name}: the plan has no label for {key}; plan again")
        chosen = _chosen_variants(bound, labels.labels[key], mesh, f"block {block.name}, operator {key}")
        call = analysis.calls[index][node.name]
        writer.operator(node, bound, call, analysis.operands[index][node.name], chosen)
    outputs = [name for name in block.outputs if keep is None or name in keep]
    writer.graph.output(tuple(writer.use(name, labels.results[name]) for name in outputs))
    region = region_of_block(analysis, block, index, labels, mesh, outputs) if loss_chunks > 1 else ""
    if isinstance(region, LossRegion):
        chunk_loss(writer, region, loss_chunks)
    if regather or fuse:
        fuse_gathers(writer.graph, gather_linear if regather else kept_gather_linear)
    streams = bind_streams(writer.graph, mesh, writer.dims)
    writer.graph.lint()
    return LocalGraph(
        graph=writer.graph,
        mesh_dims=tuple(writer.attributes),
        streams=streams,
        ports=dict(labels.ports),
        results={name: labels.results[name] for name in outputs},
        operands=writer.operands,
    )


def chunk_loss(writer: GraphWriter, region: LossRegion, chunks: int) -> None:
    """Replace the head's product and the loss by one function that runs them in chunks."""
    nodes = {node.name: node for node in writer.block.graph.nodes}
    linear, loss = writer.values[region.linear], writer.values[region.loss]
    erased = [writer.values[name] for name in (region.loss, *reversed(region.between), region.linear)]
    hidden, gathered, dim = arg(linear, 0), None, 0
    if hidden.target is all_gather_to_replicate and set(hidden.users) == {linear}:
        erased.append(hidden)
        hidden, gathered, dim = hidden.args  # type: ignore[assignment]
    weight, bias = (*linear.args[1:], None)[:2]
    target, vocabulary, classes = loss.args[1], None, nodes[region.linear].meta["info"].shape[-1]
    if loss.target is REWRITES["vocab_parallel_cross_entropy_sum"]:
        ignore, vocabulary = loss.args[2], loss.args[5]
    else:
        ignore = argument(loss, "ignore_index")
    chain = tuple(chain_steps(nodes[name] for name in region.between))
    with writer.graph.inserting_before(loss):
        made = writer.graph.call_function(
            loss_in_chunks,
            (hidden, target, weight, bias, chunks, chain, ignore, classes, vocabulary, gathered, dim),
            name="loss_sum",
        )
    made.meta = dict(loss.meta) | {"operand_types": (hidden.meta["types"], loss.meta["operand_types"][1])}
    loss.replace_all_uses_with(made)
    for node in erased:
        writer.graph.erase_node(node)
    writer.values[region.loss] = made


def fuse_gathers(graph: fx.Graph, fused_function: Callable[..., Any]) -> None:
    """Replace every gather all of whose uses are the input of `linear` by `fused_function`, in place."""
    for gather in list(graph.nodes):
        if gather.target is not all_gather_to_replicate or not gather.users:
            continue
        users = list(gather.users)
        if not all(u.target is _LINEAR and u.args[0] is gather and gather not in u.args[1:] for u in users):
            continue
        pairs = [a for u in users for a in (u.args[1], u.args[2] if len(u.args) > 2 else None)]
        if any(isinstance(a, fx.Node) and a > min(users) for a in pairs):
            continue
        if any(operand in users for user in users for operand in user.all_input_nodes):
            continue  # a product of the gather feeds another one
        with graph.inserting_before(min(users)):
            fused = graph.call_function(fused_function, (*gather.args, *pairs), name="gathered")
            pieces = [graph.call_function(operator.getitem, (fused, k), name=u.name) for k, u in enumerate(users)]
        for user, piece in zip(users, pieces, strict=True):
            piece.meta = dict(user.meta)
            user.replace_all_uses_with(piece)
            graph.erase_node(user)
        graph.erase_node(gather)
