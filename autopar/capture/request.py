"""`Request`: a model with its inputs and its loss, and how it is captured. It is built once, where a call begins.

Under a precision the parameters have its dtype, and everything else is as it is. Casts that the model writes itself,
such as a norm in float32, stay in the captured graph. Buffers keep their dtype, as they do under FSDP2's mixed
precision.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar._torch import private
from autopar._torch.private import pytree
from autopar.capture.flat_graph import Flat
from autopar.capture.input_leaves import named_leaves
from autopar.capture.loss_arguments import names_of_loss
from autopar.capture.weightless import with_tensors
from autopar.errors import CaptureError, InputError
from autopar.ir.precision import EIGHT_BITS, PRECISIONS, compute_dtype
from autopar.ir.program import Decision, Program
from autopar.rules.scaled_product import check_torchao

Inputs = Mapping[str, Any] | Sequence[Any]
LossFunction = Callable[..., torch.Tensor]  # of (output, target), as torch's losses are, or of other arguments


@dataclass(frozen=True, eq=False, kw_only=True)
class Reading:
    """The values that a model may read while it is captured."""

    specialise: bool = False  # the model may read values that inputs decide
    answers: Mapping[tuple[str, int], Decision] | None = None  # an earlier capture took them, and this one does again
    own_sizes: bool = False  # a size of a tensor is no answer: other inputs have other sizes
    given: Any = None  # the user's own inputs, if the capture runs at other sizes
    buffers: Callable[[str], torch.Tensor] | None = None  # values of buffers of a model on meta
    decided: Mapping[tuple[str, int], Decision] = field(default_factory=dict)  # decisions of the batch of a step
    explains: bool = True  # a failed capture looks for the cause
    assumes: bool = True  # a test for no rows finds some; the caller tries whether this is right


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """What is captured."""

    model: nn.Module
    inputs: Inputs  # a dict of tensors by name, or a tuple
    loss_fn: LossFunction | None = None  # None if the model returns its loss
    training: bool = True
    reading: Reading = field(default_factory=Reading)
    products: str | None = None  # the format of eight bits in linear layers of repeated blocks
    staged: bool = False  # a model of one block is cut at its modules, so that it has pipeline stages
    folder: Path | None = None  # where captures are kept for the next time

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Inputs,
        loss_fn: LossFunction | None = None,
        *,
        training: bool = True,
        specialise: bool = False,
    ) -> "Request":
        """The request for a user's model. With `specialise`, the inputs decide branches."""
        reading = Reading(specialise=specialise)
        return cls(model=private.unwrapped(model), inputs=inputs, loss_fn=loss_fn, training=training, reading=reading)

    @property
    def named_inputs(self) -> dict[str, torch.Tensor]:
        """The tensor inputs by path. Positional ones have the names of `forward`; the last may be the target."""
        return {name: leaf for name, leaf in self._leaves().items() if isinstance(leaf, torch.Tensor)}

    @property
    def fixed_inputs(self) -> dict[str, str]:
        """The inputs that are no tensors, as text. They are constants of a captured program."""
        return {name: repr(leaf) for name, leaf in self._leaves().items() if not isinstance(leaf, torch.Tensor)}

    def _leaves(self) -> dict[str, Any]:
        args, kwargs = split_inputs(self.inputs)
        signature = list(inspect.signature(self.model.forward).parameters)
        positional = args[: len(args) - len(names_of_loss(self.loss_fn))]
        named = {
            signature[i] if i < len(signature) else f"args_{i}": value for i, value in enumerate(positional)
        } | kwargs
        for name, value in zip(names_of_loss(self.loss_fn), args[len(positional) :], strict=False):
            named[name if name not in named else f"loss_{name}"] = value
        return named_leaves(named)

    def with_shapes(self, sizes: Mapping[str, tuple[int, ...]]) -> "Request":
        """The request with every tensor input in the shape given for its name."""
        return self.with_values({name: resized(tensor, sizes[name]) for name, tensor in self.named_inputs.items()})

    def with_values(self, values: Mapping[str, torch.Tensor]) -> "Request":
        """The request with every tensor input replaced by the value of its name."""
        names = iter(self.named_inputs)  # in the order of the tensors
        return replace(self, inputs=pytree.tree_map_only(torch.Tensor, lambda _: values[next(names)], self.inputs))

    @property
    def sizes(self) -> tuple[int, int | None]:
        """The batch size (dimension 0 of the first input) and sequence length (dimension 1 of tokens or embeddings)."""
        named = self.named_inputs
        first = next((t for t in named.values() if t.dim()), None)
        if first is None:
            raise CaptureError(
                "example_inputs hold only scalars; the batch is read from dimension 0 of the first input"
            )
        tokens = [t for t in named.values() if t.dim() >= 2 and not t.dtype.is_floating_point]
        tokens += [t for t in named.values() if t.dim() == 3]  # embedded tokens; the second capture shows if it varies
        return int(first.shape[0]), int(tokens[0].shape[1]) if tokens else None

    def computing_in(self, precision: str | None) -> "Request":
        """The request with parameters and floating inputs in the dtype of a precision. None leaves them as written."""
        if precision is None:
            return self
        checked_precision(precision)
        dtype = compute_dtype(precision)
        cast = pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, self.inputs)
        if precision in EIGHT_BITS:
            check_torchao(precision)
        products = precision if precision in EIGHT_BITS else None
        return replace(self, model=_in_precision(self.model, precision), inputs=cast, products=products)

    def at(self, batch: int, sequence: int | None) -> "Request":
        """The request with its inputs resized."""
        given = self.inputs if self.reading.given is None else self.reading.given
        sizes = self.sizes
        shapes = {name: shape_at(t, sizes, batch, sequence) for name, t in self.named_inputs.items()}
        return replace(self.with_shapes(shapes), reading=replace(self.reading, given=given))

    def deciding_as(self, captured: Flat | Program, *, may_fail: bool = True, own_sizes: bool = False) -> "Request":
        """The request of a capture that takes the decisions of another capture again, with `own_sizes` of tensors."""
        answers = {decision.key: decision for decision in captured.decisions}
        reading = replace(self.reading, answers=answers, explains=not may_fail, own_sizes=own_sizes)
        return replace(self, reading=reading)


