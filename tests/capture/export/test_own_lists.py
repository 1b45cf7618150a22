"""Parameters that a module also holds in a plain list, where an export does not find them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.program import capture_program
from autopar.errors import CaptureError
from autopar.runtime.codegen.execute import run_reference
from autopar.testing import check_equivalence


class Decayed(nn.Module):
    """A loss with a penalty on the parameters in a list, and on a buffer in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((), 2.0, dtype=torch.float64))
        self.penalised, self.held = [(list(self.layer.parameters()), 0.3)], {"scale": self.scale}

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layer(x).square().mean()
        for parameters, factor in self.penalised:
            for parameter in parameters:
                loss = loss + factor * parameter.square().sum() * self.held["scale"] + parameter.abs().mean()
        return loss


def test_a_penalty_on_parameters_in_a_list_has_a_gradient() -> None:
    torch.manual_seed(0)
    model, batch = Decayed().double(), {"x": torch.randn(4, 6, dtype=torch.float64)}
    model.penalised, model.held = [(list(model.layer.parameters()), 0.3)], {"scale": model.scale}
    program = capture_program(model, batch)
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    loss = run_reference(program, parameters, batch, {"scale": model.scale})[program.loss]
    expected = model(**batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    for one, other in zip(
        torch.autograd.grad(loss, list(parameters.values())),
        torch.autograd.grad(expected, list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    check_equivalence(model, batch, tp=2, dp=2)


@pytest.mark.parametrize("end", [Tensor.detach_, lambda weight: weight.requires_grad_(False)])
def test_forward_does_not_end_the_training_of_a_parameter(end: Callable[[Tensor], object]) -> None:
    class Ending(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            end(self.weight)
            return (y + super().forward(x)).square().mean()

    with pytest.raises(CaptureError, match="ends the training of a parameter in forward; use detach"):
        capture_program(Ending(6, 6), {"x": torch.randn(4, 6)})
