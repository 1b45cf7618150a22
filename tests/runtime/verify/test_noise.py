"""Measured noise on a deep convolutional network: correct runs pass, planted faults do not."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from deep_convolutions import deep_convolutions
from equivalence import labelled
from torch import nn

from autopar.capture.program import capture_program
from autopar.errors import InputError, VerificationError
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.runtime.verify.error_metrics import distance, size, tensor_errors
from autopar.runtime.verify.float64_program import promoted
from autopar.runtime.verify.noise import MAX_RUNS, Change, Noise
from autopar.runtime.verify.reference import Batch, Case, Steps, check_reference, reference_steps
from autopar.runtime.verify.verify import compare_with_noise
from autopar.testing import check_equivalence
from autopar.testing.equivalence import SingleDeviceRun, compare_runs, run_labels, run_program
from autopar.testing.one_process import RunOutcome

MESH = Mesh.of(dp=2, tp=2)
BIAS, FIRST, NORM = "layers.7.0.bias", "layers.7.1", "layers.7.2"


@cache
def single_device() -> SingleDeviceRun:
    model, inputs = deep_convolutions()
    return run_program(promoted(capture_program(model, inputs)), model, inputs)


@cache
def in_parallel() -> RunOutcome:
    return run_labels(single_device(), labelled(single_device(), MESH), MESH)


def scaled(values: Mapping[str, torch.Tensor], name: str, factor: float) -> dict[str, torch.Tensor]:
    return {**values, name: values[name] * factor}


def test_a_correct_run_passes_by_its_noise() -> None:
    report = compare_runs(single_device(), in_parallel(), MESH)
    assert report.passed
    assert report.errors[f"gradient {BIAS}"] > 1e-3, "the gradient of this bias is rounding alone"
    assert f"gradient {BIAS}" in report.limits
    assert f"gradient {NORM}.weight" not in report.limits


FAULTS: dict[str, Callable[[RunOutcome], RunOutcome]] = {
    "a gradient off by a millionth": lambda o: replace(o, gradients=scaled(o.gradients, f"{NORM}.weight", 1 + 1e-6)),
    "a norm's gradient of half of the ranks": lambda o: replace(o, gradients=scaled(o.gradients, f"{NORM}.bias", 0.5)),
    "a bias that the norm's mean does not see": lambda o: replace(
        o, gradients={**o.gradients, BIAS: o.gradients[f"{NORM}.bias"] * 1e-6}
    ),
    "a running mean off by a millionth": lambda o: replace(
        o, updates=scaled(o.updates, f"{FIRST}.running_mean", 1 + 1e-6)
    ),
    "a running mean of rounding that is not": lambda o: replace(
        o, updates={**o.updates, f"{NORM}.running_mean": o.updates[f"{FIRST}.running_mean"] * 1e-6}
    ),
    "no gradient": lambda o: replace(o, gradients={n: g for n, g in o.gradients.items() if n != BIAS}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_differ(fault: str) -> None:
    assert not compare_runs(single_device(), FAULTS[fault](in_parallel()), MESH).passed


def program_of(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Program:
    return promoted(capture_program(model, dict(inputs)))


def source_of(model: nn.Module) -> Callable[[str], torch.Tensor]:
    every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return lambda name: every[name].detach()


def steps_of(model: nn.Module, inputs: Batch, num_steps: int = 2) -> tuple[Steps, Noise]:
    program, degrees = program_of(model, inputs), Degrees()
    typed = {n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}
    source, data = source_of(model), [typed] * num_steps

    def run(change: Change) -> Steps:
        changed = [change.batch(program, batch, 1) for batch in data]
        return reference_steps(Case(program, change.source(source, torch.float64), changed, degrees))

    reference = reference_steps(Case(program, source, data, degrees))
    return reference, Noise(run, reference, samples=len(inputs["target"]))


def test_statistics_of_a_part_of_the_batch_differ() -> None:
    """What a data-parallel rank would compute from its own samples alone."""
    model, inputs = deep_convolutions()
    reference, noise = steps_of(model, inputs)
    quantities, _ = compare_with_noise(reference, reference, 1e-9, noise)
    assert all(q.passed and q.max_error == 0.0 for q in quantities)
    other = {n: v.flip(0) for n, v in inputs.items()}
    flipped, _ = steps_of(model, other)
    flipped.outputs = reference.outputs
    quantities, notes = compare_with_noise(reference, flipped, 1e-9, noise)
    assert all(q.passed for q in quantities), quantities
    assert any("their measured noise" in note for note in notes)
    local, _ = steps_of(model, {n: torch.cat((v[:4], v[:4])) for n, v in inputs.items()})
    quantities, _ = compare_with_noise(reference, local, 1e-9, noise)
    assert not any(q.passed for q in quantities if q.name in ("loss", "gradients", "buffers changed in forward"))


class Chaotic(nn.Module):
    """Doubles every difference a hundred times: no bit of the result is certain.

    The sums of `down` are long, so that two halves of them round differently in every kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 250), nn.Linear(250, 8)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.sigmoid(self.down(torch.tanh(self.up(x))))
        for _ in range(100):
            y = 3.99 * y * (1 - y)
        return {"loss": nn.functional.cross_entropy(y, target), "y": y}


