"""The second capture of a deep model, made with few of its layers: each distinct layer is captured once.

A stack is a module whose children are layers, numbered from 0. Two layers of a stack compute the same at all sizes if
they meet two conditions. Their operators, literals and shapes are equal in the first capture. Their modules have one
class and equal attributes, except for the layer's number.

The second capture is at other sizes. It shows which numbers of the graph depend on sizes. It runs without the last
layers of each stack, and keeps the first layer of each kind. `_Writing` then writes the graph of all layers, with the
structure of the first capture and the numbers of the second.

A capture with few layers at the first sizes comes before, as a check: the graph written from it must equal the first
capture. If any check fails, the whole model must be captured.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.flat_graph import Flat
from autopar.capture.layers.blocks import INDEXED, module_path
from autopar.errors import CaptureError

Layer = tuple[str, int]  # the path of a stack and a layer's number in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A stack of layers. `like[n]` is the number of a layer that layer n is equal to."""

    path: str
    like: tuple[int, ...]
    kept: int  # first layers that a capture with fewer layers has
    period: int = 0  # the last ones of them, which repeat until the end of the stack; 0 if none do


class Differs(Exception):
    """The graph of all layers cannot be written from the graph of fewer layers: they differ in more than layers."""


def repeated_layers(model: nn.Module, flat: Flat) -> tuple[Stack, ...]:
    """The stacks of a captured model that need less than half of their layers: fewer are captured twice."""
    layers, modules = nodes_of_layers(flat.graph), dict(model.named_modules())
    result = []
    for path in dict.fromkeys(stack for stack, _ in layers):
        children = modules[path]._modules if path in modules else {}  # the number in a name such as conv1 is no layer
        names = [str(n) for n in range(len(children))]
        if list(children) != names or any((path, n) not in layers for n in range(len(children))):
            continue
        texts = [_text(layers[path, n], f"{path}.{n}" if path else name) for n, name in enumerate(names)]
        like: list[int] = []
        for n, name in enumerate(names):
            firsts = (m for m in dict.fromkeys(like) if texts[m] == texts[n])
            like.append(next((m for m in firsts if same_settings(children[names[m]], children[name], (m, n))), n))
        kept = max(like, default=0) + 1
        if 2 * kept < len(like):
            result.append(Stack(path=path, like=tuple(like), kept=kept))
    return tuple(result)


@contextlib.contextmanager
def without_layers(model: nn.Module, stacks: Sequence[Stack]) -> Iterator[None]:
    """The model without the last layers of its stacks. The context restores them at its end."""
    whole = {stack.path: dict(model.get_submodule(stack.path)._modules) for stack in stacks}
    try:
        for stack in stacks:
            modules = model.get_submodule(stack.path)._modules
            for n in range(stack.kept, len(stack.like)):
                del modules[str(n)]
        yield
    finally:
        for path, modules in whole.items():
            model.get_submodule(path)._modules.update(modules)


def layers_to_take_out(model: nn.Module, flat: Flat, captured: Callable[[], Flat]) -> tuple[Stack, ...]:
    """The stacks that need fewer layers. `captured` captures the model with its present layers, as `flat` was."""
    stacks = repeated_layers(model, flat)
    fewer = with_fewer_layers(model, flat, stacks, captured)
    if fewer is None or _text([*fewer.graph.nodes], "") != _text([*flat.graph.nodes], ""):
        return ()
    return stacks


def with_fewer_layers(
    model: nn.Module, flat: Flat, stacks: Sequence[Stack], captured: Callable[[], Flat]
) -> Flat | None:
    """The capture of the whole model, written from one with fewer layers that `captured` makes. None if this fails."""
    if not stacks:
        return None
    with contextlib.suppress(CaptureError, Differs), without_layers(model, stacks):
        return _Writing(flat, captured(), stacks).written()
    return None


