"""The operators that look up an index, and the values that each index may hold.

An embedding reads a row, a gather reads an element, a loss by class reads a class. On one device torch refuses an index
outside of the table. A rank that holds a part of the table takes every index outside of its part for an index of
another rank. So an index that depends on the batch alone is compared with its table before a step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.capture.nodes import before_copies, closure, is_random, operator_name, output_nodes, positional, shape
from autopar.capture.value_range import ValueRange
from autopar.ir.program import CallSite, Program

_LOOKUPS_ALONG_A_DIM = frozenset(
    ["gather", "index_select", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy"]
)
_LOSSES_BY_CLASS = frozenset(["cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"])
_IGNORE_INDEX = 4  # the position of the argument in every loss by class
_MASKS = (torch.bool, torch.uint8)  # dtypes of an index that picks positions by truth


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Lookup:
    """An operator of a block call that looks up, and an index that depends on inputs and constants only."""

    call: int
    node: fx.Node
    index: fx.Node
    allowed: ValueRange
    inputs: tuple[str, ...]
    depth: int  # lookups that the index itself is computed with


@dataclass(frozen=True, slots=True)
class _Source:
    """What a value is computed of."""

    inputs: frozenset[str] = frozenset()
    depth: int = 0


def lookups(program: Program) -> tuple[Lookup, ...]:
    """The lookups whose index depends on inputs and constants only. Equal ones of one block count once."""
    sources = {info.name: _Source(frozenset({info.name})) for info in program.inputs}
    sources |= dict.fromkeys(program.constants.results, _Source())
    by_key: dict[object, Lookup] = {}
    for index, call in enumerate(program.calls):
        block = program.blocks[call.block]
        arguments = dict(zip(block.ports, call.arguments, strict=True))
        ports = {p: sources.get(a) if isinstance(a, str) else _Source() for p, a in arguments.items()}
        known = _known_values(block.graph, ports)
        for node in block.graph.nodes:
            for operand, allowed in indices(node, _table(program, call, node)):
                if operand not in known:
                    continue
                leaves = tuple(arguments[leaf.name] for leaf in closure([operand]) if leaf.op == "placeholder")
                names, depth = tuple(sorted(known[operand].inputs)), known[operand].depth
                lookup = Lookup(call=index, node=node, index=operand, allowed=allowed, inputs=names, depth=depth)
                by_key.setdefault((call.block, node, operand, leaves), lookup)
        results = zip(call.results, output_nodes(block.graph), strict=True)
        sources |= {result: known[node] for result, node in results if node in known}
    return tuple(by_key.values())


def _known_values(graph: fx.Graph, ports: Mapping[str, _Source | None]) -> dict[fx.Node, _Source]:
    """The values of a block that depend on inputs and constants only."""
    known: dict[fx.Node, _Source] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            source = ports[node.name]
            if source is not None:
                known[node] = source
        elif node.op == "call_function" and not is_random(node) and all(n in known for n in node.all_input_nodes):
            operands = [known[n] for n in node.all_input_nodes]
            depth = max((operand.depth for operand in operands), default=0) + bool(list(indices(node)))
            known[node] = _Source(frozenset().union(*(operand.inputs for operand in operands)), depth)
    return known


def _table(program: Program, call: CallSite, node: fx.Node) -> str:
    """The parameter that an operator looks up in, for messages."""
    operand = positional(node, 0)
    table = before_copies(operand) if isinstance(operand, fx.Node) else None
    if table is None or table.op != "placeholder":
        return "a table"
    argument = call.arguments[list(program.blocks[call.block].ports).index(table.name)]
    info = program.parameters.get(argument) if isinstance(argument, str) else None
    return "a table" if info is None else info.whole_name


def indices(node: fx.Node, table: str = "a table") -> Iterator[tuple[fx.Node, ValueRange]]:
    """The index operands of an operator that looks up, and the values that they may hold. Empty for other operators."""
    name = operator_name(node)
    if name in ("embedding", "embedding_bag"):
        yield from bounded(node, 1, 0, shape(node.args[0])[0], f"rows of {table}")
    elif name == "one_hot" and isinstance(positional(node, 1), int) and positional(node, 1) >= 0:
        yield from bounded(node, 0, 0, positional(node, 1), "classes")
    elif name in _LOSSES_BY_CLASS:
        target = positional(node, 1)
        if isinstance(target, fx.Node) and target.meta["info"].dtype.is_floating_point:
            return  # a probability for every class
        logits = shape(node.args[0])
        ignored = positional(node, _IGNORE_INDEX, -100)
        yield from bounded(node, 1, 0, logits[min(1, len(logits) - 1)], "classes", ignored)
    elif name in _LOOKUPS_ALONG_A_DIM or name == "index_fill":
        sizes, dim = shape(node.args[0]), node.args[1]
        assert isinstance(dim, int), node
        size = sizes[dim] if sizes else 1
        yield from bounded(node, 2, -size if name == "index_fill" else 0, size, "positions")
    elif name in ("index", "index_put") and mask_among_indices(node) is None:
        given = node.args[1]
        assert isinstance(given, (list, tuple)), node
        for size, index in zip(shape(node.args[0]), given, strict=False):
            if isinstance(index, fx.Node):
                yield index, _range(node, -size, size, "positions")


def bounded(
    node: fx.Node, position: int, low: int, high: int, what: str, ignored: int | None = None
) -> Iterator[tuple[fx.Node, ValueRange]]:
    """The operand at a position, and the values from `low` to `high` - 1. Empty if the operand is no tensor."""
    operand = positional(node, position)
    if isinstance(operand, fx.Node):
        yield operand, _range(node, low, high, what, ignored)


def _range(node: fx.Node, low: int, high: int, what: str, ignored: int | None = None) -> ValueRange:
    skipped = frozenset() if ignored is None else frozenset({ignored})
    where = node.meta.get("key", node.name)
    bound = f"{where} reads {low} to {high - 1} ({what})"
    return ValueRange(low=low, high=high, extra=skipped, ignored=skipped, bounded_by=(bound,))


def mask_among_indices(node: fx.Node) -> fx.Node | None:
    """The first mask among the indices of an `index` or `index_put`. None if there is no mask."""
    given = node.args[1]
    assert isinstance(given, (list, tuple)), node
    masks = [i for i in given if isinstance(i, fx.Node) and i.meta["info"].dtype in _MASKS]
    return masks[0] if masks else None
