"""One-process equivalence: a model split over ranks must compute the values of one device, in float64.

All ranks run in this process, so a check needs neither a GPU nor a process group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.capture.analysis import Analysis, analyse
from autopar.capture.export.export import Inputs, LossFunction, input_names
from autopar.capture.program import capture_program
from autopar.errors import InputError
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.runtime.codegen.execute import run_reference
from autopar.runtime.parameters.packed import packed_source
from autopar.runtime.verify.error_metrics import error, rms
from autopar.runtime.verify.verify import in_dtype
from autopar.testing.one_process import Outcome, run_in_one_process

# Correct labels have errors of 1e-15 in float64, and of 1e-10 if a gradient is zero except for rounding.
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
    analyses: dict[Mesh, Analysis] = field(default_factory=dict)

    def analysis(self, mesh: Mesh) -> Analysis:
        """The axes of all values on a mesh, analysed once for each mesh."""
        if mesh not in self.analyses:
            self.analyses[mesh] = analyse(self.program, mesh)
        return self.analyses[mesh]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """The relative error of every compared tensor, and the largest error that passes.

    The names are ``loss``, ``output NAME``, ``gradient NAME`` and ``equal copies``. The last one is the largest
    difference between ranks whose values must be equal.
    """

    mesh: Mapping[str, int]
    errors: Mapping[str, float]
    tolerance: float

    @property
    def worst_error(self) -> float:
        """The largest error. A value that is not a number counts as infinite."""
        return max(self.errors.values())

    @property
    def passed(self) -> bool:
        """Whether every error is within the tolerance."""
        return self.worst_error <= self.tolerance

    def __str__(self) -> str:
        name = max(self.errors, key=lambda key: self.errors[key])
        mesh = ", ".join(f"{dim} {degree}" for dim, degree in self.mesh.items())
        return (
            f"{len(self.errors)} values compared on {mesh}: "
            f"largest relative error {self.worst_error:.1e}, of {name} (tolerance {self.tolerance:.0e})"
        )


def run_model(
    model: nn.Module, example_inputs: Inputs, loss_fn: LossFunction | None = None, *, specialise: bool = False
) -> SingleDeviceRun:
    """Capture a model without dropout, and run it in float64 on one device.

    Raises `InputError` if the model is on meta or draws random numbers, and `CaptureError` if it cannot be captured.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError("the model is on meta, so it has no weights to compute with; build it on CPU")
    program = in_dtype(capture_program(model, example_inputs, loss_fn=loss_fn, specialise=specialise), "float64")
    return run_program(program, model, input_names(model, example_inputs, loss_fn))


def run_program(program: Program, model: nn.Module, inputs: Mapping[str, Any]) -> SingleDeviceRun:
    """Run a captured float64 program on one device, with the weights of `model`.

    Inputs that are no tensors, such as flags, are constants of the program and are left out.
    """
    every = {name: p.detach().cpu().double().clone() for name, p in model.named_parameters()}
    whole = packed_source(program, lambda name: every[name])
    parameters = {name: whole(name).detach().clone().requires_grad_() for name in program.parameters}
    buffers = {name: _float64(buffer) for name, buffer in model.named_buffers()}
    own_inputs = {name: _float64(value) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    values = run_reference(program, parameters, own_inputs, buffers)
    values[program.loss].backward()
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return SingleDeviceRun(
        program=program,
        parameters=parameters,
        inputs=own_inputs,
        buffers=buffers,
        loss=values[program.loss].detach(),
        gradients=gradients,
        outputs={key: values[name].detach() for key, name in program.outputs.items()},
    )


def _float64(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.detach().cpu()
    return own.double() if own.is_floating_point() else own


def run_labels(run: SingleDeviceRun, labels: Sequence[BlockLabels], mesh: Mesh, **options: Any) -> Outcome:
    """Run the program under labels on all ranks of a mesh; `options` go to the code generator."""
    return run_in_one_process(
        run.program, run.analysis(mesh), labels, mesh, run.parameters, run.inputs, run.buffers, **options
    )


def compare_runs(run: SingleDeviceRun, outcome: Outcome, mesh: Mesh, tolerance: float = TOLERANCE) -> Equivalence:
    """The errors of loss, outputs, every gradient, and copies that must be equal."""
    scale, missing = rms(run.gradients.values()), torch.full((), float("nan"))
    errors = {"loss": error(outcome.loss, run.loss, 0.0), "equal copies": outcome.disagreement}
    for name, reference in run.outputs.items():
        errors[f"output {name}"] = error(outcome.outputs.get(name, missing), reference, 0.0)
    for name in {**run.gradients, **outcome.gradients}:
        found, reference = outcome.gradients.get(name, missing), run.gradients.get(name, missing)
        errors[f"gradient {name}"] = error(found, reference, scale)
    finite = {name: float("inf") if value != value else value for name, value in errors.items()}
    return Equivalence(mesh=mesh.as_dict(), errors=finite, tolerance=tolerance)
