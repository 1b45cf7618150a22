"""Errors planted into generated graphs. Each mutates a graph in place, keeps every shape, and still runs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from autopar.lowering import functions, vocabulary
from autopar.lowering.local_graph import LocalGraph

Mutation = Callable[[fx.Graph], None]
aten = torch.ops.aten

# the same shapes, another meaning: forward without its sum, with one too many, or with the other backward
CONFUSED: dict[Any, list[Any]] = {
    functions.invariant_to_replicate: [functions.all_reduce_to_replicate, functions.all_reduce_to_invariant],
    functions.all_reduce_to_invariant: [functions.all_reduce_to_replicate, functions.invariant_to_replicate],
    functions.all_reduce_to_replicate: [functions.all_reduce_to_invariant, functions.invariant_to_replicate],
    functions.reduce_scatter: [functions.shard_of_replicate, functions.shard_of_invariant],
    functions.all_gather_to_replicate: [functions.all_gather_to_invariant, functions.partial_of_shard],
    functions.all_gather_to_invariant: [functions.all_gather_to_replicate, functions.partial_of_shard],
    functions.shard_of_invariant: [functions.shard_of_replicate, functions.reduce_scatter],
    functions.shard_of_replicate: [functions.shard_of_invariant, functions.reduce_scatter],
    functions.partial_of_invariant: [functions.invariant_to_replicate],
    functions.partial_of_replicate: [functions.replicate_to_invariant],
    functions.replicate_to_invariant: [functions.invariant_to_replicate],
    functions.partial_of_shard: [],
}
BACKWARD_ONLY = {
    (functions.all_reduce_to_invariant, functions.all_reduce_to_replicate),
    (functions.all_reduce_to_replicate, functions.all_reduce_to_invariant),
    (functions.all_gather_to_replicate, functions.all_gather_to_invariant),
    (functions.all_gather_to_invariant, functions.all_gather_to_replicate),
    (functions.shard_of_invariant, functions.shard_of_replicate),
    (functions.shard_of_replicate, functions.shard_of_invariant),
}
KEEP_SHAPE = {
    functions.invariant_to_replicate,
    functions.all_reduce_to_invariant,
    functions.all_reduce_to_replicate,
    functions.partial_of_invariant,
    functions.partial_of_replicate,
    functions.replicate_to_invariant,
}
SUMS = {functions.all_reduce_to_invariant, functions.all_reduce_to_replicate}
GATHERS = {functions.all_gather_to_replicate, functions.all_gather_to_invariant}


def reversed_gather(x: torch.Tensor, mesh: Any, dim: int) -> torch.Tensor:
    """A gather that concatenates the ranks' parts in the wrong order."""
    whole = functions.all_gather_to_replicate(x, mesh, dim)
    return torch.cat(whole.chunk(mesh.degree, dim)[::-1], dim)


def reversed_scatter(x: torch.Tensor, mesh: Any, dim: int) -> torch.Tensor:
    """A reduce-scatter that hands the chunks out in the wrong order."""
    return functions.reduce_scatter(torch.cat(x.chunk(mesh.degree, dim)[::-1], dim), mesh, dim)


def shifted_embedding(weight: torch.Tensor, ids: torch.Tensor, padding_idx: int, mesh: Any) -> torch.Tensor:
    """A vocabulary-parallel look-up whose offset is one too large."""
    return vocabulary.vocab_parallel_embedding(weight, ids - 1, padding_idx, mesh)


def shifted_loss(
    logits: torch.Tensor, target: torch.Tensor, ignore: int, smoothing: float, classes: int, mesh: Any
) -> torch.Tensor:
    """A vocabulary-parallel loss whose offset is one too large."""
    target = torch.where(target == ignore, target, (target - 1).clamp(min=0))
    return vocabulary.vocab_parallel_cross_entropy_sum(logits, target, ignore, smoothing, classes, mesh)


# the type check does not know these functions: only one process can say what is wrong with them
UNTYPED = ("wrong concatenation", "wrong chunks", "wrong vocabulary offset")


def planted(generated: LocalGraph) -> Iterator[tuple[str, Mutation]]:
    """Every error that can be planted into a graph, as a description and what plants it."""
    for node in generated.graph.nodes:
        if node.op != "call_function":
            continue
        for what, mutate in _of(node):
            yield f"{node.name}: {what}", _at(node.name, mutate)


def _at(name: str, mutate: Callable[[fx.Graph, fx.Node], None]) -> Mutation:
    def apply(graph: fx.Graph) -> None:
        mutate(graph, next(n for n in graph.nodes if n.name == name))

    return apply


def _of(node: fx.Node) -> Iterator[tuple[str, Callable[[fx.Graph, fx.Node], None]]]:
    flows = _differentiable(node)
    for other in CONFUSED.get(node.target, []):
        if not flows and (node.target, other) in BACKWARD_ONLY:
            continue  # the same program
        yield f"{node.target.__name__} became {other.__name__}", _retarget(other)
    if node.target in KEEP_SHAPE:
        yield "dropped", _drop
    if node.target in SUMS:
        yield "doubled", _double
    if node.target in GATHERS:
        yield "wrong concatenation", _retarget(reversed_gather)
    if node.target is functions.reduce_scatter:
        yield "wrong chunks", _retarget(reversed_scatter)
    if node.target is vocabulary.vocab_parallel_embedding:
        yield "wrong vocabulary offset", _retarget(shifted_embedding)
    if node.target is vocabulary.vocab_parallel_cross_entropy_sum:
        yield "wrong vocabulary offset", _retarget(shifted_loss)
    if node.target is aten.slice.Tensor and node.args[1] in (2, -1) and node.args[2]:
        yield "wrong piece", _first_piece


def _differentiable(node: fx.Node) -> bool:
    while "differentiable" not in node.meta:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return bool(node.meta["differentiable"])


def _retarget(other: Any) -> Callable[[fx.Graph, fx.Node], None]:
    def apply(graph: fx.Graph, node: fx.Node) -> None:
        if other in CONFUSED:  # from a conversion with a dimension to one without, or back
            node.args = (*node.args, 0)[: 2 if other in KEEP_SHAPE else 3]
        node.target = other

    return apply


def _drop(graph: fx.Graph, node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def _double(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        again = graph.call_function(node.target, node.args)
    again.meta = dict(node.meta)
    node.replace_all_uses_with(again)
    again.args = (node, *node.args[1:])


def _first_piece(graph: fx.Graph, node: fx.Node) -> None:
    x, dim, start, end = node.args[:4]
    assert isinstance(start, int) and isinstance(end, int)
    node.args = (x, dim, 0, end - start)
