"""Folding of a flat graph into distinct blocks and the calls of these blocks."""

import hashlib
import keyword
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from autopar.capture.nodes import operator_name
from autopar.ir.program import Block, CallSite, Role

INDEXED = re.compile(r"^(.*?)\.?(\d+)(?:\.|$)")
_NUMBER = re.compile(r"\.?(\d+)(?=\.|$)")


def module_path(node: fx.Node) -> str:
    """The path of the module whose forward made this node; "" for the model itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return "" if path == "model" else path.removeprefix("model.")


@dataclass(slots=True)
class Segment:
    """Consecutive nodes of one block instance, with the inputs and outputs of the instance."""

    path: str  # the numbered module, to which the names of operators are relative
    nodes: list[fx.Node]
    name: str = ""  # the path of another module
    externals: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)
    skeleton: str = ""


def repeated_prefixes(nodes: Sequence[fx.Node]) -> set[str]:
    """The prefixes, such as ``model.layers``, that have at least two numbered children."""
    children: dict[str, set[str]] = defaultdict(set)
    for path in {module_path(n) for n in nodes}:
        for prefix, index in _numbered(path):
            children[prefix].add(index)
    return {prefix for prefix, indices in children.items() if len(indices) > 1}


def _numbered(path: str) -> Iterator[tuple[str, str]]:
    """The prefixes of a path before each number, and these: ``h2.layers.0`` has ("h", "2"), ("h2.layers", "0")."""
    for match in _NUMBER.finditer(path):
        yield path[: match.start()], match.group(1)


def cut_into_segments(nodes: Sequence[fx.Node], parameters: Collection[fx.Node] | None) -> list[Segment]:
    """Segments of consecutive nodes of one outermost numbered module; without two with `parameters`, of any module."""
    prefixes = repeated_prefixes(nodes)

    def numbered(node: fx.Node) -> str:
        pairs = ((prefix, index) for prefix, index in _numbered(module_path(node)) if prefix in prefixes)
        return next((f"{prefix}.{index}" for prefix, index in pairs), "")

    segments = [Segment(path, list(group)) for path, group in groupby(nodes, numbered)]
    if parameters is None:
        return segments
    takes = partial(_takes, parameters)
    if sum(map(takes, segments)) > 1:
        return segments

    def rank(cut: Sequence[Segment]) -> tuple[bool, float]:
        return sum(map(takes, cut)) < 2, max(max((len(s.nodes) for s in cut), default=0), len(nodes) / 2)

    deepest = max((len(node.meta.get("nn_module_stack") or ()) for node in nodes), default=0)
    return min([segments, *(_cut_at_depth(nodes, parameters, n) for n in range(1, deepest))], key=rank)


def _takes(parameters: Collection[fx.Node], segment: Segment) -> bool:
    return any(operand in parameters for node in segment.nodes for operand in node.all_input_nodes)


def _cut_at_depth(nodes: Sequence[fx.Node], parameters: Collection[fx.Node], depth: int) -> list[Segment]:
    """A segment for every call of the modules of a depth. Nodes that take no parameters stay with those before them."""
    parts: list[Segment] = []
    for _, group in groupby(nodes, lambda node: list(node.meta.get("nn_module_stack") or ())[1 : depth + 1]):
        mine = list(group)
        segment = Segment("", mine, ".".join(module_path(mine[0]).split(".")[:depth]))
        if parts and not (_takes(parameters, segment) and _takes(parameters, parts[-1])):
            parts[-1].nodes += mine
        else:
            parts.append(segment)
    return parts


def describe(segment: Segment, role_of: Mapping[fx.Node, Role], used_later: set[fx.Node]) -> None:
    """Fill in the externals, outputs, floats and skeleton of a segment. Segments of one skeleton are one block."""
    inside = set(segment.nodes)
    operands = dict.fromkeys(operand for node in segment.nodes for operand in node.all_input_nodes)
    segment.externals = [operand for operand in operands if operand not in inside]
    segment.outputs = [
        n for n in segment.nodes if n in used_later or any(u not in inside and u.meta.get("main") for u in n.users)
    ]
    occurrences: Counter[str] = Counter()
    for node in segment.nodes:
        path = module_path(node).removeprefix(segment.path).lstrip(".") if segment.path else module_path(node)
        label = f"{path}:{operator_name(node)}" if path else operator_name(node)
        node.meta["key"] = f"{label}:{occurrences[label]}"
        occurrences[label] += 1
    ports = {node: role_of[node] for node in segment.externals}
    segment.skeleton = _text(ports, segment.nodes, segment.outputs, segment.floats)


def lifted_floats(segments: Sequence[Segment]) -> set[int]:
    """The positions of float literals that differ between otherwise equal segments."""
    first = segments[0].floats
    return {i for i, value in enumerate(first) for s in segments[1:] if repr(s.floats[i]) != repr(value)}


def build_block(
    segment: Segment, name: str, role_of: Mapping[fx.Node, Role], names: Mapping[fx.Node, str], lifted: set[int]
) -> Block:
    """The block of a segment: its own graph, with one placeholder per external value and per lifted scalar."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    ports: dict[str, Role] = {}
    taken: Counter[str] = Counter()
    for node in segment.externals:
        role = role_of[node]
        placeholder = graph.placeholder(_port_name(names[node], role, segment.path, taken))
        placeholder.target = placeholder.name  # the generated code begins with `name = target`, in the order of ports
        placeholder.meta["info"] = node.meta["info"]
        placeholder.meta["key"] = placeholder.name
        values[node] = placeholder
        ports[placeholder.name] = role
    scalars: dict[int, fx.Node] = {}
    for index in sorted(lifted):
        scalars[index] = graph.placeholder(f"scalar_{len(scalars)}")
        scalars[index].meta["key"] = scalars[index].name
        ports[scalars[index].name] = "scalar"
    position = iter(range(len(segment.floats)))

    def copy(value: Any) -> Any:
        if isinstance(value, float):
            return scalars.get(next(position), value)
        return values[value] if isinstance(value, fx.Node) else value

    for node in segment.nodes:
        args, kwargs = map_aggregate(node.args, copy), map_aggregate(node.kwargs, copy)
        values[node] = graph.create_node("call_function", node.target, args, kwargs, _node_name(node.meta["key"]))
        values[node].meta = {each: node.meta.get(each, 0) for each in ("info", "batch_power", "key")}
    outputs = tuple(values[n].name for n in segment.outputs)
    graph.output(tuple(values[n] for n in segment.outputs))
    signature = signature_of(graph, ports, outputs)
    return Block(name=name, graph=graph, ports=ports, outputs=outputs, signature=signature)


