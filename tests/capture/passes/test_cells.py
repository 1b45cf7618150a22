"""Cells of recurrent networks: linear layers and gates, which can be split."""

from typing import Any

import pytest
import tiny_models
import torch
from one_layer import checked_program
from torch import nn

from autopar.capture.program import capture_program
from autopar.cost_model.work.coverage import coverage
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.planning.fixed import choose_labels
from autopar.rules.registry import registered

CELLS = {
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
    "tanh": nn.RNNCell,
    "relu": lambda n, m: nn.RNNCell(n, m, nonlinearity="relu"),
}


class TwoSteps(nn.Module):
    """A cell that is called twice."""

    def __init__(self, cell: nn.Module, size: int) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(6, size), cell, nn.Linear(size, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = None
        for step in (self.first(x), self.first(x * 2)):
            state = self.cell(step, state)
        return self.last(state[0] if isinstance(state, tuple) else state).square().sum()


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_is_captured_as_the_operators_that_it_runs(kind: str) -> None:
    model = tiny_models.randomise(TwoSteps(CELLS[kind](8, 8), 8).double())
    program = checked_program(model, torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    targets = {n.target for block in program.blocks for n in block.graph.nodes if n.op == "call_function"}
    assert targets <= {*registered()}, targets - {*registered()}


@pytest.mark.parametrize("kind", CELLS)
def test_its_products_are_split(kind: str) -> None:
    with torch.device("meta"):
        model = TwoSteps(CELLS[kind](256, 256), 256)
        program = capture_program(model, {"x": torch.randn(64, 6)})
    cluster = ClusterSpec.preset("2xcpu")
    degrees, analysis, found = choose_labels(program, cluster, Degrees(tp=2))
    assert coverage(program, analysis, found.blocks, degrees, cluster).split_flops("tp") > 0.9
