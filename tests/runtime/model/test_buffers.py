"""Buffers changed in forward: batch norm under data parallelism keeps the statistics of the whole batch."""

from collections.abc import Callable, Mapping

import conv_models
import pytest
import torch
from equivalence import Case, case_of, check, check_random, labelled, run
from suites import long, thinned
from torch import nn

from autopar.capture.analysis import analyse
from autopar.capture.program import capture_program
from autopar.ir.sharding import Mesh
from autopar.testing.one_process import run_in_one_process

EXACT = 1e-12
STEPS = 3
LEARNING_RATE = 0.05
DATA = [Mesh.of(dp=2, tp=1), Mesh.of(dp=4, tp=1), Mesh.of(dp=2, tp=2)]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-3))


@pytest.mark.parametrize("mesh", thinned(DATA, keep=DATA[-1:]), ids=str)
def test_three_steps_of_a_residual_network(mesh: Mesh) -> None:
    """Loss, every gradient and all running statistics equal those of the module itself, step by step."""
    model, inputs = conv_models.resnet()
    case = case_of((model, inputs))
    labels = labelled(case, mesh)
    parameters, buffers = dict(case.parameters), {n: b.clone() for n, b in model.named_buffers()}
    for step in range(STEPS):
        batch = conv_models.images(seed=10 + step)
        outcome = run_in_one_process(case.program, case.analysis(mesh), labels, mesh, parameters, batch, buffers)
        model.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        assert outcome.disagreement < EXACT
        assert relative(outcome.loss, loss.detach()) < EXACT
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert relative(outcome.gradients[name], parameter.grad) < EXACT, name
            parameter.data -= LEARNING_RATE * parameter.grad
            parameters[name] = (parameters[name] - LEARNING_RATE * outcome.gradients[name]).detach()
        buffers |= outcome.updates
        for name, buffer in model.named_buffers():
            assert relative(buffers[name], buffer) < EXACT, name


def test_a_split_batch_is_split() -> None:
    """Every convolution works on this rank's samples; nothing of the size of an image is gathered."""
    case, mesh = case_of(conv_models.resnet()), Mesh.of(dp=2, tp=1)
    for block in labelled(case, mesh):
        convolutions = {label for key, label in block.labels.items() if ":conv2d" in key}
        assert convolutions <= {("n.0", "I"), ("n.0", "R")}, block.name


@pytest.mark.parametrize("mesh", DATA, ids=str)
def test_convnext(mesh: Mesh) -> None:
    case = case_of(conv_models.convnext())
    check(case, labelled(case, mesh), mesh)


@pytest.mark.parametrize("model", [conv_models.resnet, conv_models.convnext], ids=["resnet", "convnext"])
@pytest.mark.parametrize("seed", (0, long(1)))
def test_random_labels(model: Callable[[], conv_models.Example], seed: int) -> None:
    check_random(case_of(model()), Mesh.of(dp=2, tp=2), seed)


def test_new_values_are_whole_on_every_rank() -> None:
    case, mesh = case_of(conv_models.resnet()), Mesh.of(dp=4, tp=1)
    updates: Mapping[str, torch.Tensor] = run(case, labelled(case, mesh), mesh).updates
    assert updates.keys() == case.buffers.keys()
    assert updates["stem.1.running_mean"].shape == (4,)
    assert int(updates["stem.1.num_batches_tracked"]) == int(case.buffers["stem.1.num_batches_tracked"]) + 1


class Written(nn.Module):
    """Writes what it is given, what is constant, and one value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name in ("seen", "filled", "twice", "again"):
            self.register_buffer(name, torch.zeros(8, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.seen.copy_(x)
        self.filled.fill_(3.0)
        self.twice.copy_(y.detach())
        self.again.copy_(y.detach())
        return y.square().mean()


def test_buffers_that_take_inputs_constants_and_shared_values() -> None:
    model = Written().double()
    x = torch.randn(8, 4, dtype=torch.float64)
    program, mesh = capture_program(model, {"x": x}), Mesh.of(dp=2, tp=1)
    case = Case(
        program=program,
        parameters={n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()},
        inputs={"x": x},
        buffers={n: b.clone() for n, b in model.named_buffers()},
        loss=torch.zeros(()),
        gradients={},
        outputs={},
        updates={},
        analyses={mesh: analyse(program, mesh)},
    )
    outcome = run(case, labelled(case, mesh), mesh)
    model(x)
    for name, buffer in model.named_buffers():
        assert torch.allclose(outcome.updates[name], buffer, rtol=1e-14), name
