"""Export of an unmodified module with example inputs to one flat graph of ATen operators.

`torch.export` traces the module. The resulting graph has named parameters, buffers and outputs, and a module path per
node. One output is the loss.
"""

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autopar._torch.exports import FAKE_TENSOR_LOG, as_exported, ctc_loss_traced, flex_attention_by, quick_export
from autopar._torch.private import pytree
from autopar.capture.export.assertions import unchecked_distributions
from autopar.capture.export.autograd_functions import own_gradients
from autopar.capture.export.chosen_rows import chosen_of, counted_lengths
from autopar.capture.export.data_reads import DataReads
from autopar.capture.export.failure import capture_error, not_captured, refuse_unusable
from autopar.capture.export.flexible_attention import flexible_attention
from autopar.capture.export.foreign_draws import drawn_so_far, refuse_foreign_draws
from autopar.capture.export.own_changes import (
    as_it_was,
    assigned_in_place,
    attributes_read,
    converted_alike,
    without_caches,
)
from autopar.capture.export.row_tests import TEST, difference
from autopar.capture.flat_graph import (
    Flat,
    exported_constants,
    order_outputs,
    placeholders_of,
)
from autopar.capture.loss_arguments import check_loss_fn, is_loss, named_outputs, outputs_with_loss
from autopar.capture.passes.autocast import Autocast, ambient_autocast, autocast_as
from autopar.capture.passes.in_place import change_views_by_copies, needs_decomposition
from autopar.capture.passes.normalize import detach_regions
from autopar.capture.request import Inputs, LossFunction, Reading, Request, split_inputs
from autopar.capture.state import named_state
from autopar.capture.weightless import device_of_regions, on_device_without_data
from autopar.errors import CaptureError
from autopar.ir.program import Decision

DECISION = "decision "  # an output with this prefix is a value that the model read


@dataclass(frozen=True, eq=False)
class _Reads:
    """How a trace reads values: the names and values of its tensor inputs, and the order of its keywords."""

    reading: Reading
    names: tuple[str, ...]
    values: tuple[torch.Tensor, ...]
    keywords: tuple[str, ...]
    autocast: tuple[Autocast, ...] = ()  # around the call of the model
    # an export restores the attributes of a module, but no list
    tests: list[str] = field(default_factory=list)  # names of outputs: the tests for no rows
    decided: list[Decision] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)


