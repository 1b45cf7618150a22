"""From two captures of one model at different sizes to one record. Numbers that differ become forms in the sizes.

A program alone is a record at its own sizes.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import fx

from autopar._torch.private import overloads_of
from autopar.capture.axes import axes_of
from autopar.capture.forms import Form, Sizes, SizeTerm, float_form_of, form_of
from autopar.capture.nodes import output_nodes
from autopar.capture.program import Twice
from autopar.capture.record.schema import (
    NAMED,
    SAME,
    STATE,
    VERDICTS,
    BlockRecord,
    CallRecord,
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
from autopar.errors import CaptureError
from autopar.files.strict_model import StrictModel
from autopar.ir.program import Block, CallSite, Constants, InputInfo, Program, Role, StateInfo

_R = TypeVar("_R", bound=StrictModel)


class Unexplained(CaptureError):
    """Two captures differ, and no form in their sizes explains the difference, or a record cannot hold the program."""


def record_of(twice: Twice) -> ProgramRecord:
    """The record of a model captured at two sizes. Raises `Unexplained` if a difference is no form in the sizes."""
    program, small, sizes, others = twice.program, twice.small, twice.sizes, twice.small_sizes
    if small is None:
        raise Unexplained("the graphs of two captures differ between other sizes")
    write = _Writer(sizes, others)
    _same("blocks", len(program.blocks), len(small.blocks))
    _same("calls", *([replace(c, arguments=()) for c in each.calls] for each in (program, small)))
    for name in (*STATE, *(name for name in SAME if name != "reads")):
        _same(name, getattr(program, name), getattr(small, name))
    state: dict[str, Any] = {
        k: tuple(_described(StateRecord, info) for info in getattr(program, k).values()) for k in STATE
    }
    return ProgramRecord(
        sizes=sizes,
        small=others,
        sequence_is_fixed=twice.masks_remain,
        blocks=tuple(write.block(a, b) for a, b in zip(program.blocks, small.blocks, strict=True)),
        calls=tuple(write.call(a, b) for a, b in zip(program.calls, small.calls, strict=True)),
        inputs=tuple(
            _described(InputRecord, a, shape=write.shape(a.name, a.shape, b.shape))
            for a, b in zip(program.inputs, small.inputs, strict=True)
        ),
        constants=write.constants(program.constants, small.constants),
        notes=twice.notes,
        **{name: getattr(program, name) for name in (*SAME, *VERDICTS)},
        **state,
    )


def record_of_program(program: Program) -> ProgramRecord:
    """The record of a program at its own sizes, for `program_of`. Raises `Unexplained` if a record cannot hold it."""
    sizes = Sizes(batch=program.batch or 0, sequence=program.sequence)
    return record_of(Twice(program=program, small=program, sizes=sizes, small_sizes=sizes, notes=program.notes))


class _Writer:
    """Compares the values of two captures and writes them as functions of the sizes."""

    def __init__(self, sizes: Sizes, others: Sizes) -> None:
        self.sizes, self.others = sizes, others
        self.known: dict[tuple[int, int], int | Form | None] = {}

    def whole(self, where: str, a: int, b: int) -> int | tuple[SizeTerm, ...]:
        if (a, b) not in self.known:
            self.known[a, b] = form_of(a, b, self.sizes, self.others)
        n = self.known[a, b]
        if n is None:
            raise Unexplained(
                f"{where} has the number {a} at {_text(self.sizes)} and {b} at {_text(self.others)}, and no "
                "formula of these sizes gives both"
            )
        return n.terms if isinstance(n, Form) else n

    def shape(self, where: str, a: Sequence[int], b: Sequence[int]) -> tuple[Size, ...]:
        _same(f"{where}: the number of dimensions", len(a), len(b))
        return tuple(self.whole(where, x, y) for x, y in zip(a, b, strict=True))

    def info(self, node: fx.Node, twin: fx.Node) -> InfoRecord:
        a, b = node.meta["info"], twin.meta["info"]
        _same(f"{node.name}: dtype", (a.dtype, a.differentiable), (b.dtype, b.differentiable))
        shape = self.shape(f"the shape of {node.name}", a.shape, b.shape)
        return InfoRecord(shape=shape, dtype=_dtype(a.dtype), differentiable=a.differentiable)

    def value(self, where: str, a: Any, b: Any) -> Any:
        """An argument as a plain JSON value, or as a tagged mapping."""
        if type(a) is not type(b):
            raise Unexplained(f"{where} is {a!r} at {_text(self.sizes)} and {b!r} at {_text(self.others)}")
        if isinstance(a, fx.Node):
            _same(where, a.name, b.name)
            return {"node": a.name}
        if isinstance(a, int) and not isinstance(a, bool):
            n = self.whole(where, a, b)
            return {"size": _plain(n)} if isinstance(n, tuple) else n
        if isinstance(a, float):
            return self.floating(where, a, b)
        if isinstance(a, (list, tuple)):
            _same(f"{where}: the length", len(a), len(b))
            items = [self.value(where, x, y) for x, y in zip(a, b, strict=True)]
            return {"tuple": items} if isinstance(a, tuple) else items
        _same(where, a, b)
        if a is None or isinstance(a, (bool, str)):
            return a
        return _tagged(where, a)

    def floating(self, where: str, a: float, b: float) -> Any:
        if repr(a) == repr(b):
            return {"float": a.hex()}
        form = float_form_of(a, b, self.sizes, self.others)
        if form is not None:
            return {"float_size": _plain(form.terms)}
        over_a, over_b = (float(round(1 / v)) if 0 < abs(v) < math.inf else math.nan for v in (a, b))
        inverse = float_form_of(over_a, over_b, self.sizes, self.others)
        pairs = zip((self.sizes, self.others), (a, b), strict=True)
        if inverse is None or any(1.0 / (inverse.at(s) or math.nan) != v for s, v in pairs):
            raise Unexplained(f"{where} has {a!r} at {_text(self.sizes)} and {b!r} at {_text(self.others)}")
        return {"one_over_size": _plain(inverse.terms)}

    def node(self, where: str, node: fx.Node, twin: fx.Node) -> NodeRecord:
        where = f"{where}: {node.meta.get('key', node.name)} ({node.target})"
        ours, theirs = ((n.name, n.target, len(n.args), list(n.kwargs)) for n in (node, twin))
        _same(where, ours, theirs)
        if str(node.target) not in overloads_of(node.target):
            raise Unexplained(
                f"{where} is not a registered operator of PyTorch; register it with torch.library.custom_op"
            )
        return NodeRecord(
            name=node.name,
            target=str(node.target),
            args=tuple(self.value(where, a, b) for a, b in zip(node.args, twin.args, strict=True)),
            kwargs={k: self.value(where, v, twin.kwargs[k]) for k, v in node.kwargs.items()},
            info=self.info(node, twin),
            key=node.meta.get("key", ""),
            batch_power=node.meta.get("batch_power", 0),
        )

    def leaf(self, node: fx.Node, twin: fx.Node, role: Role) -> LeafRecord:
        info = self.info(node, twin) if "info" in node.meta else None
        literal, other = map(_literal, (node, twin))
        _same(f"the tensor {node.name} that the model's code makes", literal, other)
        return LeafRecord(
            name=node.name,
            target=str(node.target),
            role=role,
            differentiable=info is not None and info.differentiable,
            info=info,
            literal=literal,
        )

    def block(self, block: Block, small: Block) -> BlockRecord:
        _same("ports", (block.name, block.ports, block.outputs), (small.name, small.ports, small.outputs))
        pairs = _twins(block.graph, small.graph)
        holders = [(a, b) for a, b in pairs if a.op == "placeholder"]
        ports = tuple(self.leaf(a, b, role) for (a, b), role in zip(holders, block.ports.values(), strict=True))
        nodes = tuple(self.node(block.name, a, b) for a, b in pairs if a.op == "call_function")
        return BlockRecord(name=block.name, ports=ports, nodes=nodes, outputs=block.outputs, axes=axes_of(small))

    def call(self, call: CallSite, small: CallSite) -> CallRecord:
        arguments = (self.value(call.path, a, b) for a, b in zip(call.arguments, small.arguments, strict=True))
        return CallRecord(**asdict(call) | {"arguments": tuple(arguments)})

    def constants(self, constants: Constants, small: Constants) -> ConstantsRecord:
        _same("constants", (constants.buffers, constants.results), (small.buffers, small.results))
        pairs = _twins(constants.graph, small.graph)
        return ConstantsRecord(
            leaves=tuple(self.leaf(a, b, "buffer") for a, b in pairs if a.op == "placeholder"),
            nodes=tuple(self.node("constants", a, b) for a, b in pairs if a.op == "call_function"),
            outputs=tuple(n.name for n in output_nodes(constants.graph)),
            buffers=constants.buffers,
            results=constants.results,
        )


def _twins(graph: fx.Graph, small: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    _same("the numbers of operators", len(graph.nodes), len(small.nodes))
    return list(zip(graph.nodes, small.nodes, strict=True))


def _plain(terms: Sequence[SizeTerm]) -> list[list[int]]:
    return [list(term) for term in terms]


def _same(what: str, a: Any, b: Any) -> None:
    if a != b:
        raise Unexplained(f"{what} differ between two captures at other sizes")


def _text(sizes: Sizes) -> str:
    return f"batch {sizes.batch}" + (f" and sequence {sizes.sequence}" if sizes.sequence is not None else "")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tagged(where: str, value: Any) -> dict[str, str]:
    kind = type(value).__name__
    if type(value) is not NAMED.get(kind):
        raise Unexplained(f"{where} has an argument of type {kind}, which a file cannot hold")
    return {kind: str(value).removeprefix("torch.")}


def _literal(node: fx.Node) -> LiteralRecord | None:
    literal = node.meta.get("literal")
    values: str | None = None
    if literal is None:
        return None
    if not isinstance(literal, torch.Tensor):
        raise Unexplained(f"a file cannot hold the tensor {node.name}, which the model's code makes")
    if not literal.is_meta:
        flat = literal.detach().cpu().contiguous().reshape(-1)
        values = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
    return LiteralRecord(shape=tuple(literal.shape), dtype=_dtype(literal.dtype), values=values)


def _described(kind: type[_R], info: StateInfo | InputInfo, **other: object) -> _R:
    """The record of a tensor, which has the same fields; `other` are the fields with other values."""
    fields: dict[str, Any] = {name: getattr(info, name) for name in kind.model_fields}
    return kind(**fields | {"dtype": _dtype(info.dtype)} | other)
