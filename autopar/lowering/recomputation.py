"""Selective recomputation: a block whose chosen operators are computed again in the backward pass.

A block's graph is cut into *parts*: runs of operators that are recomputed, and runs of operators that are not. The
forward pass runs all parts in their order. `torch.autograd.graph.saved_tensors_hooks` decides about every tensor that
autograd saves:

* A result of a recomputed part, and a tensor that a recomputed operator makes for itself, is not kept. Autograd gets a
  note of the part and of the tensor's place in it.
* Every other tensor is kept, as without recomputation.
* The inputs of a recomputed part are kept, unless another recomputed part makes them.

The first note that the backward pass reads runs the part again. The other notes of the part read the same results. A
result is freed with the last note of it. A part whose results nobody saved is never run again.

The cost model's dry run and the runtime run this code, so the counted bytes are the bytes of a step. Random operators
draw the numbers of the forward pass again. Parts may be compiled: hooks lie around their functions. Every rank runs the
same parts in the same order, so that collectives in recomputed parts meet.
"""

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar._torch import private
from autopar.capture.nodes import output_nodes
from autopar.errors import PlanError, did_you_mean
from autopar.lowering.functions import conversion_of


def recomputed_nodes(graph: fx.Graph, keys: Collection[str], block: str = "") -> frozenset[fx.Node]:
    """The nodes that are recomputed if the operators with these keys are, with conversions that send nothing."""
    known = {node.meta["key"] for node in graph.nodes if "key" in node.meta}
    for key in keys:
        if key not in known:
            raise PlanError(
                f"block {block}: `recomputed` names the operator {key!r}, which the block does not run; "
                f"{did_you_mean(key, sorted(known))}, or plan again"
            )
    chosen: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        pieces = [user for user in node.users if user.target is operator.getitem]
        if pieces:  # one function with several results
            is_chosen = all(user.meta.get("key") in keys for user in pieces)
        elif node.target is operator.getitem:
            is_chosen = node.all_input_nodes[0] in chosen
        else:
            is_chosen = node.meta.get("key") in keys or (_follows(node) and _is_of(node, chosen))
        if is_chosen:
            chosen.add(node)
    return frozenset(chosen)


def _follows(node: fx.Node) -> bool:
    """Whether a node belongs to a conversion and sends nothing in the forward pass."""
    conversion = conversion_of(node.target)
    return "key" not in node.meta and (conversion is None or conversion.wire[0] is None)


def _is_of(node: fx.Node, nodes: Collection[fx.Node]) -> bool:
    operands = [n for n in node.all_input_nodes if n.op == "call_function"]
    return bool(operands) and all(n in nodes for n in operands)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Part:
    """Consecutive operators of a block, the values that they take and give, and those that no later part reads."""

    function: Callable[..., Any]
    is_again: bool
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    last_uses: tuple[str, ...]
    streams: tuple[Any, ...]


class SelectiveBlock(torch.nn.Module):
    """A generated block that computes results of some operators again for backward. `compiled` makes functions."""

    def __init__(
        self,
        module: fx.GraphModule,
        keys: Collection[str],
        compiled: Callable[[fx.GraphModule], Callable[..., Any]] = lambda module: module,
    ) -> None:
        super().__init__()
        graph = module.graph
        self.takes = tuple(node.name for node in graph.nodes if node.op == "placeholder")
        self.gives = tuple(value.name for value in output_nodes(graph))
        self.parts = _parts(module, recomputed_nodes(graph, keys, type(module).__name__), compiled)

    def forward(self, *arguments: Any) -> tuple[Any, ...]:
        """The results of the block."""
        scope: dict[str, Any] = dict(zip(self.takes, arguments, strict=True))
        del arguments
        frame = _Frame()
        with torch.autograd.graph.saved_tensors_hooks(frame.pack, lambda held: held.tensor()):
            for part in self.parts:
                given = [scope[name] for name in part.takes]
                results = frame.run(part, given) if part.is_again else part.function(*given)
                del given
                scope.update(zip(part.gives, results, strict=True))
                del results
                for name in part.last_uses:
                    del scope[name]
        frame.finish()
        return tuple(scope[name] for name in self.gives)


