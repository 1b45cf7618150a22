"""Batch norm in training is ordinary operators; running statistics are buffers with new values."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture.program import capture_program
from autopar.capture.request import Request
from autopar.errors import PlanError
from autopar.ir.degrees import Degrees
from autopar.planning.fixed import capture_for
from autopar.runtime.codegen.execute import captured_modules, run_calls, run_reference, use_running_statistics


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Conv1d(4, 6, 1)
        self.norm = norm
        self.views = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.views:  # another operator that needs export's own decomposition
            y = y * 1
            y[:, 0].mul_(2)
        return self.norm(y).square().sum() + y.sum()


NORMS: dict[str, nn.Module] = {
    "batch": nn.BatchNorm1d(6),
    "momentum": nn.BatchNorm1d(6, momentum=0.37, eps=0.2),
    "no affine": nn.BatchNorm1d(6, affine=False),
    "no statistics": nn.BatchNorm1d(6, track_running_stats=False),
    "instance": nn.InstanceNorm1d(6, affine=True),
    "instance with statistics": nn.InstanceNorm1d(6, track_running_stats=True),
    "evaluated": nn.BatchNorm1d(6).eval(),
}


def prepared(norm: str, *, views: bool) -> tuple[Normed, torch.Tensor]:
    torch.manual_seed(0)
    model = Normed(copy.deepcopy(NORMS[norm])).double()
    model.views = views
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    return model, torch.randn(4, 4, 5, dtype=torch.float64)


@pytest.mark.parametrize("views", [False, True], ids=["plain", "with views"])
@pytest.mark.parametrize("norm", NORMS)
def test_loss_gradients_and_statistics_are_those_of_the_module(norm: str, views: bool) -> None:
    model, x = prepared(norm, views=views)
    program = capture_program(model, {"x": x})
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    values = run_reference(program, parameters, {"x": x}, buffers)
    values[program.loss].backward()
    expected = model(x)
    expected.backward()
    assert torch.allclose(values[program.loss], expected, rtol=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameters[name].grad, parameter.grad, rtol=1e-9, atol=1e-12), name
    changed = {n for n, b in model.named_buffers() if not torch.equal(b, buffers[n])}
    assert changed == program.updates.keys()
    for name, update in program.updates.items():
        assert torch.allclose(values[update], dict(model.named_buffers())[name], rtol=1e-12), name


@pytest.mark.parametrize("norm", ["batch", "no affine", "no statistics", "instance with statistics"])
def test_evaluation_uses_what_was_recorded(norm: str) -> None:
    model, x = prepared(norm, views=False)
    program = capture_program(model, {"x": x})
    modules = captured_modules(program)
    for module in modules:
        use_running_statistics(module.graph)
        module.recompile()
    buffers = dict(model.named_buffers())
    values: dict[str, Any] = {**dict(model.named_parameters()), "x": x, **buffers}
    run_calls(program.calls, lambda _, c: modules[c.block], values, lambda c: c.results)
    assert torch.allclose(values[program.loss], model.eval()(x), rtol=1e-12)
    model.train()


def test_accumulation_is_refused() -> None:
    model, x = prepared("batch", views=False)
    with pytest.raises(PlanError, match=r"accumulate = 2 would change the loss: .*norm"):
        capture_for(Request.of(model, {"x": x}), Degrees(accumulate=2, micro_batch=2))
