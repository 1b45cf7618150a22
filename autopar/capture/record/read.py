"""From a record to the program at given sizes. The program equals a capture at these sizes, but needs no model.

Nothing in a record is executed. Operators and dtypes are looked up by name among PyTorch's own.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar._torch.private import overloads_of
from autopar.capture.analysis import analyse, with_dims
from autopar.capture.forms import Form, Sizes
from autopar.capture.layers.blocks import block_text, signature_of
from autopar.capture.record.schema import (
    NAMED,
    SAME,
    STATE,
    VERDICTS,
    BlockRecord,
    ConstantsRecord,
    InfoRecord,
    InputRecord,
    LeafRecord,
    LiteralRecord,
    NodeRecord,
    ProgramRecord,
    Size,
    StateRecord,
)
from autopar.capture.targets import coupled, judged
from autopar.errors import CaptureError
from autopar.ir.program import Block, CallSite, Constants, InputInfo, Program, StateInfo
from autopar.rules.operators import output_of
from autopar.rules.registry import load_families
from autopar.rules.rule import TensorInfo

_T = TypeVar("_T")
NO_OPS = (aten.expand.default, aten.reshape.default, aten.slice.Tensor)  # capture drops them if they keep the shape


class OtherGraph(Exception):
    """At these sizes, a capture would give another graph than the recorded graph."""


class BadRecord(CaptureError):
    """A record that this version did not write, or that has operators unknown to this installation."""


def program_at(record: ProgramRecord, sizes: Sizes) -> Program:
    """The program at `sizes`. Raises `OtherGraph` if the graph differs there, and `BadRecord` if the record is bad."""
    _check_sizes(record, sizes)
    program = _program(record, sizes)
    texts = [block_text(b.graph, b.ports, b.outputs, with_floats=False) for b in program.blocks]
    if len(set(texts)) < len(texts):
        raise OtherGraph("two distinct blocks would be equal there")
    return coupled(judged(program), record.mixes_batch) if sizes.batch > 1 else _with_verdicts(program, record)


def program_of(record: ProgramRecord) -> Program:
    """The program of `record_of_program`. Raises `BadRecord` if the record is bad."""
    program = _with_verdicts(_program(record, record.sizes), record)
    return replace(program, batch=record.sizes.batch or None)


def _with_verdicts(program: Program, record: ProgramRecord) -> Program:
    verdicts: dict[str, Any] = {name: getattr(record, name) for name in VERDICTS}
    return replace(with_dims(program, analyse(program)), **verdicts)


def _program(record: ProgramRecord, sizes: Sizes) -> Program:
    read = _Reader(sizes)
    state: dict[str, Any] = {k: {p.name: _described(StateInfo, p) for p in getattr(record, k)} for k in STATE}
    return Program(
        blocks=tuple(read.block(block) for block in record.blocks),
        calls=tuple(
            CallSite(**dict(c) | {"arguments": tuple(read.value(a, {}) for a in c.arguments)}) for c in record.calls
        ),
        notes=record.notes,
        inputs=tuple(_described(InputInfo, i, shape=read.shape(i.shape)) for i in record.inputs),
        constants=read.constants(record.constants),
        batch=sizes.batch,
        sequence=sizes.sequence,
        **{name: getattr(record, name) for name in SAME},
        **state,
    )


def _check_sizes(record: ProgramRecord, sizes: Sizes) -> None:
    """Raise `OtherGraph` if the graph is not known at these sizes. Between two captured lengths it is."""
    if 1 in (sizes.sequence, record.sizes.batch, record.small.batch):
        raise OtherGraph("a dimension of one element looks like a broadcast dimension")
    if sizes.batch == 1 and record.not_one_sequence is not None:
        raise OtherGraph(record.not_one_sequence)
    captured, small = record.sizes.sequence, record.small.sequence
    if sizes.sequence == captured:
        return
    if captured is None or small is None or sizes.sequence is None or captured == small:
        raise OtherGraph("its dependence on the sequence length is not known")
    if record.sequence_is_fixed and sizes.sequence != small:
        raise OtherGraph("the attention mask may differ at another sequence length")
    if not min(captured, small) <= sizes.sequence <= max(captured, small):
        raise OtherGraph(
            f"only sequences of {small} and {captured} were captured, and the code may branch outside of them"
        )


def with_one_sequence(record: ProgramRecord) -> ProgramRecord:
    """The record with the reason why its program is not known at one sequence, where `squeeze` may drop the batch."""
    try:
        _check_shapes(program_at(record, Sizes(batch=1, sequence=record.sizes.sequence)))
    except OtherGraph as error:
        return record.model_copy(update={"not_one_sequence": str(error)})
    return record


def _check_shapes(program: Program) -> None:
    """Raise `OtherGraph` if an operator does not give the recorded shape."""
    for block in program.blocks:
        for node in block.operators:
            if _shape_on_meta(node) != node.meta["info"].shape:
                raise OtherGraph(f"{node.name} ({node.target}) would give another shape there")


def _shape_on_meta(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of an operator's result for operands of the recorded shapes. None if it is not known."""

    def empty(operand: fx.Node) -> Any:
        info = operand.meta.get("info")
        return 1.0 if info is None else torch.empty(info.shape, dtype=info.dtype, device="meta")

    args, kwargs = fx.map_arg((node.args, node.kwargs), empty)
    try:
        with torch.no_grad():
            return tuple(node.target(*args, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})}).shape)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


