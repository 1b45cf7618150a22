"""The content of a capture's file: a captured program as plain data, whose sizes may be forms in batch and sequence.

A size is a whole number or a list of terms (`autopar.capture.forms`). An argument of an operator is a plain JSON value
or a tagged mapping: ``{"node": "x"}``, ``{"size": [[1, 1, 1, 0]]}``, ``{"dtype": "float32"}``.
`autopar.capture.record.write` writes records, and `autopar.capture.record.read` reads them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from autopar.capture.forms import Sizes, SizeTerm
from autopar.files.strict_model import StrictModel
from autopar.ir.program import Decision, PartOf, Role

Size = int | tuple[SizeTerm, ...]
# values of PyTorch that are written by name
NAMED = {kind.__name__: kind for kind in (torch.dtype, torch.memory_format, torch.layout, torch.device)}
Word = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]  # torch.fx writes it into Python code


class InfoRecord(StrictModel):
    """A `TensorInfo`."""

    shape: tuple[Size, ...]
    dtype: str
    differentiable: bool


class LiteralRecord(StrictModel):
    """A small tensor that the model's own code made."""

    shape: tuple[int, ...]
    dtype: str
    values: str | None  # the bytes of its elements, row by row, as base64; None for a meta tensor


class LeafRecord(StrictModel):
    """A placeholder: a port of a block, or a buffer or literal from which constants are computed."""

    name: Word
    target: Word
    role: Role
    differentiable: bool
    info: InfoRecord | None
    literal: LiteralRecord | None = None


class NodeRecord(StrictModel):
    """A call of an operator."""

    name: Word
    target: str
    args: tuple[Any, ...]
    kwargs: dict[Word, Any]
    info: InfoRecord
    key: str = ""
    batch_power: int | None = 0


class BlockRecord(StrictModel):
    name: str
    ports: tuple[LeafRecord, ...]
    nodes: tuple[NodeRecord, ...]
    outputs: tuple[str, ...]
    axes: str  # hash of the axes that dimensions share at the sizes of the second capture


class ConstantsRecord(StrictModel):
    leaves: tuple[LeafRecord, ...]
    nodes: tuple[NodeRecord, ...]
    outputs: tuple[str, ...]
    buffers: tuple[str, ...]
    results: tuple[str, ...]


class CallRecord(StrictModel):
    """A `CallSite`. Numbers among its arguments are tagged, and names are text."""

    block: int
    path: str
    arguments: tuple[Any, ...]
    results: tuple[str, ...]
    phase: Literal["denominator", "main"]


class StateRecord(StrictModel):
    """A `StateInfo`."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    persistent: bool
    part: PartOf | None


class InputRecord(StrictModel):
    name: str
    shape: tuple[Size, ...]
    dtype: str
    batch_dim: int | None
    sequence_dim: int | None


# fields of a `Program`
STATE = ("parameters", "unused", "buffers")
SAME = ("loss", "denominators", "outputs", "updates", "decisions", "fixed", "reads")
VERDICTS = ("loss_reduction", "mixes_batch", "ignored")  # a batch of one sequence does not show them


class ProgramRecord(StrictModel):
    """A `Program` at any batch size, and at any sequence length between its two captured lengths.

    `sizes` and `small` are the captured sizes. `sequence_is_fixed` means that attention has a mask that is not causal
    at the larger length. Such a mask might be causal at another length. `loss_reduction`, `mixes_batch` and `ignored`
    are the verdicts at the captured sizes. They hold at a batch of one sequence too, where no axis shows them.
    `not_one_sequence` says why the record does not give the program at one sequence; None if it does. `notes` has the
    notes that do not depend on sizes.
    """

    sizes: Sizes
    small: Sizes
    sequence_is_fixed: bool
    blocks: tuple[BlockRecord, ...]
    calls: tuple[CallRecord, ...]
    parameters: tuple[StateRecord, ...]
    unused: tuple[StateRecord, ...]
    buffers: tuple[StateRecord, ...]
    inputs: tuple[InputRecord, ...]
    constants: ConstantsRecord
    loss: str
    denominators: tuple[str, ...]
    loss_reduction: Literal["sum", "mean"]
    mixes_batch: str | None
    ignored: Mapping[str, int] | None
    not_one_sequence: str | None = None
    outputs: Mapping[str, str]
    updates: Mapping[str, str]
    decisions: tuple[Decision, ...]
    fixed: Mapping[str, str]
    reads: tuple[str, ...] = ()
    notes: tuple[str, ...]
