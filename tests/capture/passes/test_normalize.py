"""Normal form: functional ATen operators with one output each; every pass keeps the results."""

from typing import Any

import pytest
import tiny_models
import torch
from one_layer import checked_program, squared
from random_labels import check_random_labels
from torch import fx

from autopar.capture.passes.normalize import IDENTITY
from autopar.capture.program import capture_program
from autopar.runtime.codegen.execute import run_reference

aten = torch.ops.aten


def no_grad_scale(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = y.abs().amax()
    return y / scale


def in_place(y: torch.Tensor) -> torch.Tensor:
    z = y * 2
    z.add_(1)
    return z.relu_()


BODIES = {
    "split": lambda y: torch.cat([2 * p for p in y.split([1, 2, 3], -1)], -1),
    "chunk": lambda y: y.chunk(3, 1)[1] + y.chunk(3, dim=1)[0],
    "unbind": lambda y: y.unbind(1)[2] * y.unbind()[0].sum(),
    "no_grad": no_grad_scale,
    "in_place": in_place,
    "views": lambda y: y.view(-1).view(4, 3, 2).contiguous().permute(1, 0, 2).reshape(-1, 2),
    "casts": lambda y: y.to(torch.float64).type_as(y).float().double(),
    "flat addmm": lambda y: torch.addmm(y[0], y.view(-1, 6), y.t() @ y).view(2, 2, 6),
    "broadcast": lambda y: torch.nn.functional.mse_loss(y, y.detach() * 0.5, reduction="none"),
    "writing into a view": lambda y: y.transpose(0, 1).add_(1).transpose(0, 1) + y[0],
    "writing into a piece": lambda y: y[0].mul_(2) + y[0],
    "autocast": lambda y: y.exp().detach() * y,
    "dropout in eval": lambda y: torch.nn.functional.dropout(y, 0.0) + torch.nn.functional.dropout(y, 0.5, False),
}


def shifted(y: torch.Tensor) -> torch.Tensor:
    """As encoder-decoder models shift their targets to the right."""
    out = y.new_zeros(y.shape)
    out[..., 1:] = y[..., :-1].clone()
    return out + y.new_full((6,), 0.5) + y.new_ones(len(y), 1)


BODIES["new tensors"] = shifted


def operators(graph: fx.Graph) -> list[Any]:
    return [n.target for n in graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("body", BODIES)
def test_the_program_computes_what_the_module_computes(body: str) -> None:
    model = tiny_models.randomise(squared(BODIES[body]).double())
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    program = checked_program(model, x)
    for block in program.blocks:
        found = operators(block.graph)
        assert not [t for t in found if t in IDENTITY]
        assert not [t for t in found if t._schema.is_mutable]
        assert all(len(t._schema.returns) == 1 for t in found)
        assert all("info" in n.meta for n in block.graph.nodes if n.op == "call_function")


def test_without_a_cotangent() -> None:
    """What `no_grad` yields, integers and detached values take no gradient."""
    program = capture_program(squared(no_grad_scale), {"x": torch.zeros(4, 6)})
    nodes = {n.target: n for n in program.blocks[0].graph.nodes}
    assert not nodes[aten.amax.default].meta["info"].differentiable
    assert nodes[aten.div.Tensor].meta["info"].differentiable


class Drops(torch.nn.Module):
    """Draws a mask from the shape of a value with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return (y * torch.bernoulli(y.detach().sigmoid()) * torch.bernoulli(y, p=0.5)).square().mean()


def test_draws_take_no_gradient() -> None:
    """torch has no derivative of them, and a pipeline would ask for it."""
    program = capture_program(Drops(), {"x": torch.randn(4, 4)})
    nodes = [n for b in program.blocks for n in b.graph.nodes if "bernoulli" in str(n.target)]
    assert len(nodes) == 2
    assert not any(n.meta["info"].differentiable for node in nodes for n in (node, *node.all_input_nodes))


@pytest.mark.parametrize("ignored", [0, 5])
def test_a_mean_loss_is_a_sum_over_a_count(ignored: int) -> None:
    model, inputs = tiny_models.llama(2)
    inputs["labels"].flatten()[:ignored] = -100
    program = capture_program(model, inputs)
    assert len(program.denominators) == 1
    assert next(c for c in program.calls if c.phase == "denominator").results == program.denominators
    losses = [n for b in program.blocks for n in b.graph.nodes if n.target is aten.cross_entropy_loss.default]
    assert [n.args[3] for n in losses] == [2]  # a sum
    buffers = dict(model.named_buffers())
    values = run_reference(program, dict(model.named_parameters()), inputs, buffers)
    torch.testing.assert_close(values[program.loss].double(), model(**inputs).loss.double(), rtol=1e-5, atol=1e-5)
    assert int(values[program.denominators[0]]) == int((inputs["labels"][:, 1:] != -100).sum())


def test_new_tensors_do_not_couple_samples() -> None:
    program = capture_program(squared(shifted), {"x": torch.zeros(4, 6)})
    assert program.mixes_batch is None


def windows(y: torch.Tensor) -> torch.Tensor:
    turned = y.transpose(0, 1)
    row, *others = turned.stride()
    return turned.as_strided((2, 2, 4, 6), (row, row, *others)) * turned.sum(0)


def test_strides_are_those_of_the_capture() -> None:
    model, x = squared(windows).double(), torch.randn(4, 3, 6, dtype=torch.float64)
    checked_program(model, x)
    check_random_labels(model, {"x": x}, tp=2)