def chaotic() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Chaotic().double(), {"x": torch.randn(4, 8, dtype=torch.float64), "target": torch.arange(4)}


def test_a_reference_that_is_noise_judges_nothing() -> None:
    """Every difference would be within 8 × its noise."""
    with pytest.raises(VerificationError, match=r"cannot be judged, because rounding alone changes them on one device"):
        check_equivalence(*chaotic(), tp=2, dp=2)
    model, inputs = chaotic()
    run = run_program(promoted(capture_program(model, inputs)), model, inputs)
    outcome = run_labels(run, labelled(run, Mesh.of(tp=1)), Mesh.of(tp=1))
    assert compare_runs(run, outcome, Mesh.of(tp=1)).passed, "the same bits are equal"
    halved = replace(outcome, gradients=scaled(outcome.gradients, "up.weight", 0.5))
    found = compare_runs(run, halved, Mesh.of(tp=1))
    assert not found.passed
    assert found.errors["gradient up.weight"] < 8 * found.unjudged["gradient up.weight"]


def test_steps_that_are_noise_are_named() -> None:
    model, inputs = chaotic()
    reference, noise = steps_of(model, inputs, num_steps=1)
    other, _ = steps_of(model, {**inputs, "x": inputs["x"] * (1 + 1e-13)}, num_steps=1)
    quantities, notes = compare_with_noise(reference, other, 1e-9, noise)
    outcomes = {q.name: q.outcome for q in quantities}
    assert outcomes["outputs"] == outcomes["gradients"] == "cannot be judged"
    assert not any(q.passed for q in quantities if q.name in ("outputs", "gradients"))
    assert any(note.startswith("gradients: 4 cannot be judged") and "use float64" in note for note in notes)


class ByPlace(nn.Module):
    """The loss weighs samples by their place in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(x.shape[0], dtype=x.dtype)
        return (weights * (self.inner(x).squeeze(1) - target).square()).mean()


def test_a_permutation_that_changes_the_loss_is_no_noise() -> None:
    inputs = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), "target": torch.rand(4)}
    reference, noise = steps_of(ByPlace(), inputs, num_steps=1)
    found: list[Steps] = []
    noise.verdict(lambda runs: found.__setitem__(slice(None), runs), lambda _, num_runs: num_runs < MAX_RUNS)
    assert len(found) == MAX_RUNS - 1
    assert all(abs(run.losses[0] - reference.losses[0]) < 1e-12 for run in found)


def test_a_loss_that_is_not_a_number_is_refused() -> None:
    model, inputs = deep_convolutions(depth=2)
    with torch.no_grad():
        model.head.weight.mul_(float("nan"))
    with pytest.raises(InputError, match="the loss is NaN on one device too, from step 0 on"):
        check_reference(steps_of(model, inputs)[0])
    steps = steps_of(*deep_convolutions(depth=2))[0]
    steps.gradients["head.bias"][0] = float("nan")
    steps.norms[0] = torch.tensor(float("nan"))
    with pytest.raises(InputError, match=r"gradients, first of 'head.bias', are NaN or infinite on one device too"):
        check_reference(steps)


def test_imaginary_parts_are_compared_and_moved() -> None:
    value = torch.randn(5, dtype=torch.complex64)
    other = torch.complex(value.real, value.imag + 1)
    assert distance(other, value) == pytest.approx(5**0.5)
    assert size(value) == pytest.approx(float(value.norm()))
    assert not tensor_errors({"w": other}, {"w": value}, [])["w"].passes(1e-3)
    moved = Change(seed=1).of("w", value)
    assert not torch.equal(moved.imag, value.imag) and distance(moved, value) < 1e-6 * size(value)


def test_whole_numbers_in_inputs_do_not_move() -> None:
    """A target of 1 would be no probability, and an index of 3.0 the row before."""
    x = torch.tensor([0.0, 1.0, 3.0, 0.25, -7.5]).repeat(8).double()
    moved = Change(seed=0, epsilons=4).input("x", x)
    assert torch.equal(moved.view(8, 5)[:, :3], x.view(8, 5)[:, :3])
    assert (moved != x).any() and torch.allclose(moved, x, 1e-14)