def nodes_of_layers(graph: fx.Graph) -> dict[Layer, list[fx.Node]]:
    by_layer: dict[Layer, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        match = INDEXED.match(module_path(node)) if node.op == "call_function" else None
        if match is not None:
            by_layer[match.group(1), int(match.group(2))].append(node)
    return dict(by_layer)


def _text(nodes: Sequence[fx.Node], path: str) -> str:
    """A layer's computation as text. A value from outside the layer appears as its shape and dtype alone."""
    inside = {node: f"%{index}" for index, node in enumerate(nodes)}

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return inside.get(value, f"@{value.meta.get('info')!r}")
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}({','.join(map(text, value))})"
        return repr(value)

    return "\n".join(
        f"{module_path(n).removeprefix(path)}|{n.target}({text(n.args)};{list(n.kwargs)}{text([*n.kwargs.values()])})"
        f"->{n.meta.get('info')!r}"
        for n in nodes
    )


def same_settings(a: Any, b: Any, numbers: tuple[int, int]) -> bool:
    """Whether attributes of layers with these numbers are equal. An integer may be the layer's number, or one more."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is int:
        return a == b or (a - numbers[0] == b - numbers[1] and a - numbers[0] in (0, 1))
    if isinstance(a, torch.Tensor):
        return (a.shape, a.dtype, a.requires_grad, a.device) == (b.shape, b.dtype, b.requires_grad, b.device)
    if isinstance(a, nn.Module):
        return same_settings(vars(a), vars(b), numbers)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same_settings(a[key], b[key], numbers) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_settings(x, y, numbers) for x, y in zip(a, b, strict=True))
    if isinstance(a, functools.partial):
        return same_settings((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), numbers)
    return isinstance(a, (str, float, complex, bytes, set, frozenset, torch.dtype, torch.device)) and a == b


class _Writing:
    """The writing of one graph. `twin` maps a node of `flat` ("ours") to its equal in `fewer` ("theirs")."""

    def __init__(self, flat: Flat, fewer: Flat, stacks: Sequence[Stack]) -> None:
        self.flat, self.fewer = flat, fewer
        self.stacks = {stack.path: stack for stack in stacks}
        self.layers = nodes_of_layers(flat.graph)
        self.layer = {node: layer for layer, nodes in self.layers.items() for node in nodes}
        self.position = {node: index for nodes in self.layers.values() for index, node in enumerate(nodes)}
        self.twin: dict[fx.Node, fx.Node] = {}
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}

    def written(self) -> Flat:
        self.pair_placeholders()
        self.pair_kept()
        for node in self.flat.graph.nodes:
            if node.op == "output":
                self.output(node)
            else:
                self.new[node] = self.node(node)
        return replace(
            self.flat,
            graph=self.graph,
            root=self.fewer.root,
            placeholders=dict(self.flat.placeholders),
            parts=dict(self.flat.parts),
        )

    def dropped(self, node: fx.Node) -> Stack | None:
        """The stack of a node in a removed layer. None for other nodes."""
        path, number = self.layer.get(node, ("", 0))
        stack = self.stacks.get(path)
        return None if stack is None or number < stack.kept else stack

    def pair_placeholders(self) -> None:
        """Pair the placeholders. A placeholder without a twin must be a parameter or buffer of a removed layer."""
        theirs = {(n.name, *self.fewer.placeholders[n.name]): n for n in _placeholders(self.fewer)}
        gone = tuple(f"{s.path}.{n}.".lstrip(".") for s in self.stacks.values() for n in range(s.kept, len(s.like)))
        for node in _placeholders(self.flat):
            kind, name = self.flat.placeholders[node.name]
            other = theirs.pop((node.name, kind, name), None)
            if other is not None:
                self.twin[node] = other
            demand(other is not None or (kind in ("parameter", "buffer") and name.startswith(gone)))
        kept = {name: part for name, part in self.flat.parts.items() if not name.startswith(gone)}
        demand(not theirs and kept == self.fewer.parts)
        demand(self.flat.outputs == self.fewer.outputs and set(self.fewer.updates) <= set(self.flat.updates))

    def pair_kept(self) -> None:
        """Pair each kept node with the node of `fewer` in the same place, and removed layers with their like layers."""
        ours = [n for n in self.flat.graph.nodes if n.op not in ("placeholder", "output") and not self.dropped(n)]
        theirs = [n for n in self.fewer.graph.nodes if n.op not in ("placeholder", "output")]
        demand(len(ours) == len(theirs))
        for node, other in zip(ours, theirs, strict=True):
            demand((node.op, node.target, module_path(node)) == (other.op, other.target, module_path(other)))
            self.twin[node] = other
        for (path, number), nodes in self.layers.items():
            stack = self.stacks.get(path)
            if stack is not None and number >= stack.kept:
                first = self.layers[path, stack.like[number]]
                self.twin |= {node: self.twin[like] for node, like in zip(nodes, first, strict=True)}

    def node(self, node: fx.Node) -> fx.Node:
        """The node at the other sizes."""
        other = self.twin.get(node)
        if other is None:  # a parameter or buffer of a removed layer has the same shape at all sizes
            new = self.graph.create_node(node.op, node.target, name=node.name)
            new.meta = dict(node.meta)
        else:
            args = self.merged(node.args, other.args, node)
            demand(list(node.kwargs) == list(other.kwargs))
            kwargs = {name: self.merged(value, other.kwargs[name], node) for name, value in node.kwargs.items()}
            new = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
            new.meta = dict(other.meta)
            for key in ("nn_module_stack", "no_grad"):
                new.meta.pop(key, None)
                if key in node.meta:
                    new.meta[key] = node.meta[key]
        demand(new.name == node.name)
        return new

    def merged(self, ours: Any, theirs: Any, node: fx.Node) -> Any:
        """An argument of a written node: its nodes are ours, its numbers are theirs."""
        demand(type(ours) is type(theirs))
        if isinstance(ours, fx.Node):
            self.check(ours, theirs, node)
            return self.new[ours]
        if isinstance(ours, (list, tuple)):
            demand(len(ours) == len(theirs))
            return type(ours)([self.merged(a, b, node) for a, b in zip(ours, theirs, strict=True)])
        demand(not isinstance(ours, (slice, dict)))  # they could hold nodes
        return theirs

    def check(self, ours: fx.Node, theirs: fx.Node, node: fx.Node) -> None:
        """Check that our operand of `node` corresponds to their operand.

        Both must have the same shape and dtype. This is enough if `node` is in a removed layer. Otherwise the two
        operands must be twins. If our operand is in a removed layer, it must be in the last layer of its stack. Their
        operand must then have the same position in the last kept layer.
        """
        demand(self.new[ours].meta.get("info") == theirs.meta.get("info"))
        if self.dropped(node):
            return
        stack = self.dropped(ours)
        if stack is None:
            demand(self.twin.get(ours) is theirs)
            return
        last, at = self.layers[stack.path, stack.kept - 1], self.position[ours]
        demand(self.layer[ours][1] == len(stack.like) - 1 and at < len(last) and self.twin[last[at]] is theirs)

    def output(self, node: fx.Node) -> None:
        ours: Any = node.args[0]
        theirs: Any = self.fewer.graph.output_node().args[0]
        count = len(self.flat.outputs)
        for a, b in zip(ours[:count], theirs[:count], strict=True):
            self.check(a, b, node)
        updated = dict(zip(self.flat.updates, ours[count:], strict=True))
        for name, value in zip(self.fewer.updates, theirs[count:], strict=True):
            self.check(updated[name], value, node)
        self.graph.output(tuple(self.new[value] for value in ours))


def _placeholders(flat: Flat) -> list[fx.Node]:
    return [node for node in flat.graph.nodes if node.op == "placeholder"]


def demand(holds: bool) -> None:
    """Raise `Differs` unless a condition holds."""
    if not holds:
        raise Differs
