"""The captured program: distinct blocks of ATen operators and the sequence of calls that makes up the model.

A `Program` is folded: repeated layers are one `Block` that is called several times. Analysis, labelling, cost and code
generation are done once per distinct block. `Block.graph` is a `torch.fx.Graph`; its placeholders are the block's
ports. Every node carries ``meta["info"]`` (a `TensorInfo`) and ``meta["key"]`` (module path, operator, occurrence).
Plans name a node by its key.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from autopar.ir.sharding import Dims

if TYPE_CHECKING:
    import torch
    from torch import fx

Role = Literal["input", "parameter", "buffer", "constant", "scalar", "value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOf:
    """What part of a parameter of the model a piece is: `start` to `stop` of dimension `dim` of a whole `shape`."""

    name: str
    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def piece_name(self) -> str:
        """The whole's name and the rows as Python indexes them: ``qkv.weight[0:96]``, ``c_attn.weight[:, 0:96]``."""
        return f"{self.name}[{':, ' * self.dim}{self.start}:{self.stop}]"

    @property
    def piece_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateInfo:
    """A parameter or a buffer of the model: its first name, every other name, shape and dtype."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: "torch.dtype"
    requires_grad: bool = False
    persistent: bool = True  # a state dict holds it
    part: PartOf | None = None  # of a piece: an unequal packing is split into parameters of their own

    @property
    def whole_name(self) -> str:
        """The model's name of the parameter that this is or is a piece of."""
        return self.name if self.part is None else self.part.name

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputInfo:
    """A tensor input of the model: its name, the path in the example inputs, captured (global) shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: "torch.dtype"
    batch_dim: int | None
    sequence_dim: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A value that the model read while it was captured, and that a batch or a buffer can change."""

    name: str  # of the tensor in the program
    value: Any  # a number, or a list of numbers
    line: str  # the module, file and line number of the read
    code: str  # the text of the line
    occurrence: int  # how often this line had read before
    inputs: tuple[str, ...]  # the inputs and buffers that decide the value
    buffers: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the decision in every capture of a model."""
        return self.line, self.occurrence


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """A distinct block: its graph, the role of each port, output node names, and axes once analysed."""

    name: str
    graph: "fx.Graph"
    ports: Mapping[str, Role]
    outputs: tuple[str, ...]
    signature: str
    dims: Mapping[str, Dims] = field(default_factory=dict)

    @property
    def differentiable_ports(self) -> tuple[str, ...]:
        """The ports into which a cotangent may flow. A lifted scalar is none of them."""
        infos = ((node.name, node.meta.get("info")) for node in self.graph.nodes if node.op == "placeholder")
        return tuple(name for name, info in infos if info is not None and info.differentiable)

    @property
    def operators(self) -> "list[fx.Node]":
        """The calls of operators, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """One call of a block: where it stands in the model, what its ports are bound to, what its outputs are called."""

    block: int
    path: str  # of the module; later calls, after other modules, have a number: ``layers.0#2``
    arguments: tuple[str | float | int, ...]  # per port a value, parameter, constant or input, or a number for scalars
    results: tuple[str, ...]
    phase: Literal["denominator", "main"] = "main"


@dataclass(frozen=True, eq=False, kw_only=True)
class Constants:
    """The part of the model that depends on no input and no parameter: a graph from buffers to named values."""

    graph: "fx.Graph"
    buffers: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """A captured model. Shapes are those of the global micro-batch."""

    blocks: tuple[Block, ...]
    calls: tuple[CallSite, ...]
    parameters: Mapping[str, StateInfo]
    inputs: tuple[InputInfo, ...]
    constants: Constants
    loss: str
    denominators: tuple[str, ...] = ()  # sums over the batch that inputs alone decide: a step adds them up first
    outputs: Mapping[str, str] = field(default_factory=dict)
    batch: int | None = None
    sequence: int | None = None
    batch_axes: frozenset[int] = frozenset()
    sequence_axes: frozenset[int] = frozenset()
    hidden_axes: frozenset[int] = frozenset()
    loss_reduction: Literal["sum", "mean"] = "sum"  # from the losses of micro-batches to that of the batch
    mixes_batch: str | None = None  # why micro-batches cannot make it
    ignored: Mapping[str, int] | None = None  # inputs that can mark samples to ignore, and the marks; None if none can
    unused: Mapping[str, StateInfo] = field(default_factory=dict)  # parameters that no block takes
    buffers: Mapping[str, StateInfo] = field(default_factory=dict)
    updates: Mapping[str, str] = field(default_factory=dict)  # new values of buffers that are ports, not constants
    decisions: tuple[Decision, ...] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)  # the text of inputs that are no tensors, as constants
    reads: tuple[str, ...] = ()  # the plain attributes that the model read, by class: constants too
    notes: tuple[str, ...] = ()
    analysis: object = field(default=None, repr=False, compare=False)  # of `autopar.capture.analysis`

    @property
    def every_parameter(self) -> Mapping[str, StateInfo]:
        """The model's parameters. Parameters that no block takes come last."""
        return {**self.parameters, **self.unused}

    @property
    def fingerprint(self) -> str:
        """Hash of parameter shapes, block signatures, call order and axes; sizes of batch and sequence count."""
        text = json.dumps(
            [
                [(p.name, p.shape, str(p.dtype), p.requires_grad) for p in self.parameters.values()],
                [b.signature for b in self.blocks],
                [[sorted((k, d.sizes) for k, d in b.dims.items())] for b in self.blocks],
                [(c.block, c.path, c.arguments) for c in self.calls],
                sorted(self.updates.items()),
            ],
            default=str,
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def invariant(self) -> frozenset[str]:
        """Values that every rank holds whole: the loss, its denominators, new values of buffers, and decisions."""
        decided = (decision.name for decision in self.decisions)
        return frozenset({self.loss, *self.updates.values(), *self.denominators, *decided})

    def uses_of_block(self, index: int) -> tuple[CallSite, ...]:
        return tuple(call for call in self.calls if call.block == index)


def is_between(path: str) -> bool:
    """Whether a call lies before, between or behind the repeated blocks, by its path."""
    return path.startswith(("denominator", "prologue", "epilogue", "between_"))


def hidden_parameters(program: Program) -> frozenset[str]:
    """The parameters that repeated blocks take: no embedding and no head. All parameters if no block repeats."""
    repeated = [call for call in program.calls if len(program.uses_of_block(call.block)) > 1]
    taken = {a for call in repeated or program.calls for a in call.arguments if isinstance(a, str)}
    return frozenset(name for name in program.parameters if name in taken)