class _Outputs(nn.Module):
    """The model with its output reduced to named tensors. While traced, what it reads are decisions (`DataReads`)."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None = None, *, traced: _Reads | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self._traced = traced
        self._values = {name: tensor for _, name, tensor in named_state(self)}

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        if (traced := self._traced) is None:
            return self.outputs(*args, **kwargs)
        leaves = pytree.tree_leaves((args, [kwargs[name] for name in traced.keywords]))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        inputs = zip(traced.names, tensors, traced.values, strict=True)
        given = [(name, "input", tensor, value) for name, tensor, value in inputs]
        given += [(name.removeprefix("model."), kind, t, self._values[name]) for kind, name, t in named_state(self)]
        changes, read = assigned_in_place(self.model, traced.notes), attributes_read(self.model, traced.reads)
        reading, as_converted = DataReads(self.model, given, traced.reading), converted_alike(self.model)
        kept, around = as_it_was(self.model), autocast_as(traced.autocast)
        with kept, reading as reads, changes, read, as_converted, around, counted_lengths():
            try:
                outputs = self.outputs(*args, **kwargs)
            finally:
                traced.tests[:] = [f"{TEST}{k}" for k in range(len(reads.tests))]
            if next(chosen_of(outputs), None) is not None:
                raise CaptureError("the model cannot be captured: it returns rows that data chooses; return all rows")
        reads.check_rows()
        traced.decided[:] = [decision for decision, _ in reads.decided]
        traced.notes[:0] = reads.notes
        outputs |= {f"{DECISION}{k}": tensor for k, (_, tensor) in enumerate(reads.decided)}
        return outputs | dict(zip(traced.tests, reads.tests, strict=True))

    def outputs(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        if self.loss_fn is None:
            before = getattr(self.model, "loss", None)
            outputs = named_outputs(self.model(*args, **kwargs))
            kept: Any = getattr(self.model, "loss", None)  # some models keep their loss as an attribute
            is_new = isinstance(kept, torch.Tensor) and kept is not before and is_loss(kept)
            return {"loss": kept, **outputs} if is_new and "loss" not in outputs else outputs
        return outputs_with_loss(self.model, self.loss_fn, args, kwargs)


def outputs_of(model: nn.Module, inputs: Inputs, loss_fn: LossFunction | None = None) -> dict[str, torch.Tensor]:
    """The tensors that one call of a model returns, by name, and the loss. The model keeps what the call changes."""
    args, kwargs = split_inputs(inputs)
    with without_caches(model):
        return _Outputs(model, loss_fn).outputs(*args, **kwargs)


@contextlib.contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in a mode, without caches. Afterwards its modules have the mode and the attributes of before."""
    with as_it_was(model), without_caches(model):
        if model.training != training:
            model.train(training)
        yield


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turn garbage collection off: an export makes millions of live objects, and each collection walks all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def capture_flat(request: Request) -> Flat:
    """Trace the model of a request at the shapes of its inputs."""
    model, tests = request.model, list[str]()
    try:
        exported, traced = _exported(request, tests=tests)
        differs = _difference(request, exported) if tests else None
    except Exception:
        if not tests:
            raise
        differs = "the model fails in this branch"
    if differs:
        return _without_tests(request, differs)
    placeholders = placeholders_of(model, exported, tuple(request.named_inputs))
    refuse_unusable(
        exported.graph_module.graph,
        placeholders,
        lambda: _exported(request, lines=True)[0].graph_module.graph,
    )
    changeable = {node: name for node, (kind, name) in placeholders.items() if kind in ("buffer", "input")}
    if needs_decomposition(exported.graph_module, changeable):
        with warnings.catch_warnings(action="ignore"), ctc_loss_traced():
            detach_regions(exported.graph_module)
            change_views_by_copies(exported.graph_module.graph)
            try:
                exported = exported.run_decompositions({})
            except Exception as error:
                raise not_captured(error, model) from error
        placeholders = placeholders_of(model, exported, tuple(request.named_inputs))
    module = exported.graph_module
    for node in module.graph.nodes:  # torch.export leaves dead nodes that are no users of their operands
        for operand in node.all_input_nodes:
            operand.users.setdefault(node)
    for node in list(module.graph.nodes):  # inputs other than tensors are constants of the capture
        if node.op == "placeholder" and node.name not in placeholders and not node.users:
            module.graph.erase_node(node)
    for name, value in exported_constants(exported).items():
        if not hasattr(module, name.replace(".", "_")):
            module.register_buffer(name.replace(".", "_"), value, persistent=False)
    names, updates = order_outputs(exported, placeholders, TEST)
    if "loss" not in names:
        raise CaptureError(
            f"the model returns no loss: its outputs are {list(names)}. Return a scalar, name one output 'loss' "
            "(transformers models do when `labels` are among the inputs), or pass loss_fn=..., a function of "
            "(output, target). If it returns several losses, their sum is loss_fn=lambda output: sum(output.values())."
        )
    return Flat(
        graph=module.graph,
        placeholders=placeholders,
        outputs=names,
        root=module,
        updates=updates,
        decisions=tuple(traced.decided),
        notes=tuple(traced.notes),
        reads=tuple(sorted(traced.reads)),
    )


def _without_tests(request: Request, differs: str) -> Flat:
    """The capture of a model whose tests for no rows are not answered. The error says what `differs`."""
    try:
        return capture_flat(replace(request, reading=replace(request.reading, assumes=False)))
    except CaptureError as error:
        raise CaptureError(
            f"{error}\nThe branch for some rows was tried with none: {differs}.", option=error.option
        ) from error


def _difference(request: Request, exported: Any) -> str | None:
    """What differs between a model and its graph if tests for no rows find none."""
    model, inputs = request.model, tuple(request.named_inputs)

    def run(copied: nn.Module, given: Any) -> Mapping[str, torch.Tensor]:
        with _in_mode(copied, request.training), warnings.catch_warnings(action="ignore"):
            return outputs_of(copied, given, request.loss_fn)

    return difference(model, request.inputs, inputs, exported, run)


