"""Whether two programs are the same in all that planning and running read, not only in their fingerprint."""

from dataclasses import fields
from typing import Any

from torch import fx

from autopar.ir.program import Program

GRAPHS = ("blocks", "constants")


def differences(one: Program, two: Program) -> list[str]:
    """Names of what differs; of a graph, the first node that does."""
    names = [field.name for field in fields(Program) if field.compare and field.name not in GRAPHS]
    found = [name for name in ("fingerprint", *names) if getattr(one, name) != getattr(two, name)]
    if len(one.blocks) != len(two.blocks):
        return [*found, f"{len(one.blocks)} and {len(two.blocks)} blocks"]
    for a, b in zip(one.blocks, two.blocks, strict=True):
        found += [f"{a.name}.{n}" for n in ("name", "ports", "outputs", "signature") if getattr(a, n) != getattr(b, n)]
        found += [f"{a.name}.dims"] if dict(a.dims) != dict(b.dims) else []
        found += _of_graphs(a.name, a.graph, b.graph)
    for name in ("buffers", "results"):
        found += [f"constants.{name}"] if getattr(one.constants, name) != getattr(two.constants, name) else []
    return found + _of_graphs("constants", one.constants.graph, two.constants.graph)


def _of_graphs(name: str, one: fx.Graph, two: fx.Graph) -> list[str]:
    a, b = [_text(node) for node in one.nodes], [_text(node) for node in two.nodes]
    if len(a) != len(b):
        return [f"{name}: {len(a)} and {len(b)} nodes"]
    return [f"{name}: {x} and {y}" for x, y in zip(a, b, strict=True) if x != y][:1]


def _text(node: fx.Node) -> tuple[Any, ...]:
    meta = node.meta
    return (
        node.op,
        node.name,
        str(node.target),
        repr(node.args),
        repr(dict(node.kwargs)),
        repr(meta.get("info")),
        meta.get("key", ""),
        meta.get("batch_power", 0),
        repr(meta.get("literal")),
    )
