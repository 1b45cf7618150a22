"""The gradient norm of complex parameters counts imaginary parts."""

import pytest
import torch

from autopar.runtime.parameters.gradients import gradient_norm


def test_imaginary_parts_count() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.tensor([3 + 4j, 12j])
    assert gradient_norm({"w": parameter}, lambda _: 1, 1, torch.device("cpu")) == pytest.approx(13.0)