class _Reader:
    """Fills the forms of a record with sizes."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.forms: dict[fx.Node, tuple[Size, ...]] = {}  # the shape of every node as recorded

    def whole(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        whole = Form(_terms(size)).at(self.sizes)
        if whole is None:
            raise OtherGraph("a size would not be a whole number there")
        return whole

    def shape(self, sizes: Sequence[Size]) -> tuple[int, ...]:
        return tuple(self.whole(size) for size in sizes)

    def value(self, value: Any, nodes: Mapping[str, fx.Node]) -> Any:
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, list):
            return [self.value(v, nodes) for v in value]
        if not isinstance(value, dict) or len(value) != 1:
            raise BadRecord(f"{value!r} is no argument")
        ((tag, inner),) = value.items()
        if tag == "node" and inner in nodes:
            return nodes[inner]
        if tag == "tuple" and isinstance(inner, list):
            return tuple(self.value(v, nodes) for v in inner)
        if tag == "float":
            return _hexadecimal(inner)
        if tag in ("size", "float_size", "one_over_size"):
            whole = self.whole(inner)
            return whole if tag == "size" else float(whole) if tag == "float_size" else 1.0 / whole
        return _named(tag, inner)

    def describe(self, node: fx.Node, info: InfoRecord) -> None:
        self.forms[node] = info.shape
        node.meta["info"] = TensorInfo(self.shape(info.shape), _named("dtype", info.dtype), info.differentiable)

    def leaf(self, graph: fx.Graph, leaf: LeafRecord) -> fx.Node:
        node = graph.create_node("placeholder", leaf.target, name=leaf.name)
        if leaf.info is not None:
            self.describe(node, leaf.info)
        if leaf.literal is not None:
            node.meta["literal"] = _literal(leaf.literal)
        return node

    def node(self, graph: fx.Graph, record: NodeRecord, nodes: Mapping[str, fx.Node]) -> fx.Node:
        args = tuple(self.value(a, nodes) for a in record.args)
        kwargs = {k: self.value(v, nodes) for k, v in record.kwargs.items()}
        node = graph.create_node("call_function", _operator(record.target), args, kwargs, record.name)
        node.meta["batch_power"] = record.batch_power
        if record.key:
            node.meta["key"] = record.key
        self.describe(node, record.info)
        if node.target in NO_OPS:
            self.check_no_op(node)
        return node

    def check_no_op(self, node: fx.Node) -> None:
        """Raise `OtherGraph` if an operator changes nothing at these sizes only: capture would drop it."""
        if self.sizes.batch == 1:
            return
        source = node.all_input_nodes[0]
        if source.meta["info"].shape == node.meta["info"].shape and self.forms[source] != self.forms[node]:
            raise OtherGraph(f"{node.name} would not change the shape there")

    def graph(
        self, leaves: Sequence[LeafRecord], records: Sequence[NodeRecord], outputs: Sequence[str]
    ) -> tuple[fx.Graph, dict[str, fx.Node]]:
        """A graph, and its nodes by their names in the record."""
        graph = fx.Graph()
        nodes: dict[str, fx.Node] = {}
        for leaf in leaves:
            nodes[leaf.name] = self.leaf(graph, leaf)
        for record in records:
            nodes[record.name] = self.node(graph, record, nodes)
        graph.output(tuple(_of(nodes, name) for name in outputs))
        return graph, nodes

    def block(self, record: BlockRecord) -> Block:
        graph, nodes = self.graph(record.ports, record.nodes, record.outputs)
        ports = {port.name: port.role for port in record.ports}
        for name in ports:
            nodes[name].meta["key"] = name
        signature = signature_of(graph, ports, record.outputs)
        return Block(name=record.name, graph=graph, ports=ports, outputs=record.outputs, signature=signature)

    def constants(self, record: ConstantsRecord) -> Constants:
        graph, _ = self.graph(record.leaves, record.nodes, record.outputs)
        calls = (node for node in graph.nodes if node.op == "call_function")
        texts = [repr((node.target, node.args, sorted(node.kwargs.items()))) for node in calls]
        if len(set(texts)) < len(texts):
            raise OtherGraph("two constants would be equal there")
        return Constants(graph=graph, buffers=record.buffers, results=record.results)


def _terms(value: Any) -> tuple[tuple[int, int, int, int], ...]:
    plain = isinstance(value, (list, tuple)) and all(
        isinstance(t, (list, tuple)) and len(t) == 4 and all(type(n) is int for n in t) and t[1] > 0 for t in value
    )
    if not plain:
        raise BadRecord(f"{value!r} is no sum of terms")
    return tuple((p, q, i, j) for p, q, i, j in value)


def _of(nodes: Mapping[str, fx.Node], name: str) -> fx.Node:
    if name not in nodes:
        raise BadRecord(f"there is no node {name!r}")
    return nodes[name]


def _named(tag: str, name: Any) -> Any:
    """A dtype, memory format, layout or device by its name."""
    if tag == "device" and isinstance(name, str):
        try:
            return torch.device(name)
        except RuntimeError:
            raise BadRecord(f"{name!r} is no device") from None
    attr = getattr(torch, name, None) if isinstance(name, str) and tag in NAMED else None
    if attr is None or not isinstance(attr, NAMED[tag]):
        raise BadRecord(f"{name!r} is no {tag}")
    return attr


def _operator(name: str) -> Callable[..., Any]:
    """An operator's overload by its full name, ``aten.add.Tensor``."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace == "autopar":
        define_output(packet, overload)
    target = getattr(getattr(getattr(torch.ops, namespace, None), packet, None), overload, None)
    if str(target) != name or not overloads_of(target):
        raise BadRecord(f"there is no operator {name!r} here")
    operator: Callable[..., Any] = target  # type: ignore[assignment]
    return operator


