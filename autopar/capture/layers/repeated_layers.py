"""The export of a deep model, written from an export of the same model with fewer layers.

`autopar.capture.layers.watched_layers` finds the layers that may be left out. The kept layers end with two equal
periods, and the layers left out repeat the last period. The nodes of a repeated layer are copies of the nodes of its
like layer. Operands from the like layer, or from the layer before it, become the copies' operands at the same distance.
Parameters and buffers become the state of the repeated layer. All other operands stay the same.

The copies have the names that an export of the whole model gives. An export numbers names in the order of the nodes. So
the numbers of a name grow by the same count from one period to the next. If the two periods do not show this, nothing
is written.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar.capture.flat_graph import Flat
from autopar.capture.layers.blocks import INDEXED, module_path

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")
WRAPPED = "model."  # the path of the captured model in the exported module
Layer = tuple[str, int]  # the path of a stack and a layer's number in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A stack of layers. `like[n]` is the number of a kept layer that layer n is equal to."""

    path: str
    like: tuple[int, ...]
    kept: int  # first layers that a capture with fewer layers has
    period: int  # the last ones of them, which repeat until the end of the stack


class _Differs(Exception):
    """The graph of all layers cannot be written from the graph of fewer layers: they differ in more than layers."""


def with_all_layers(fewer: Flat, stacks: Sequence[Stack]) -> Flat | None:
    """The capture of a whole model, written from one with the kept layers; neither is normalised. None if it fails."""
    if fewer.updates:
        return None
    try:
        return _Repeating(fewer, stacks).written()
    except _Differs:
        return None


