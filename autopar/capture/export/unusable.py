"""Values of an exported graph that no rank could hold: sparse tensors, and tensors whose sizes depend on data."""

import operator
import re
from collections.abc import Callable, Iterator

import torch
from torch import fx

from autopar.errors import CaptureError

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_DENSE = (
    "autopar splits dense tensors; hold its indices and values as two dense tensors and use index_select and "
    "index_add, or make it dense with .to_dense()"
)
_KINDS = {"lifted": "constant"}
_FIXED = "use a mask with torch.where, or a fixed number of elements as torch.topk gives"


def refuse_unusable(
    graph: fx.Graph, placeholders: dict[str, tuple[str, str]], with_lines: Callable[[], fx.Graph]
) -> None:
    """Raise `CaptureError` for the first value that no rank could hold. It names the operator, module and line."""
    node, what, remedy = next(_found(graph), (None, "", ""))
    if node is None:
        return
    if node.op != "call_function":
        kind, name = placeholders.get(node.name, ("tensor", str(node.target)))
        raise CaptureError(f"the {_KINDS.get(kind, kind)} {name.removeprefix('model.')!r} {what}; {remedy}")
    line = next((line_of(other) for other in with_lines().nodes if other.name == node.name), "")
    maker = node.args[0] if node.target is operator.getitem else node
    target = maker.target if isinstance(maker, fx.Node) else node.target
    raise CaptureError(f"operator {target}{f' ({line})' if line else ''} {what}; {remedy}")


def _found(graph: fx.Graph) -> Iterator[tuple[fx.Node, str, str]]:
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not (node.users or node.op == "call_function"):
            continue
        if value.layout is not torch.strided:
            yield node, f"{'is' if node.op != 'call_function' else 'returns'} a {_name(value.layout)} tensor", _DENSE
        elif any(not isinstance(size, int) for size in value.shape):
            yield node, "returns a tensor whose size depends on the values of its operands", _FIXED


def _name(layout: torch.layout) -> str:
    return str(layout).removeprefix("torch.").removeprefix("_")


def line_of(node: fx.Node) -> str:
    """The deepest line outside of torch that made a node of an export with stack traces: ``net.py:12``."""
    lines = [m for m in _FRAME.finditer(node.meta.get("stack_trace") or "") if "/torch/" not in m["file"]]
    return f"{lines[-1]['file']}:{lines[-1]['line']}" if lines else ""
