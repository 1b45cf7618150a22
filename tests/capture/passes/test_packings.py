"""Linears whose outputs are cut into unequal pieces are cut themselves; everything else stays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence import case_of, check_random
from tiny_models import randomise
from torch import nn
from torch.nn import functional

from autopar.capture.program import capture_program
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.runtime.parameters.packed import join_packed

Body = Callable[[Any, torch.Tensor], torch.Tensor]


class Packed(nn.Module):
    """One linear with 12 outputs, and a body that uses it."""

    def __init__(self, body: Body, bias: bool = True) -> None:
        super().__init__()
        self.linear, self.other, self.body = nn.Linear(4, 12, bias=bias), nn.Linear(4, 12), body
        self.table = nn.Parameter(torch.zeros(4, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x).square().mean() + (self.other(x) @ self.table.t()).mean()


def two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A number that depends on every element, and on their order."""
    return torch.cat([a * torch.arange(1, 1 + a.shape[-1]), b.exp()], -1)


def slices(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    return two(y[..., :6], torch.cat([y[..., 6:9], y[..., 9:].tanh()], -1))


def heads(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x).view(*x.shape[:2], 6, 2).transpose(1, 2)
    return two(y[:, :-2].flatten(1), y[:, [-2, -1]].flatten(1))


def selects(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x).view(*x.shape[:2], 3, 4)
    return two(y[:, :, :2].flatten(2), y[:, :, 2])


def clamped(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = m.linear(x).clamp(min=-0.5, max=0.5).split([8, 4], -1)
    return two(a, b)


def conv1d(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = torch.addmm(m.linear.bias, x.view(-1, 4), m.table).view(*x.shape[:2], 12).split([9, 3], -1)
    return two(a, b)


def product(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = (x @ m.linear.weight.T + m.linear.bias).split([8, 4], -1)
    return two(a, b)


def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = m.linear(x).split([8, 4], -1)
    c, d = m.linear(x * 2).split([8, 4], -1)
    return two(a * c, b * d)


def gaps(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    return two(y[..., 1:4], y[..., 6:11])


CUT: dict[str, tuple[Body, list[str]]] = {
    "slices": (slices, ["linear.weight[0:6]", "linear.weight[6:9]", "linear.weight[9:12]"]),
    "heads": (heads, ["linear.weight[0:8]", "linear.weight[8:12]"]),
    "selects": (selects, ["linear.weight[0:8]", "linear.weight[8:12]"]),
    "clamped": (clamped, ["linear.weight[0:8]", "linear.weight[8:12]"]),
    "product": (product, ["linear.weight[0:8]", "linear.weight[8:12]"]),
    "twice": (twice, ["linear.weight[0:8]", "linear.weight[8:12]"]),
    "gaps": (gaps, ["linear.weight[0:6]", "linear.weight[6:12]"]),
}


def equal(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b, c = m.linear(x).chunk(3, -1)
    return two(a, b + c)


def whole_too(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    return two(y[..., :8], y.sum(-1, keepdim=True))


def overlapping(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    return two(y[..., :8], y[..., 6:])


def cut_differently(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = m.linear(x).split([8, 4], -1)
    c, d = m.linear(x * 2).split([6, 6], -1)
    return two(torch.cat([a, b], -1), torch.cat([c, d], -1))


def weight_elsewhere(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = m.linear(x).split([8, 4], -1)
    return two(a, b) * m.linear.weight.sum()


def bias_elsewhere(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = m.linear(x).split([8, 4], -1)
    return two(a, b) * m.linear.bias.sum()


def across_units(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x).view(*x.shape[:2], 3, 4)
    return two(y[..., :1].flatten(2), y[..., 1:].flatten(2))


def rolled(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = m.linear(x).roll(1, -1).split([8, 4], -1)
    return two(a, b)


def computed_weight(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = functional.linear(x, m.linear.weight * 2, m.linear.bias).split([8, 4], -1)
    return two(a, b)


WHOLE: dict[str, Body] = {
    f.__name__: f
    for f in (
        equal, whole_too, overlapping, cut_differently, weight_elsewhere, bias_elsewhere, across_units, rolled,
        computed_weight,
    )
}  # fmt: skip


def example(body: Body) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 6, 4, generator=generator, dtype=torch.float64)
    return randomise(Packed(body).double()), {"x": x}


def cut(program: Program, kind: str = "weight") -> list[str]:
    return [n for n, info in program.parameters.items() if info.part is not None and f".{kind}[" in n]


def against_the_model(body: Body) -> Any:
    """The traced case, after its joined gradients were compared with the model's."""
    model, inputs = example(body)
    case = case_of((model, inputs))
    loss = model(**inputs)
    loss.backward()
    torch.testing.assert_close(case.loss, loss.detach())
    gradients = join_packed(case.program, case.gradients)
    used = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == used.keys()
    for name, gradient in used.items():
        torch.testing.assert_close(gradients[name], gradient)
    return case


@pytest.mark.parametrize("body", list(CUT))
def test_unequal_pieces(body: str) -> None:
    """The pieces have the names of their rows, make up the whole, and compute what it computed, in shards too."""
    function, names = CUT[body]
    case = against_the_model(function)
    assert cut(case.program) == names
    assert cut(case.program, "bias") == [n.replace("weight", "bias") for n in names]
    parts = [case.program.parameters[n].part for n in names]
    assert [(p.name, p.dim, p.shape) for p in parts] == [("linear.weight", 0, (12, 4))] * len(names)
    assert [case.program.parameters[n].shape for n in names] == [(p.stop - p.start, 4) for p in parts]
    for seed in range(2):
        check_random(case, Mesh.of(dp=2, tp=2), seed)


def test_a_transposed_weight() -> None:
    """A convolution of width 1, as GPT-2 has it, stores (in, out): columns are cut."""
    model, inputs = example(lambda m, x: conv1d(m, x))
    model.forward = lambda x: model.body(model, x).square().mean()  # type: ignore[method-assign]
    program = capture_program(model, inputs)
    names = [n for n, info in program.parameters.items() if info.part is not None]
    assert names == ["table[:, 0:9]", "table[:, 9:12]", "linear.bias[0:9]", "linear.bias[9:12]"]
    assert [program.parameters[n].shape for n in names] == [(4, 9), (4, 3), (9,), (3,)]


@pytest.mark.parametrize("body", list(WHOLE))
def test_what_stays_whole(body: str) -> None:
    assert not cut(against_the_model(WHOLE[body]).program)


def test_tied_weights_stay_whole() -> None:
    model, inputs = example(lambda m, x: slices(m, x) + m.other(x))
    assert isinstance(model, Packed)
    model.other.weight = model.linear.weight
    assert not cut(capture_program(model, inputs))


def test_frozen_pieces_are_frozen() -> None:
    model, inputs = example(slices)
    assert isinstance(model, Packed)
    model.linear.weight.requires_grad_(False)
    program = capture_program(model, inputs)
    assert {info.requires_grad for n, info in program.parameters.items() if n.startswith("linear.weight[")} == {False}
    assert {info.requires_grad for n, info in program.parameters.items() if n.startswith("linear.bias[")} == {True}
