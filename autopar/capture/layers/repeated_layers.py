"""The export of a deep model, written from an export of the same model with fewer layers.

`autopar.capture.layers.watched_layers` finds the layers that may be left out. The kept layers end with two equal
periods, and the layers left out repeat the last period. The nodes of a repeated layer are copies of the nodes of its
like layer. Operands from the like layer, or from the layer before it, become the copies' operands at the same distance.
Parameters and buffers become the state of the repeated layer. All other operands stay the same.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import fx

from autopar.capture.flat_graph import Flat
from autopar.capture.layers.blocks import INDEXED, module_path

_WRAPPED = "model."  # the path of the captured model in the exported module
Layer = tuple[str, int]  # the path of a stack and a layer's number in it
_NONE: Layer = ("", -1)  # of nodes in no layer
_Place = tuple[str, int, int | str]  # a layer, and the position of a node or the name of a state in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A stack of layers. `like[n]` is the number of a kept layer that layer n is equal to."""

    path: str
    like: tuple[int, ...]
    kept: int  # first layers that a capture with fewer layers has
    period: int  # the last ones of them, which repeat until the end of the stack


def with_all_layers(fewer: Flat, stacks: Sequence[Stack]) -> Flat | None:
    """The capture of a whole model, written from a normalised one with the kept layers. None if it fails."""
    repeating = _Repeating(fewer, stacks)
    return None if fewer.updates or not all(map(repeating.repeats, stacks)) else repeating.written()


class _Repeating:
    """The writing of one graph."""

    def __init__(self, fewer: Flat, stacks: Sequence[Stack]) -> None:
        self.fewer, self.stacks = fewer, {stack.path: stack for stack in stacks}
        self.graph = fx.Graph()
        self.layers: dict[Layer, list[fx.Node]] = defaultdict(list)
        self.place: dict[fx.Node, _Place] = {}
        self.new: dict[_Place, fx.Node] = {}
        self.placeholders: dict[str, tuple[str, str]] = {}
        for k, node in enumerate(fewer.graph.nodes):
            kind, name = fewer.placeholders.get(node.name, ("", ""))
            is_state = kind in ("parameter", "buffer")
            match = INDEXED.match(name if is_state else module_path(node) if node.op == "call_function" else "")
            path, n = (match.group(1), int(match.group(2))) if match else _NONE
            self.place[node] = (path, n, name[match.end() :] if match and is_state else k)
            if match and not is_state:
                self.place[node] = (path, n, len(self.layers[path, n]))
                self.layers[path, n].append(node)

    def repeats(self, stack: Stack) -> bool:
        """Whether the last two periods of a stack call the same operators."""
        last = range(stack.kept - stack.period, stack.kept)
        pairs = [[self.layers[stack.path, m] for m in (n, n - stack.period)] for n in last]
        return all(nodes and [n.target for n in nodes] == [n.target for n in before] for nodes, before in pairs)

    def written(self) -> Flat:
        last = {self.layers[path, stack.kept - 1][-1]: stack for path, stack in self.stacks.items()}
        nodes = self.fewer.graph.nodes
        self.write_placeholders([node for node in nodes if node.op == "placeholder"])
        for node in nodes:
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], lambda value: self.taken(value, _NONE)))
            elif node.op != "placeholder":
                self.write(node, self.place[node])
            if node in last:
                self.write_layers(last[node])
        return replace(self.fewer, graph=self.graph, placeholders=self.placeholders)

    def write_placeholders(self, nodes: Sequence[fx.Node]) -> None:
        """Write the placeholders, and those of repeated layers after those of one kind of the last kept layer."""
        groups: dict[tuple[str, Layer], list[fx.Node]] = {}
        kinds = self.fewer.placeholders
        for (kind, (path, n)), group in groupby(nodes, lambda x: (kinds.get(x.name, ("", ""))[0], self.place[x][:2])):
            groups[kind, (path, n)] = list(group)
            for node in groups[kind, (path, n)]:
                self.write(node, self.place[node])
            stack = self.stacks.get(path)
            for m in range(stack.kept, len(stack.like)) if stack is not None and n == stack.kept - 1 else ():
                for node in groups.get((kind, (path, self.stacks[path].like[m])), ()):
                    self.write(node, (path, m, self.place[node][2]))

    def write_layers(self, stack: Stack) -> None:
        """Write the layers that were left out."""
        for n in range(stack.kept, len(stack.like)):
            for k, node in enumerate(self.layers[stack.path, stack.like[n]]):
                self.write(node, (stack.path, n, k))

    def write(self, node: fx.Node, place: _Place) -> None:
        """Write a node at its own place, or at the same place of a layer that is like its own."""
        path, like, _ = self.place[node]
        ahead = place[1] - like
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: self.taken(value, (path, like), ahead))
        twin = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        twin.meta = dict(node.meta)
        if ahead and node.op == "call_function":
            old, new = f"{_WRAPPED}{path}.{like}", f"{_WRAPPED}{path}.{place[1]}"
            stack = node.meta["nn_module_stack"].items()
            twin.meta["nn_module_stack"] = {key: (_moved(at, old, new), kind) for key, (at, kind) in stack}
        kind, name = self.fewer.placeholders.get(node.name, ("", ""))
        if node.op == "placeholder":
            twin.target = twin.name
        if kind:
            self.placeholders[twin.name] = (kind, _moved(name, f"{path}.{like}", f"{path}.{place[1]}"))
        self.new[place] = twin

    def taken(self, value: fx.Node, layer: Layer, ahead: int = 0) -> fx.Node:
        """The written operand for `value` of a node in a kept `layer` or none, or of its copy `ahead` layers later."""
        path, n, k = self.place[value]
        if path == layer[0] and layer[1] - n in (0, 1):
            n += ahead
        elif path in self.stacks and path != layer[0] and n == self.stacks[path].kept - 1 and isinstance(k, int):
            n = len(self.stacks[path].like) - 1
        return self.new[path, n, k]


def _moved(path: str, old: str, new: str) -> Any:
    """A path inside of a layer, in another layer."""
    is_inside = path.startswith(old) and path[len(old) : len(old) + 1] in ("", ".")
    return new + path[len(old) :] if is_inside else path
