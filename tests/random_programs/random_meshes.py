"""A drawn program under drawn meshes, with the solver's labels and with random ones, against one device."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from equivalence import TOLERANCE, Case, case_of, run, worst
from floored_error import floored_error, rms
from program_source import Source
from random_labels import random_labels

from autopar.capture.loss_arguments import named_outputs
from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import BlockLabels
from autopar.ir.sharding import Mesh
from autopar.runtime.parameters.packed import join_packed
from autopar.search.labels.solve import label

LINES = tuple(Mesh.of(tp=n) for n in (2, 3, 4, 5, 6, 8)) + tuple(Mesh.of(dp=n, tp=1) for n in (2, 3, 4, 8))
PLANES = (
    Mesh.of(dp=2, tp=2), Mesh.of(dp=2, tp=3), Mesh.of(dp=2, tp=4), Mesh.of(dp=3, tp=2), Mesh.of(dp=4, tp=2),
    Mesh.of(tp=2, tq=2), Mesh.of(tp=2, tq=3), Mesh.of(tp=2, tq=4), Mesh.of(tp=3, tq=2), Mesh.of(dp=2, tp=2, tq=2),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checked:
    """How many labellings were equal to one device, and how many of the solver's were refused as indivisible."""

    equal: int
    refused: int


def check_program(source: Source, rng: random.Random) -> Checked:
    """Capture once, then compare under a drawn mesh. Raises `AssertionError` with what reproduces it."""
    case = case_of(source.build())
    loss, gradients = unmodified(source)
    assert bool(torch.isfinite(loss)), source
    scale = rms(gradients.values())
    captured = join_packed(case.program, case.gradients)  # a packed linear is captured in pieces
    assert gradients.keys() == captured.keys(), source
    apart = [floored_error(captured[name], grad, scale) for name, grad in gradients.items()]
    assert max(floored_error(case.loss, loss, 0.0), *apart) < TOLERANCE, f"the captured program differs\n{source!r}"
    equal = refused = 0
    meshes = rng.choice((LINES, PLANES))
    mesh = rng.choice([m for m in meshes if source.batch % m.as_dict().get("dp", 1) == 0])
    for name, labels in labellings(case, mesh, rng.randrange(1000)):
        if labels is None:
            refused += 1
            continue
        found = worst(case, run(case, labels, mesh))
        assert found < TOLERANCE, f"{name} on {mesh}: {found:.1e}\n{source!r}"
        equal += 1
    return Checked(equal, refused)


def unmodified(source: Source, relative: float = 0.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the module itself, its weights changed at random by a relative amount."""
    model, inputs = source.build()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            sign = torch.randint(-1, 2, parameter.shape, generator=generator).to(parameter.dtype)
            parameter.mul_(1 + relative * sign)
    loss = named_outputs(model(**inputs))["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ill_conditioned(source: Source) -> bool:
    """Whether rounding-sized changes of the weights move gradients of one device by a tenth of the tolerance.

    So it is where a gradient is zero in exact arithmetic (a factor before a norm that divides it away): what would be
    compared is rounding, as where all gradients are zero: tanh(x).sum() of two opposite numbers. Nothing parallel is
    looked at.
    """
    _, gradients = unmodified(source)
    _, moved = unmodified(source, relative=torch.finfo(torch.float64).eps)
    scale = rms(gradients.values())
    return (
        scale < 1e-12
        or max(floored_error(moved[name], grad, scale) for name, grad in gradients.items()) > TOLERANCE / 10
    )


def labellings(case: Case, mesh: Mesh, seed: int) -> Iterator[tuple[str, tuple[BlockLabels, ...] | None]]:
    """The solver's labels, None where it says that a degree does not divide, and random ones."""
    analysis, cluster = case.analysis(mesh), ClusterSpec.preset("8xh100")
    try:
        yield "solver", label(case.program, analysis, Degrees(), cluster, mesh=mesh).blocks
    except PlanError:
        yield "solver", None
    yield f"random labels {seed}", random_labels(case.program, analysis, mesh, seed)