def _exported(request: Request, *, lines: bool = False, tests: list[str] | None = None) -> tuple[Any, _Reads]:
    """The exported program, and what the model read. `tests` gets tests for no rows; `lines` asks for stack traces."""
    model, inputs = request.model, request.inputs
    if request.loss_fn is not None:
        check_loss_fn(model, request.loss_fn, *split_inputs(inputs))
    tests = [] if tests is None else tests
    parameters = list(model.parameters())
    on_meta = bool(parameters) and all(parameter.is_meta for parameter in parameters)
    try:  # meta activations cannot meet inputs on a device
        exported = _export(request, model, _on_meta(inputs) if on_meta else inputs, lines, tests)
        device_type = device_of_regions(exported[0].graph_module) if on_meta else None
        if device_type is None:
            return exported
        return _export(request, *on_device_without_data(model, inputs, device_type), lines, tests)
    except CaptureError:
        raise
    except Exception as error:
        failed = error
    if not request.reading.explains:
        raise CaptureError("the model cannot be captured at other sizes") from failed
    given = request if request.reading.given is None else replace(request, inputs=request.reading.given)

    def run(inputs: Inputs) -> None:
        inputs = _on_meta(inputs) if on_meta else inputs
        args, kwargs = split_inputs(pytree.tree_map_only(torch.Tensor, torch.clone, inputs))
        with _in_mode(model, request.training):
            _Outputs(model, request.loss_fn)(*args, **kwargs)

    resized = _resizing(given.named_inputs, request.named_inputs)
    calls = partial(run, given.inputs), partial(run, inputs)
    raise capture_error(failed, model, *calls, resized, on_meta=on_meta) from failed


def _resizing(given: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> str:
    """The sizes of the inputs of a capture that are not the user's, and the remedy. Empty if all are the user's."""
    shapes = {name: (tuple(t.shape), tuple(after[name].shape)) for name, t in given.items() if t.dim()}
    changed = [f"{name!r} from {before} to {after}" for name, (before, after) in shapes.items() if before != after]
    if not changed:
        return ""
    same = [f"{name!r} {before}" for name, (before, after) in shapes.items() if before == after]
    kept = f", and kept {', '.join(same)}" if same else ""
    return (
        f"autopar changed {', '.join(changed)}{kept}, because the batch is dimension 0 of every input that has it. "
        "Give every input that depends on the batch one row for each sample."
    )


def run_on_meta(request: Request) -> None:
    """Call a model on meta as an export does. Raises any exception of the model."""
    args, kwargs = split_inputs(request.inputs)
    in_mode = _in_mode(request.model, request.training)
    with in_mode, warnings.catch_warnings(action="ignore"), as_exported(), _no_collection():
        _Outputs(request.model, request.loss_fn)(*args, **kwargs)


def _export(request: Request, model: nn.Module, inputs: Inputs, lines: bool, tests: list[str]) -> tuple[Any, _Reads]:
    """The exported program, and the values that the model read. `model` and `inputs` may be copies elsewhere."""
    args, kwargs = split_inputs(inputs)
    values = split_inputs(request.inputs)
    tensors = tuple(leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    around = ambient_autocast()
    traced = _Reads(request.reading, tuple(request.named_inputs), tensors, tuple(kwargs), around, tests)
    with ExitStack() as stack:
        stack.enter_context(autocast_as(around, enabled=False))  # a region inside the trace is in the exported graph
        stack.enter_context(_in_mode(model, request.training))
        # torch's log of an operator that fails in a trace: the error says it, and another trace may follow
        stack.enter_context(patch.object(logging.getLogger(FAKE_TENSOR_LOG), "disabled", True))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        speed = contextlib.nullcontext() if lines else quick_export()
        replaced = unchecked_distributions(), flex_attention_by(flexible_attention)
        gradients = own_gradients(model, training=request.training)
        for context in (speed, _no_collection(), ctc_loss_traced(), *replaced, gradients):
            stack.enter_context(context)

        def export() -> Any:
            return torch.export.export(_Outputs(model, request.loss_fn, traced=traced), args, kwargs, strict=False)

        before, exported = drawn_so_far(), export()
        if request.training:
            refuse_foreign_draws(model, before, export)
    return exported, traced


def _on_meta(inputs: Inputs) -> Inputs:
    moved: Inputs = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to("meta"), inputs)
    return moved