# ---- parts ----


def _parts(
    module: fx.GraphModule,
    recomputed: Collection[fx.Node],
    compiled: Callable[[fx.GraphModule], Callable[..., Any]],
) -> tuple[_Part, ...]:
    """The operators in their order, cut where recomputation begins or ends."""
    operators = (node for node in module.graph.nodes if node.op == "call_function")
    runs = [(is_again, list(nodes)) for is_again, nodes in groupby(operators, recomputed.__contains__)]
    left = set(output_nodes(module.graph))  # values that a later part or the caller reads
    parts: list[_Part] = []
    for is_again, nodes in reversed(runs):
        here = set(nodes)
        takes = list(dict.fromkeys(v for n in nodes for v in n.all_input_nodes if v not in here and v.op != "get_attr"))
        gives = [node for node in nodes if node in left]
        last = [value.name for value in takes if value not in left]
        left = (left - here) | set(takes)
        graph, attributes = graph_of(nodes, takes, gives)
        submodule = fx.GraphModule({name: getattr(module, name) for name in attributes}, graph, type(module).__name__)
        streams = tuple(getattr(module, name) for name in attributes if hasattr(getattr(module, name), "go_to"))
        parts.append(
            _Part(
                function=compiled(submodule),
                is_again=is_again,
                takes=tuple(value.name for value in takes),
                gives=tuple(node.name for node in gives),
                last_uses=tuple(last),
                streams=streams,
            )
        )
    return tuple(reversed(parts))


