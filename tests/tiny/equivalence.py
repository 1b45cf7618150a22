"""Shorthands of the tests for `autopar.testing.equivalence`: a case is a tiny model with its single-device run."""

from collections.abc import Sequence
from typing import Any

from random_labels import random_labels
from tiny_models import Example

from autopar.capture.program import capture_program
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import BlockLabels
from autopar.ir.sharding import Mesh
from autopar.runtime.verify.float64_program import promoted
from autopar.search.labels.solve import label
from autopar.testing.equivalence import TOLERANCE, compare_runs, run_labels, run_program
from autopar.testing.equivalence import SingleDeviceRun as Case
from autopar.testing.one_process import RunOutcome

run = run_labels


def case_of(example: Example) -> Case:
    """Capture a model with its dropout, and run it on one device. Every trained parameter must have a gradient."""
    model, inputs = example
    case = run_program(promoted(capture_program(model, inputs)), model, inputs)
    assert case.gradients.keys() == {name for name, info in case.program.parameters.items() if info.requires_grad}
    return case


def worst(case: Case, outcome: RunOutcome) -> float:
    """The worst relative error over loss, outputs, every gradient, and copies that must be equal."""
    assert outcome.gradients.keys() == case.gradients.keys()
    return compare_runs(case, outcome, Mesh.of()).worst_error


def check(case: Case, labels: Sequence[BlockLabels], mesh: Mesh, **options: Any) -> None:
    error = worst(case, run(case, labels, mesh, **options))
    assert error < TOLERANCE, error


def check_random(case: Case, mesh: Mesh, seed: int, **options: Any) -> None:
    check(case, random_labels(case.program, case.analysis(mesh), mesh, seed), mesh, **options)


def labelled(
    case: Case,
    mesh: Mesh,
    sequence_parallel: bool | None = None,
    *,
    regather: bool = True,
    dispatch: str | None = None,
) -> tuple[BlockLabels, ...]:
    """The solver's labels of a case on a mesh of `dp`, `ep` and `tp`."""
    names = mesh.as_dict()
    degrees = Degrees(
        tp=names.get("tp", 1),
        dp_shard=names.get("dp", 1) * names.get("ep", 1),
        ep=names.get("ep", 1),
        dispatch=dispatch,
        sequence_parallel=sequence_parallel,
    )
    cluster = ClusterSpec.preset("8xh100")
    return label(case.program, case.analysis(mesh), degrees, cluster, mesh=mesh, regather=regather).blocks