class _Repeating:
    """The writing of one graph."""

    def __init__(self, fewer: Flat, stacks: Sequence[Stack]) -> None:
        self.fewer = fewer
        self.stacks = {stack.path: stack for stack in stacks}
        self.layers = _nodes_of_layers(fewer.graph)
        self.place = {node: (*layer, k) for layer, nodes in self.layers.items() for k, node in enumerate(nodes)}
        self.grows = {path: self.growth(stack) for path, stack in self.stacks.items()}
        self.shift: dict[str, int] = {}
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.copies: dict[tuple[str, int, int], fx.Node] = {}  # by stack, layer and position
        self.placeholders: dict[str, tuple[str, str]] = {}
        self.state: dict[tuple[fx.Node, int], fx.Node] = {}  # placeholders of repeated layers

    def written(self) -> Flat:
        last = {self.layers[path, stack.kept - 1][-1]: stack for path, stack in self.stacks.items()}
        nodes = [node for node in self.fewer.graph.nodes if node.op == "placeholder"]
        for k, node in enumerate(nodes):
            self.placeholder(node, node.name, self.fewer.placeholders.get(node.name))
            self.state_of_copies(nodes[: k + 1], nodes[k + 1 :])
        for node in self.fewer.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], lambda value: self.taken(value, None)))
                continue
            path, n, _ = self.place.get(node, ("", 0, 0))
            layer = (path, n) if path in self.stacks else None
            self.new[node] = self.copy(node, layer, self.shifted(node.name))
            if node in last:
                self.repeat(last[node])
        return replace(self.fewer, graph=self.graph, placeholders=self.placeholders)

    def growth(self, stack: Stack) -> dict[str, int]:
        """The growth of each name's number from one period to the next."""
        steps: dict[str, int] = {}
        for n in range(stack.kept - stack.period, stack.kept):
            nodes, before = self.layers.get((stack.path, n), []), self.layers.get((stack.path, n - stack.period), [])
            _demand(len(nodes) == len(before) > 0)
            for node, other in zip(nodes, before, strict=True):
                _demand(self.same(node, other))
                (name, number), (base, first) = _numbered(node.name), _numbered(other.name)
                _demand(name == base and steps.setdefault(name, number - first) == number - first)
        return steps

    def same(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two nodes compute the same in their layers."""
        if (a.op, a.target, list(a.kwargs)) != (b.op, b.target, list(b.kwargs)) or a.op != "call_function":
            return False
        return self.text(a) == self.text(b)

    def text(self, node: fx.Node) -> str:
        path, n, _ = self.place[node]

        def text(value: Any) -> str:
            if isinstance(value, fx.Node):
                at, m, k = self.place.get(value, ("", 0, 0))
                if value in self.place and at == path and n - m in (0, 1):
                    return f"%{n - m} {k}"
                state = self.own_state(value, (path, n))
                return f"@{value.name}" if state is None else f"@own {state}"
            if isinstance(value, (list, tuple)):
                return f"{type(value).__name__}({','.join(map(text, value))})"
            return repr(value)

        return f"{text(node.args)}{text([*node.kwargs.values()])}"

    def own_state(self, node: fx.Node, layer: Layer) -> str | None:
        """The name of a parameter or buffer inside its layer. None for other nodes and for other layers' state."""
        kind, name = self.fewer.placeholders.get(node.name, ("", "")) if node.op == "placeholder" else ("", "")
        prefix = f"{layer[0]}.{layer[1]}."
        return name.removeprefix(prefix) if kind in ("parameter", "buffer") and name.startswith(prefix) else None

    def placeholder(self, node: fx.Node, name: str, known: tuple[str, str] | None) -> fx.Node:
        twin = self.graph.create_node("placeholder", name, node.args, name=name)
        twin.meta = dict(node.meta)
        _demand(twin.name == name)
        if known is not None:
            self.placeholders[name] = known
        self.new.setdefault(node, twin)
        return twin

    def state_of_copies(self, done: Sequence[fx.Node], rest: Sequence[fx.Node]) -> None:
        """Add the repeated layers' parameters after the last kept layer's parameters; likewise the buffers."""
        kind, _ = self.fewer.placeholders.get(done[-1].name, ("", ""))
        for stack in self.stacks.values():
            last = (stack.path, stack.kept - 1)
            if self.own_state(done[-1], last) is None or any(self.is_state(node, kind, last) for node in rest):
                continue
            for n in range(stack.kept, len(stack.like)):
                like = stack.path, stack.like[n]
                for node in [node for node in done if self.is_state(node, kind, like)]:
                    word = f"{stack.path.replace('.', '_')}_"
                    name = f"{stack.path}.{n}.{self.own_state(node, like)}"
                    _demand(node.name.count(f"{word}{like[1]}_") == 1)
                    renamed = node.name.replace(f"{word}{like[1]}_", f"{word}{n}_")
                    self.state[node, n] = self.placeholder(node, renamed, (kind, name))

    def is_state(self, node: fx.Node, kind: str, layer: Layer) -> bool:
        return self.fewer.placeholders.get(node.name, ("", ""))[0] == kind and self.own_state(node, layer) is not None

    def taken(self, value: fx.Node, layer: Layer | None, ahead: int = 0) -> fx.Node:
        """The written operand for `value` of a node in a kept `layer` or none, or of its copy `ahead` layers later."""
        path, n, k = self.place.get(value, ("", 0, 0))
        stack = self.stacks.get(path)
        if layer is not None and (value, layer[1] + ahead) in self.state:
            return self.state[value, layer[1] + ahead]
        if stack is not None and (layer is None or layer[0] != path):
            return self.at(path, len(stack.like) - 1 if n == stack.kept - 1 else n, k)
        if stack is not None and layer is not None and layer[1] - n in (0, 1):
            return self.at(path, n + ahead, k)
        return self.new[value]

    def at(self, path: str, n: int, k: int) -> fx.Node:
        """The written node at position `k` of a layer of the whole model."""
        return self.copies.get((path, n, k)) or self.new[self.layers[path, n][k]]

    def repeat(self, stack: Stack) -> None:
        """Write the layers that were left out."""
        path, grows = stack.path, self.grows[stack.path]
        for n in range(stack.kept, len(stack.like)):
            like = stack.like[n]
            for k, node in enumerate(self.layers[path, like]):
                base, number = _numbered(self.new[node].name)
                name = _name(base, number + (n - like) // stack.period * grows[base])
                twin = self.copy(node, (path, like), name, ahead=n - like)
                twin.meta["nn_module_stack"] = _moved(node.meta["nn_module_stack"], f"{path}.{like}", f"{path}.{n}")
                self.copies[path, n, k] = twin
        for base, count in grows.items():
            self.shift[base] = self.shift.get(base, 0) + (len(stack.like) - stack.kept) // stack.period * count

    def copy(self, node: fx.Node, layer: Layer | None, name: str, ahead: int = 0) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: self.taken(value, layer, ahead))
        twin = self.graph.create_node(node.op, node.target, args, kwargs, name=name)
        _demand(twin.name == name)
        twin.meta = dict(node.meta)
        return twin

    def shifted(self, name: str) -> str:
        base, number = _numbered(name)
        return _name(base, number + self.shift[base]) if base in self.shift else name


def _nodes_of_layers(graph: fx.Graph) -> dict[Layer, list[fx.Node]]:
    by_layer: dict[Layer, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        match = INDEXED.match(module_path(node)) if node.op == "call_function" else None
        if match is not None:
            by_layer[match.group(1), int(match.group(2))].append(node)
    return dict(by_layer)


def _demand(holds: bool) -> None:
    """Raise `_Differs` unless a condition holds."""
    if not holds:
        raise _Differs


def _moved(modules: Mapping[str, tuple[str, Any]], old: str, new: str) -> dict[str, tuple[str, Any]]:
    """A node's stack of modules, moved to another layer."""
    at, there = WRAPPED + old, WRAPPED + new
    return {
        key: (there + path.removeprefix(at) if path == at or path.startswith(f"{at}.") else path, kind)
        for key, (path, kind) in modules.items()
    }


def _numbered(name: str) -> tuple[str, int]:
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    return match.group(1), int(match.group(2) or 0)


def _name(base: str, number: int) -> str:
    return f"{base}_{number}" if number else base
