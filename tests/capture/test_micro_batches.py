"""The loss of the batch from the losses of its micro-batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.capture.program import capture_program


class Regression(nn.Module):
    """One layer and a loss with a reduction."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.layer, self.reduction = nn.Linear(4, 4), reduction

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.layer(x), target, reduction=self.reduction)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_loss_is_a_sum_or_a_mean_over_the_batch(reduction: str) -> None:
    program = capture_program(Regression(reduction), {"x": torch.randn(6, 4), "target": torch.randn(6, 4)})
    assert program.mixes_batch is None
    assert program.loss_reduction == reduction
