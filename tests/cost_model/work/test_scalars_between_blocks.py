"""A program whose blocks hand on a sum besides the hidden states."""

import torch
from torch import Tensor, nn

from autopar.capture.program import capture_program
from autopar.cost_model.work.program_costs import dtype_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, total: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        half = total / 2  # the sum is the first operand of the block
        y = torch.tanh(self.linear(x))
        return half + y.square().sum(), y


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total = x.sum()
        for layer in self.layers:
            total, x = layer(total, x)
        return total


def test_the_dtype_is_that_of_the_hidden_states() -> None:
    assert dtype_of(capture_program(Summed(), {"x": torch.randn(4, 8)})) == "float32"
