"""Operators with several outputs: each output is an operator of its own, gradients included."""

from typing import Any

import pytest
import torch
from one_layer import Body, checked_program, squared
from suites import long
from torch import nn

from autopar.capture.program import capture_program
from autopar.capture.record.read import define_output
from autopar.rules.operators import output_of
from autopar.runtime.codegen.execute import run_reference
from autopar.testing import check_equivalence

aten = torch.ops.aten


def _with_indices(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return values * (1 + indices)


BODIES: dict[str, Body] = {
    "topk": lambda y: _with_indices(*y.topk(2, -1)),
    "topk values": lambda y: y.topk(2, 1, largest=False).values,
    "sort": lambda y: _with_indices(*y.sort(1, descending=True)),
    "stable sort": lambda y: _with_indices(*torch.sort(y, dim=0, stable=True)),
    "max": lambda y: _with_indices(*y.max(1)),
    "max kept": lambda y: y.max(-1, keepdim=True).values,
    "min": lambda y: _with_indices(*y.min(0, keepdim=True)),
    "kthvalue": lambda y: _with_indices(*y.kthvalue(2, 1)),
    "median": lambda y: _with_indices(*y.median(-1)),
    "nanmedian": lambda y: _with_indices(*y.nanmedian(-1)),
    "mode": lambda y: _with_indices(*y.round().mode(1)) + y.sum(1),
    "cummax": lambda y: _with_indices(*y.cummax(1)),
    "cummin": lambda y: y.cummin(-1)[0],
    "var_mean": lambda y: torch.mul(*torch.var_mean(y, (0, 1))),
    "var_mean kept": lambda y: torch.mul(*torch.var_mean(y, -1, correction=0, keepdim=True)),
    "std_mean": lambda y: torch.mul(*torch.std_mean(y)),
    "aminmax": lambda y: torch.sub(*torch.aminmax(y, dim=1)),
    "qr": lambda y: torch.linalg.qr(y[0] + 3 * torch.eye(2, 6)).R,
    "slogdet": lambda y: torch.linalg.slogdet(y[:, :, :2].transpose(1, 2) @ y[:, :, :2] + torch.eye(2)).logabsdet,
    "pooling": lambda y: torch.nn.functional.adaptive_max_pool1d(y, 3, return_indices=True)[0],
    "hsplit": lambda y: y.hsplit(2)[1] * y.tensor_split((1, 3), -1)[2].sum(),
    "meshgrid": lambda y: torch.mul(*torch.meshgrid(y[0, 0], y[1, 1], indexing="ij")),
}


@pytest.mark.parametrize("body", BODIES)
def test_values_and_gradients_are_those_of_the_operator(body: str) -> None:
    torch.manual_seed(0)
    model = squared(BODIES[body]).double()
    x = torch.randn(4, 2, 6, dtype=torch.float64)
    checked_program(model, x)


def test_only_the_indices_are_computed_by_the_operator() -> None:
    program = capture_program(squared(BODIES["topk"]), {"x": torch.zeros(4, 2, 6)})
    targets = [n.target for n in program.blocks[0].graph.nodes]
    assert targets.count(output_of(aten.topk.default, 1)) == targets.count(aten.gather.default) == 1
    assert aten.topk.default not in targets


def test_an_output_has_the_name_of_its_operator() -> None:
    operator = output_of(aten.linalg_qr.default, 1)
    assert str(operator) == "autopar.linalg_qr.default_1"
    assert operator is output_of(aten.linalg_qr.default, 1)
    matrix = torch.randn(3, 3)
    assert torch.equal(operator(matrix), torch.linalg.qr(matrix).R)


def test_a_process_that_captured_nothing_finds_every_output() -> None:
    """A list of tensors has as many outputs as a call makes, whatever the schema says."""
    define_output("meshgrid", "indexing_7")
    parts = [torch.arange(2)] * 8
    found = torch.ops.autopar.meshgrid.indexing_7(parts, indexing="ij")
    assert torch.equal(found, torch.meshgrid(parts, indexing="ij")[7])
    define_output("linalg_qr", "default_2")  # it has two
    assert not hasattr(torch.ops.autopar.linalg_qr, "default_2")


@pytest.mark.parametrize("kind", [nn.LSTM, long(nn.GRU), long(nn.RNN)])
def test_recurrent_networks(kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.cells = kind(6, 4, 2, batch_first=True, bidirectional=True, dropout=dropout)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sequence, state = self.cells(x)
            last = state[1] if isinstance(state, tuple) else state
            return sequence.square().mean() + last.square().mean()

    x = torch.randn(4, 3, 6, dtype=torch.float64)
    for dropout in (0.0, 0.5):
        model = Recurrent(dropout).double()
        program = capture_program(model, {"x": x})
        torch.manual_seed(1)
        loss = run_reference(program, dict(model.named_parameters()), {"x": x}, {})[program.loss]
        torch.manual_seed(1)
        assert torch.allclose(loss, model(x), rtol=1e-13)
        check_equivalence(model, {"x": x}, tp=2, dp=2)