def graph_of(
    nodes: Sequence[fx.Node], takes: Sequence[fx.Node], gives: Sequence[fx.Node]
) -> tuple[fx.Graph, list[str]]:
    """A graph of some nodes of another graph, and the attributes that it reads."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for value in takes:
        copies[value] = graph.placeholder(value.name)
    attributes = dict.fromkeys(v for node in nodes for v in node.all_input_nodes if v.op == "get_attr")
    for attribute in attributes:
        copies[attribute] = graph.get_attr(str(attribute.target))
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in gives))
    return graph, [str(attribute.target) for attribute in attributes]


# ---- saved tensors ----


class _Frame:
    """The saved tensors of one call of a block."""

    def __init__(self) -> None:
        self.outer = private.saved_tensor_hooks()  # of the code around the block, which sees every kept tensor
        self.made: dict[int, tuple[Any, _Run, int]] = {}  # results of recomputed parts by storage
        self.runs: list[_Run] = []
        self.running: _Run | None = None

    def run(self, part: _Part, given: Sequence[Any]) -> Sequence[Any]:
        """Run a recomputed part forward."""
        self.running = run = _Run(part, [self._input(value) for value in given])
        self.runs.append(run)
        try:
            results: Sequence[Any] = part.function(*given)
        finally:
            self.running = None
        for place, value in enumerate(results):
            if isinstance(value, torch.Tensor) and private.storage_id(value) not in run.kept:
                self.made.setdefault(private.storage_id(value), (private.storage_reference(value), run, place))
                run.layouts[place] = _layout(value)
        return results

    def finish(self) -> None:
        """Keep the inputs of parts that will run again, the last part first, and forget the forward pass's results."""
        for run in reversed(self.runs):
            run.keep_inputs()
        self.runs.clear()
        self.made.clear()

    def _input(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return _Input(self._keeper(value.detach()), value.requires_grad, private.storage_id(value))

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd holds for a tensor that it saves."""
        run = self.running
        if run is None:
            return self._keeper(tensor)()
        place = run.num_saved
        run.num_saved += 1
        if private.storage_id(tensor) in run.kept or private.storage_id(tensor) in self.made:
            return self._keeper(tensor)()
        return _Note(run, (_INNER, place), None)

    def _keeper(self, tensor: torch.Tensor) -> "Callable[[], _KeptTensor | _Note]":
        """What makes a note if the tensor is, or views, the result of a recomputed part. Else it keeps the tensor."""
        if (at := private.storage_id(tensor)) in self.made:
            _, run, place = self.made[at]
            layout, before = _layout(tensor), run.layouts[place]
            if layout[0] == before[0]:
                return partial(_Note, run, (_RESULT, place), None if layout == before else layout)
        return partial(_KeptTensor, tensor, self.outer)


_RESULT, _INNER = "result", "inner"  # of a part, and of an operator in it
_Key = tuple[str, int]


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


class _KeptTensor:
    """A tensor that is kept, as the code around the block keeps it."""

    def __init__(self, tensor: torch.Tensor, outer: Any) -> None:
        pack, self.unpack = outer
        self.held: Any = pack(tensor)

    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self.unpack(self.held)
        return tensor


class _Note:
    """A tensor that is computed again: its part, its key there, and the layout of a view of it."""

    def __init__(self, run: "_Run", key: _Key, layout: tuple[Any, ...] | None) -> None:
        self.run, self.key, self.layout = run, key, layout
        run.notes[key] += 1

    def __del__(self) -> None:
        self.run.release(self.key)

    def tensor(self) -> torch.Tensor:
        value = self.run.value(self.key)
        return value if self.layout is None else value.as_strided(*self.layout[1:])


class _Input(NamedTuple):
    """An input of a recomputed part: what keeps it, and once it is known that the part runs again, the kept tensor."""

    held: Any
    flows: bool
    storage: int


class _Run:
    """One run of a recomputed part: what it takes to run it again, and then the values that notes still ask for."""

    def __init__(self, part: _Part, inputs: Sequence[Any]) -> None:
        self.part = part
        self.inputs: Sequence[Any] | None = inputs
        self.kept = {x.storage for x in inputs if isinstance(x, _Input) and x.held.func is _KeptTensor}
        self.positions = [stream.position() for stream in part.streams]
        self.layouts: dict[int, tuple[Any, ...]] = {}
        self.num_saved = 0
        self.notes: Counter[_Key] = Counter()
        self.values: dict[_Key, torch.Tensor] = {}

    def keep_inputs(self) -> None:
        """Hold the inputs for the backward pass, if a note asks for a value of this run."""
        kept = (x._replace(held=x.held()) if isinstance(x, _Input) else x for x in self.inputs or ())
        self.inputs = list(kept) if self.notes else None

    def value(self, key: _Key) -> torch.Tensor:
        """A result of the part or a tensor that one of its operators saved. The first call runs the part again."""
        if key not in self.values:
            self._run_again()
        return self.values[key]

    def release(self, key: _Key) -> None:
        """A note is gone."""
        self.notes[key] -= 1
        if not self.notes[key]:
            del self.notes[key]
            self.values.pop(key, None)

    def _run_again(self) -> None:
        assert self.inputs is not None
        saves = any(kind == _INNER for kind, _ in self.notes)  # tensors that only autograd shows
        given = [_again(x, flows=saves) for x in self.inputs]
        saved: list[torch.Tensor] = []
        with torch.set_grad_enabled(saves), _at(self.part.streams, self.positions), _collecting(saved, self.num_saved):
            results = self.part.function(*given)
        values: dict[_Key, Any] = {(_INNER, place): tensor for place, tensor in enumerate(saved)}
        tensors = {place: value for place, value in enumerate(results) if isinstance(value, torch.Tensor)}
        values |= {(_RESULT, place): value.detach() for place, value in tensors.items()}
        self.values = {key: values[key] for key in self.notes}
        self.inputs = None


def _again(value: Any, *, flows: bool) -> Any:
    if not isinstance(value, _Input):
        return value
    return value.held.tensor().detach().requires_grad_(flows and value.flows)


@contextmanager
def _at(streams: Sequence[Any], positions: Sequence[Any]) -> Iterator[None]:
    """Random streams at earlier positions, and afterwards where they were."""
    now = [stream.position() for stream in streams]
    for stream, position in zip(streams, positions, strict=True):
        stream.go_to(position)
    try:
        yield
    finally:
        for stream, position in zip(streams, now, strict=True):
            stream.go_to(position)


@contextmanager
def _collecting(saved: list[torch.Tensor], expected: int) -> Iterator[None]:
    """The tensors that autograd saves, in their order. They must be as many as in the forward pass."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
    if torch.is_grad_enabled():
        assert len(saved) == expected, f"a recomputed part saved {len(saved)} tensors, and {expected} before"