def checked_precision(precision: str | None) -> str | None:
    """A precision that parameters can have. Raises InputError for another one."""
    if precision is not None and precision not in PRECISIONS:
        raise InputError(f"precision {precision!r} is unknown; use {', '.join(PRECISIONS)}, or leave it out")
    return precision


def _in_precision(model: nn.Module, precision: str) -> nn.Module:
    """A copy of a model with parameters in the dtype of a precision, and no values. The model itself if it has them."""
    dtype = compute_dtype(precision)
    odd = next((name for name, p in model.named_parameters() if p.is_complex()), None)
    if odd is not None:
        raise InputError(
            f"parameter {odd!r} is complex, and precision {precision!r} would drop its imaginary part; leave the "
            "precision out, or store the parameter as real numbers"
        )
    others = {p for p in model.parameters() if p.is_floating_point() and p.dtype != dtype}
    if not others:
        return model
    try:
        return with_tensors(model, lambda t: torch.empty_like(t, dtype=dtype) if t in others else t)
    except Exception as error:  # a user's attribute may raise anything
        raise InputError(
            f"precision {precision!r} needs a copy of the model with {dtype} parameters, and the copy fails: "
            f"{type(error).__name__}: {error}; convert the model with model.to({dtype}) and leave the precision out"
        ) from error


def has_sequence(t: torch.Tensor, sizes: tuple[int, int | None]) -> bool:
    return t.dim() >= 2 and t.shape[0] == sizes[0] and t.shape[1] == sizes[1]


def _is_mask(t: torch.Tensor, sizes: tuple[int, int | None]) -> bool:
    """Whether a tensor looks like a mask of queries and keys. Ids of as many sequences as tokens stay ids."""
    if t.dim() < 2 or (t.dim() == 2 and has_sequence(t, sizes)):
        return False
    has_mask_shape = not t.dtype.is_floating_point or (t.dim() == 4 and t.shape[1] == 1)
    return t.shape[-1] == t.shape[-2] == sizes[1] and has_mask_shape


def shape_at(t: torch.Tensor, sizes: tuple[int, int | None], batch: int, sequence: int | None) -> tuple[int, ...]:
    shape = list(t.shape)
    if has_sequence(t, sizes) and sequence is not None:
        shape[1] = sequence
    if _is_mask(t, sizes) and sequence is not None:
        shape[-2:] = sequence, sequence
    if shape and shape[0] == sizes[0]:
        shape[0] = batch
    return tuple(shape)


def split_inputs(example_inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a call with these inputs."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return tuple(example_inputs), {}


def resized(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in another shape: its elements are cut, or repeat."""
    if not tensor.numel():
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    rows = tensor.detach()
    for dim, (old, new) in enumerate(zip(tensor.shape, shape, strict=True)):
        if new > old:
            rows = torch.cat([rows] * -(-new // old), dim)
        rows = rows.narrow(dim, 0, new)
    return rows.clone(memory_format=torch.contiguous_format)