def signature_of(graph: fx.Graph, ports: Mapping[str, Role], outputs: Sequence[str]) -> str:
    """The hash of a block's computation: operators, literals, shapes, dtypes, and the roles of its ports."""
    return hashlib.sha256(block_text(graph, ports, outputs).encode()).hexdigest()


def block_text(graph: fx.Graph, ports: Mapping[str, Role], outputs: Sequence[str], *, with_floats: bool = True) -> str:
    """A block as text without names of values. Without floats, blocks with the same skeleton have the same text."""
    nodes = {node.name: node for node in graph.nodes}
    calls = [node for node in graph.nodes if node.op == "call_function"]
    roles = {nodes[name]: role for name, role in ports.items()}
    return _text(roles, calls, [nodes[name] for name in outputs], None if with_floats else [])


def _text(
    ports: Mapping[fx.Node, Role], calls: Iterable[fx.Node], outputs: Iterable[fx.Node], floats: list[float] | None
) -> str:
    """Calls as text. Literal floats stand in it, or go into `floats`; then ports of scalars are literals too."""
    values: dict[fx.Node, str] = {}
    lines: list[str] = []

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, float) and floats is not None:
            floats.append(value)
            return "<float>"
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(map(text, value)) + "]"
        return repr(value)

    def described(node: fx.Node) -> str:
        info = node.meta.get("info")
        return f"{tuple(info.shape)}:{info.dtype}:{info.differentiable}" if info is not None else ""

    for node, role in ports.items():
        values[node] = "<float>"
        if role != "scalar" or floats is None:
            values[node] = f"%{len(lines)}"
            lines.append(f"@{role}:{described(node)}")
    for node in calls:
        arguments = ",".join(map(text, node.args))
        named = ",".join(f"{k}={text(v)}" for k, v in node.kwargs.items() if k not in ("device", "pin_memory"))
        values[node] = f"%{len(lines)}"
        lines.append(f"{node.meta['key']}|{node.target}({arguments};{named})->{described(node)}")
    return "\n".join([*lines, ",".join(values[node] for node in outputs)])


def _node_name(key: str) -> str:
    *path, operator, _ = key.split(":")
    last = "".join(path).rsplit(".", 1)[-1]
    if operator in ("linear", "addmm", "embedding", "layer_norm") and last:
        return last if operator == "linear" or operator == "addmm" else f"{last}_out"
    return operator.strip("_")


def _port_name(name: str, role: Role, path: str, taken: Counter[str]) -> str:
    if role in ("parameter", "buffer"):
        name = name.removeprefix(path + ".") if path else name
    name = re.sub(r"\W", "_", {"value": "x", "constant": "constant"}.get(role, name))
    if name[:1].isdigit() or keyword.iskeyword(name):
        name = "_" + name
    taken[name] += 1
    return name if taken[name] == 1 else f"{name}_{taken[name] - 1}"


def fold(
    segments: Sequence[Segment], role_of: Mapping[fx.Node, Role], names: dict[fx.Node, str], used_later: set[fx.Node]
) -> tuple[tuple[Block, ...], tuple[CallSite, ...]]:
    """The distinct blocks and the calls, in order. `names` gets a name for every value that crosses segments."""
    groups: dict[str, list[Segment]] = defaultdict(list)
    for segment in segments:
        describe(segment, role_of, used_later)
        groups[segment.skeleton].append(segment)
    blocks: list[Block] = []
    index: dict[str, tuple[int, list[int]]] = {}
    calls: list[CallSite] = []
    seen: Counter[str] = Counter()
    for number, segment in enumerate(segments):
        at_ends = {len(segments) - 1: "epilogue", 0: "prologue"}
        path = segment.path or segment.name or at_ends.get(number, f"between_{number}")
        seen[path] += 1
        if seen[path] > 1:  # a module that is called again, with other modules between; paths name the results
            path = f"{path}#{seen[path]}"
        if segment.skeleton not in index:
            lifted = lifted_floats(groups[segment.skeleton])
            block = build_block(segment, path, role_of, names, lifted)
            index[segment.skeleton] = (len(blocks), sorted(lifted))
            blocks.append(block)
        which, positions = index[segment.skeleton]
        for k, node in enumerate(segment.outputs):
            names[node] = f"{path}/{k}"
        arguments: tuple[str | float | int, ...] = (
            *(names[n] for n in segment.externals),
            *(segment.floats[i] for i in positions),
        )
        results = tuple(names[n] for n in segment.outputs)
        calls.append(CallSite(block=which, path=path, arguments=arguments, results=results))
    return tuple(blocks), tuple(calls)