def define_output(packet: str, overload: str) -> None:
    """Define an output of an ATen operator. Rules define the other operators of autopar."""
    load_families()
    base, _, index = overload.rpartition("_")
    source = getattr(getattr(torch.ops.aten, packet, None), base, None)
    if index.isdigit() and overloads_of(source) and _has_output(source, int(index)):
        output_of(source, int(index))


def _has_output(operator: Any, index: int) -> bool:
    """Whether an operator may have an output of this index. A list of tensors has as many as its call makes."""
    returns = operator._schema.returns
    return index < len(returns) or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType))


def _hexadecimal(text: Any) -> float:
    try:
        return float.fromhex(text)
    except (TypeError, ValueError, OverflowError):
        raise BadRecord(f"{text!r} is no number") from None


def _literal(record: LiteralRecord) -> torch.Tensor:
    dtype: torch.dtype = _named("dtype", record.dtype)
    if record.values is None:
        return torch.empty(record.shape, dtype=dtype, device="meta")
    try:
        raw = bytearray(base64.b64decode(record.values, validate=True))
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(record.shape)
    except (RuntimeError, ValueError):
        raise BadRecord("a tensor's elements do not make up its shape") from None


def _described(kind: Callable[..., _T], record: StateRecord | InputRecord, **other: object) -> _T:
    """The description of a tensor, which has the same fields as its record; `other` are those with other values."""
    return kind(**dict(record) | {"dtype": _named("dtype", record.dtype)} | other)
