"""Pieces are cut out of the model's tensors and joined to them again."""

from typing import Any

import torch
from torch import nn

from autopar.capture.program import capture_program
from autopar.ir.program import Program
from autopar.runtime.codegen.execute import run_reference
from autopar.runtime.parameters.packed import by_model_parameter, complete_gradients, join_packed, packed_source


class Halting(nn.Module):
    """What the second piece gives is used without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unpacked = nn.Linear(4, 12), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.linear(x).split([8, 4], -1)
        return self.unpacked(a).square().mean() + b.detach().mean()


def halting() -> tuple[nn.Module, dict[str, torch.Tensor], Program]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Halting().double(), torch.randn(4, 4, dtype=torch.float64)
    return model, {"x": x}, capture_program(model, {"x": x})


def test_values_are_those_of_the_model() -> None:
    model, _, program = halting()
    asked: list[str] = []

    def source(name: str) -> torch.Tensor:
        asked.append(name)
        return dict(model.named_parameters())[name].detach()

    get = packed_source(program, source)
    values = {name: get(name) for name in program.parameters}
    assert sorted(asked) == sorted(n for n, _ in model.named_parameters())  # each whole once
    assert [n for n, _ in by_model_parameter(program)] == [n for n, _ in model.named_parameters()]
    found = join_packed(program, values)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[n], p) for n, p in model.named_parameters())


def test_a_piece_without_a_gradient_is_trained_like_its_rows() -> None:
    """Weight decay reaches rows whose gradient is zero, as it does on one device."""
    model, inputs, program = halting()
    get = packed_source(program, dict(model.named_parameters()).__getitem__)
    parameters: dict[str, Any] = {n: nn.Parameter(get(n).detach().clone()) for n in program.parameters}
    run_reference(program, parameters, inputs, {})[program.loss].backward()
    assert parameters["linear.weight[8:12]"].grad is None
    complete_gradients(program, parameters)
    model(**inputs).backward()
    for tensors in (parameters.values(), model.parameters()):
        torch.optim.AdamW(tensors, lr=0.1, weight_decay=0.5).step()
    found = join_packed(program, {n: p.detach() for n, p in parameters.items()})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach())
