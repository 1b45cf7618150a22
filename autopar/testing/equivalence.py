"""One-process equivalence: a model split over ranks must compute the values of one device, in float64.

All ranks run in this process, so a check needs neither a GPU nor a process group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import nn

from autopar.capture.analysis import Analysis, analyse
from autopar.capture.program import capture_twice
from autopar.capture.request import Request
from autopar.errors import InputError
from autopar.ir.plan import BlockLabels
from autopar.ir.precision import as_float64, like_kind
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.runtime.codegen.execute import run_reference
from autopar.runtime.parameters.packed import packed_source
from autopar.runtime.verify.error_metrics import UNJUDGED, TensorError, Tensors, may_change, tensor_errors
from autopar.runtime.verify.noise import Change, Noise, samples_of
from autopar.runtime.verify.reference import Steps, no_gradient
from autopar.runtime.verify.shared_draws import draws_anything, on_one_device
from autopar.runtime.verify.verify import HOW_TO_JUDGE, in_dtype
from autopar.testing.one_process import RunOutcome, run_in_one_process

# Correct labels have errors of 1e-15 in float64. A gradient that is zero except for rounding has its measured noise.
TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False, kw_only=True)
class SingleDeviceRun:
    """A captured program in float64, its inputs, and its loss, outputs and gradients on one device."""

    program: Program
    parameters: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    updates: Mapping[str, torch.Tensor]
    analyses: dict[Mesh, Analysis] = field(default_factory=dict)

    def analysis(self, mesh: Mesh) -> Analysis:
        """The axes of all values on a mesh, analysed once for each mesh."""
        if mesh not in self.analyses:
            self.analyses[mesh] = analyse(self.program, mesh)
        return self.analyses[mesh]

    @cached_property
    def noise(self) -> Noise:
        """What loss, outputs and gradients move by if only rounding changes."""
        steps = Steps(losses=[self.loss], outputs=dict(self.outputs))
        samples = 0 if draws_anything(self.program) else samples_of(self.program, self.inputs, 1)
        return Noise(self._moved_by, steps, samples)

    def _moved_by(self, change: Change) -> Steps:
        inputs = change.batch(self.program, self.inputs, 1)
        parameters = {n: change.of(n, p).requires_grad_(p.requires_grad) for n, p in self.parameters.items()}
        return reference_values(self.program, parameters, inputs, {n: change.of(n, b) for n, b in self.buffers.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """The relative error of every compared tensor, and the largest error that passes.

    The names are ``loss``, ``output NAME``, ``gradient NAME``, ``buffer NAME`` and ``equal copies``. The last one is
    the largest difference between ranks whose values must be equal. `limits` has the tensors whose measured noise on
    one device allows more than the tolerance. `unjudged` has the noise of the tensors that cannot be judged, because
    rounding alone changes them as much.
    """

    mesh: Mapping[str, int]
    errors: Mapping[str, float]
    tolerance: float
    limits: Mapping[str, float] = field(default_factory=dict)
    unjudged: Mapping[str, float] = field(default_factory=dict)

    @property
    def worst_error(self) -> float:
        """The largest error. A value that is not a number counts as infinite."""
        return max(self._scaled(name) for name in self.errors)

    def _scaled(self, name: str) -> float:
        own = self.errors[name]
        return own if own <= self.tolerance else own * self.tolerance / self.limits.get(name, self.tolerance)

    @property
    def passed(self) -> bool:
        """Whether every error is within the tolerance."""
        return self.worst_error <= self.tolerance

    def __str__(self) -> str:
        name = max(self.errors, key=self._scaled)
        mesh = ", ".join(f"{dim} {degree}" for dim, degree in self.mesh.items())
        text = (
            f"{len(self.errors)} values compared on {mesh}: "
            f"largest relative error {self.worst_error:.1e}, of {name} (tolerance {self.tolerance:.0e})"
        )
        if not self.unjudged:
            return text
        noisiest = max(self.unjudged, key=lambda name: self.unjudged[name])
        return (
            f"{text}; {len(self.unjudged)} cannot be judged, because rounding alone changes them on one device (by "
            f"{self.unjudged[noisiest]:.0%} of {noisiest}); {HOW_TO_JUDGE}"
        )


def run_model(request: Request) -> SingleDeviceRun:
    """Capture a model, and run it in float64 on one device. Dropout of fused attention is off."""
    model = request.model
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError("the model is on meta, so it has no weights to compute with; build it on CPU")
    program = in_dtype(capture_twice(request).program, "float64")
    return run_program(program, model, request.named_inputs)


def run_program(program: Program, model: nn.Module, inputs: Mapping[str, Any]) -> SingleDeviceRun:
    """Run a captured float64 program on one device, with the weights of `model`."""
    every = {name: as_float64(p.cpu()).clone() for name, p in model.named_parameters()}
    whole = packed_source(program, lambda name: every[name])
    parameters = {
        name: whole(name).detach().clone().requires_grad_(info.requires_grad)
        for name, info in program.parameters.items()
    }
    buffers = {name: _float64(buffer) for name, buffer in model.named_buffers()}
    own_inputs = {name: _float64(value) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    found = reference_values(program, parameters, own_inputs, buffers)
    return SingleDeviceRun(
        program=program,
        parameters=parameters,
        inputs=own_inputs,
        buffers=buffers,
        loss=found.losses[0],
        gradients=found.gradients,
        outputs=found.outputs,
        updates=found.buffers,
    )


def reference_values(program: Program, parameters: Tensors, inputs: Tensors, buffers: Tensors) -> Steps:
    """Loss, gradients, outputs and new values of buffers on one device."""
    values = run_reference(program, parameters, inputs, buffers, streams=on_one_device())
    if not values[program.loss].requires_grad:
        raise no_gradient(program)
    values[program.loss].backward()
    return Steps(
        losses=[values[program.loss].detach()],
        gradients={name: p.grad for name, p in parameters.items() if p.grad is not None},
        outputs={key: values[name].detach() for key, name in program.outputs.items()},
        buffers={buffer: values[name].detach() for buffer, name in program.updates.items()},
    )


def _float64(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.detach().cpu()
    return own.to(like_kind(own.dtype, torch.float64))


def run_labels(run: SingleDeviceRun, labels: Sequence[BlockLabels], mesh: Mesh, **options: Any) -> RunOutcome:
    """Run the program under labels on all ranks of a mesh; `options` go to the code generator."""
    return run_in_one_process(
        run.program, run.analysis(mesh), labels, mesh, run.parameters, run.inputs, run.buffers, **options
    )


def compare_runs(run: SingleDeviceRun, outcome: RunOutcome, mesh: Mesh) -> Equivalence:
    """The errors of loss, outputs, every gradient, new values of buffers, and copies that must be equal."""
    reference = _by_kind(run.loss, run.outputs, run.gradients, run.updates)
    found = _by_kind(outcome.loss, outcome.outputs, outcome.gradients, outcome.updates)

    def compare(moved: Sequence[Steps]) -> dict[str, TensorError]:
        errors: dict[str, TensorError] = {}
        every = [_by_kind(m.losses[0], m.outputs, m.gradients, m.buffers) for m in moved]
        for kind, own in reference.items():
            errors |= tensor_errors(found[kind], own, [each[kind] for each in every])
            errors |= {name: TensorError(error=inf) for name in found[kind] if name not in own}
        return errors

    errors = run.noise.verdict(compare, lambda errors, num_runs: may_change(errors.values(), TOLERANCE, num_runs))
    values = {name: inf if m.error != m.error else m.error for name, m in errors.items()}
    return Equivalence(
        mesh=mesh.as_dict(),
        errors={"loss": values.pop("loss"), "equal copies": outcome.disagreement, **values},
        tolerance=TOLERANCE,
        limits={name: m.limit(TOLERANCE) for name, m in errors.items() if m.limit(TOLERANCE) > TOLERANCE},
        unjudged={name: m.noise for name, m in errors.items() if m.outcome(TOLERANCE) == UNJUDGED},
    )


def _by_kind(loss: torch.Tensor, outputs: Tensors, gradients: Tensors, updates: Tensors) -> dict[str, Tensors]:
    """The values of a run by quantity and by their names in an `Equivalence`."""
    named = {"output": outputs, "gradient": gradients, "buffer": updates}
    kinds = {kind: {f"{kind} {name}": value for name, value in values.items()} for kind, values in named.items()}
    return {"loss": {"loss": loss}, **kinds}
