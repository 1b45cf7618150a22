"""A captured model with its single-device results, and the comparison of a labelling with them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_models import Example

from autopar.capture.analysis import Analysis, analyse
from autopar.capture.program import capture_program
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import BlockLabels, Degrees
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.runtime.codegen.execute import run_reference
from autopar.runtime.parameters.packed import with_pieces
from autopar.runtime.verify.error_metrics import error, rms
from autopar.runtime.verify.float64_program import promoted
from autopar.search.labels.solve import LabelOptions, label
from autopar.testing.one_process import Outcome, run_in_one_process
from autopar.testing.random_labels import random_labels

TOLERANCE = 1e-9  # float64; what a right labelling shows is 1e-15, and 1e-10 where a gradient is zero but for rounding


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """A promoted program with the values and gradients that one device computes."""

    program: Program
    parameters: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    analyses: dict[Mesh, Analysis] = field(default_factory=dict)

    def analysis(self, mesh: Mesh) -> Analysis:
        if mesh not in self.analyses:
            self.analyses[mesh] = analyse(self.program, mesh)
        return self.analyses[mesh]


def case_of(example: Example) -> Case:
    """Capture a model, run it on one device."""
    model, inputs = example
    program = promoted(capture_program(model, inputs))
    every = {n: p.detach().double().clone().requires_grad_() for n, p in model.named_parameters()}
    whole = with_pieces(program, lambda name: every[name])
    parameters = {n: whole(n).detach().clone().requires_grad_() for n in program.parameters}
    buffers = {n: b.double() if b.is_floating_point() else b for n, b in model.named_buffers()}
    values = run_reference(program, parameters, inputs, buffers)
    values[program.loss].backward()
    gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    assert gradients.keys() == parameters.keys()
    return Case(
        program=program,
        parameters=parameters,
        inputs=inputs,
        buffers=buffers,
        loss=values[program.loss].detach(),
        gradients=gradients,
        outputs={key: values[name].detach() for key, name in program.outputs.items()},
    )


def run(case: Case, labels: Sequence[BlockLabels], mesh: Mesh, **options: Any) -> Outcome:
    return run_in_one_process(
        case.program, case.analysis(mesh), labels, mesh, case.parameters, case.inputs, case.buffers, **options
    )


def worst(case: Case, outcome: Outcome) -> float:
    """The worst relative error over loss, outputs, every gradient, and copies that must be equal."""
    assert outcome.gradients.keys() == case.gradients.keys()
    scale = rms(case.gradients.values())
    errors = [error(outcome.gradients[name], reference, scale) for name, reference in case.gradients.items()]
    errors += [error(outcome.outputs[name], reference, 0.0) for name, reference in case.outputs.items()]
    errors += [error(outcome.loss, case.loss, 0.0), outcome.disagreement]
    return max(float("inf") if math.isnan(e) else e for e in errors)


def check(case: Case, labels: Sequence[BlockLabels], mesh: Mesh, **options: Any) -> None:
    error = worst(case, run(case, labels, mesh, **options))
    assert error < TOLERANCE, error


def check_random(case: Case, mesh: Mesh, seed: int, **options: Any) -> None:
    check(case, random_labels(case.program, case.analysis(mesh), mesh, seed), mesh, **options)


def labelled(
    case: Case, mesh: Mesh, sequence_parallel: bool | None = None, *, regather: bool = True
) -> tuple[BlockLabels, ...]:
    """The solver's labels of a case on a mesh of `dp` and `tp`."""
    names = mesh.as_dict()
    degrees = Degrees(tp=names.get("tp", 1), dp_shard=names.get("dp", 1), sequence_parallel=sequence_parallel)
    options = LabelOptions(regather=regather)
    cluster = ClusterSpec.preset("8xh100")
    return label(case.program, case.analysis(mesh), degrees, cluster, mesh=mesh, options=options).blocks
