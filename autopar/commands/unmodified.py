"""The module as its author wrote it, on one device: the reference that no capture has touched.

The module itself runs, on the whole batch of a step. A copy could fail, and other objects may hold its parameters. So
the parameters hold other values for a while, and afterwards the module is what it was.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.capture.export.export import outputs_of
from autopar.capture.export.own_changes import as_it_was, assigned_in_place
from autopar.capture.request import Inputs, Request
from autopar.errors import InputError
from autopar.ir.precision import like_kind
from autopar.models.load import ResolvedModel
from autopar.runtime.model.inputs import split_micro_batches
from autopar.runtime.parameters.state_loading import model_tensors
from autopar.runtime.verify.error_metrics import TOLERANCES, Quantity
from autopar.runtime.verify.float64_program import casts_lower, default_dtype
from autopar.runtime.verify.noise import Change, Noise
from autopar.runtime.verify.reference import LEARNING_RATE, MAX_NORM, Batch, Case, Source, Steps
from autopar.runtime.verify.verify import compare_with_noise


def request_of(model: ResolvedModel, *, specialise: bool = False) -> Request:
    """The request for the program of a model that a text names."""
    return Request.of(model.model, model.example_inputs, model.loss_fn, specialise=specialise)


def tensors_of(model: ResolvedModel) -> dict[str, torch.Tensor]:
    """The tensors of the example inputs by name."""
    return request_of(model).named_inputs


def structured(model: ResolvedModel, batch: Batch) -> Inputs:
    """A batch of tensors by name, in the structure of the example inputs and with their values that are no tensors."""
    return request_of(model).with_values(batch).inputs


def against_module(model: ResolvedModel, case: Case, captured: Steps) -> tuple[tuple[Quantity, ...], tuple[str, ...]]:
    """The captured program in micro-batches against the unmodified module on whole batches, and notes.

    With `per_micro_batch` the module takes the mean of the micro-batches' losses. It runs in its own dtype, and the
    noise is measured on it. A float64 module may compute norms and rotary tables in float32, as its program shows. The
    promoted program does not, so the tolerance is float32's then. A quantity that differs, or cannot be judged, is
    compared in float64 too, unless the module fails in float64. At a kink of a function, such as a sample that lies
    exactly on a pixel, two dtypes have different gradients.
    """
    dtypes = {p.dtype.to_real() for p in model.model.parameters() if p.dtype.is_floating_point or p.dtype.is_complex}
    if casts_lower(case.program):
        dtypes.add(torch.float32)
    tolerance = max(TOLERANCES.get(str(dtype).removeprefix("torch."), max(TOLERANCES.values())) for dtype in dtypes)
    # as often as the module is called
    counts_alike = case.degrees.num_micro_batches == 1 or case.degrees.per_micro_batch
    without = replace(captured, outputs={}, buffers=captured.buffers if counts_alike else {})

    def compared(*, in_float64: bool) -> tuple[tuple[Quantity, ...], tuple[str, ...]]:
        run = partial(module_steps, model, case, in_float64=in_float64)
        plain = run()
        plain.gradients = _zeros(captured.gradients) | plain.gradients
        plain.example = _zeros(captured.example) | plain.example
        return compare_with_noise(plain, without, tolerance, Noise(run, plain, samples=0), prefix="captured ")

    quantities, notes = compared(in_float64=False)
    doubtful = [q.name for q in quantities if not q.passed]
    if doubtful and dtypes != {torch.float64}:
        with suppress(Exception):  # code of the user that may need its own dtype
            exact = {q.name: q for q in compared(in_float64=True)[0]}
            quantities = tuple(exact[q.name] if q.name in doubtful else q for q in quantities)
            which = " and ".join(doubtful)
            notes += (f"{which}: values of the unmodified model are compared in float64, its own dtype is too coarse",)
    return tuple(q for q in quantities if q.where), notes


def module_steps(model: ResolvedModel, case: Case, change: Change | None = None, *, in_float64: bool = False) -> Steps:
    """The steps of the unmodified module in its own dtype or float64, perhaps with other rounding; or `InputError`."""
    degrees, source, dtype = case.degrees, case.source, torch.float64 if in_float64 else None
    count = degrees.num_micro_batches if degrees.per_micro_batch else 1
    like = tensors_of(model)
    if change is not None:
        source = change.source(source, dtype)
    elif dtype is not None:
        source = _wider(source, dtype)

    def typed(name: str, value: torch.Tensor) -> torch.Tensor:
        kind = like[name].dtype
        value = value.to(kind if dtype is None else like_kind(kind, dtype))
        return value if change is None else change.input(name, value)

    def step(batch: Batch) -> torch.Tensor:
        total = torch.zeros(())
        for piece in split_micro_batches(case.program, batch, count):
            inputs = structured(model, {name: typed(name, value) for name, value in piece.items()})
            with assigned_in_place(model.model, []):
                loss = outputs_of(model.model, inputs, model.loss_fn)["loss"] / count
                loss.backward()
            total = total + loss.detach()
        return total

    def gradients() -> dict[str, torch.Tensor]:
        return {n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None}

    steps = Steps()
    with default_dtype(dtype), as_it_was(model.model), _holding(model.model, source):
        optimizer = torch.optim.AdamW(model.model.parameters(), lr=LEARNING_RATE)
        try:
            if case.example is not None:
                steps.example = {"the loss": step(case.example), **gradients()}
                optimizer.zero_grad()
            for batch in case.data:
                steps.losses.append(step(batch))
                steps.gradients = steps.gradients or gradients()
                steps.norms.append(nn.utils.clip_grad_norm_(model.model.parameters(), MAX_NORM))
                optimizer.step()
                optimizer.zero_grad()
        except Exception as error:
            raise InputError(f"the model fails on one device: {type(error).__name__}: {error}") from error
        steps.weights = {n: p.detach().clone() for n, p in model.model.named_parameters()}
        held = dict(model.model.named_buffers(remove_duplicate=False))
        steps.buffers = {n: held[n].clone() for n in case.program.updates}
    return steps


def _zeros(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in values.items()}


def _wider(source: Source, dtype: torch.dtype) -> Source:
    def get(name: str) -> torch.Tensor:
        value = source(name)
        return value.to(like_kind(value.dtype, dtype))

    return get


@contextmanager
def _holding(model: nn.Module, source: Source) -> Iterator[None]:
    """A context in which the parameters and buffers of a model hold values of `source`."""
    slots = model_tensors(model)
    values: Mapping[str, Any] = {name: source(name).detach().clone() for name in slots}
    before = {name: (slot.tensor, slot.tensor.data, slot.tensor.grad) for name, slot in slots.items()}
    for name, slot in slots.items():
        if not slot.tensor.is_meta:
            slot.tensor.data = values[name]
            continue
        trains = slot.tensor.requires_grad
        value = nn.Parameter(values[name], requires_grad=trains) if slot.is_parameter else values[name]
        for owner, attribute in slot.owners:  # a tensor on meta takes no other data
            (owner._parameters if slot.is_parameter else owner._buffers)[attribute] = value
    try:
        yield
    finally:
        for tensor, data, gradient in before.values():
            tensor.grad = None
            tensor.data, tensor.grad = data, gradient
