"""Gradients that a forward pass computes with `torch.autograd.grad`: the captured program has autograd's gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_layer import OneLayer, checked_program
from suites import long, thinned
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.capture.program import capture_program
from autopar.errors import CaptureError
from autopar.testing.checks import check_equivalence

grad = torch.autograd.grad


class Penalty(nn.Module):
    """The penalty of a critic whose gradient has another norm than 1, at its input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.critic = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_(True)
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivative
            found = self.critic(x)
        (slope,) = grad(found, x, torch.ones_like(found), create_graph=True)
        return (slope.flatten(1).norm(dim=1) - 1).square().mean() + found.mean()


CRITICS: dict[str, Callable[[], list[nn.Module]]] = {
    "tanh": lambda: [nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)],
    "silu": lambda: [nn.Linear(8, 6), nn.SiLU(), nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1)],
    "convolution": lambda: [
        *(
            nn.Unflatten(1, (1, 2, 4)),
            nn.Conv2d(1, 4, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.GroupNorm(2, 4),
            nn.Sigmoid(),
        ),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 1)),
    ],
    "attention": lambda: [
        *(nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True), nn.Linear(4, 1)),
    ],
}


@pytest.mark.parametrize("name", thinned(CRITICS, keep=list(CRITICS)[::2]))
def test_penalties_have_the_second_derivatives_of_autograd(name: str) -> None:
    """Also through the mean of a normalisation, for which autograd has no derivative."""
    torch.manual_seed(0)
    checked_program(Penalty(*CRITICS[name]()).double(), torch.randn(4, 8, dtype=torch.float64))


class Equation(nn.Module):
    """The residual of u_t = u_xx."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place, time = x[:, 0].detach(), x[:, 1].detach()
        place.requires_grad_()
        time.requires_grad = True
        found = self.u(torch.stack([place, time], 1))
        by_place, by_time = grad(found.sum(), (place, time), create_graph=True)
        return F.mse_loss(by_time, grad(by_place.sum(), place, create_graph=True)[0]) + found.square().mean()


class Meta(nn.Module):
    """A loss after one step of gradient descent, with or without the second derivative."""

    def __init__(self, *, first_order: bool) -> None:
        super().__init__()
        self.weight, self.first_order = nn.Parameter(torch.randn(8, 3)), first_order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(x.shape[0], device=x.device) % 3
        loss = F.cross_entropy(torch.tanh(x @ self.weight), labels)
        slope = grad(loss, self.weight, create_graph=not self.first_order)[0]
        return F.cross_entropy(torch.tanh(x.flip(1) @ (self.weight - 0.4 * slope)), labels)


class InPlace(nn.Module):
    """Changes in place before and after the tensor requires gradients, in a region without gradients, and of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(8, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, 0] = 0.5
        x.requires_grad_()
        h = F.relu(self.layer(x) + 1, inplace=True)
        whole = torch.zeros_like(h)
        whole[:, :3] = h[:, 3:]
        whole[:, 3:] = h[:, :3] ** 2
        with torch.no_grad():
            scale = whole.abs().mean()
        energy = self.last(whole / scale).sum()
        (force,) = grad(energy, x, create_graph=True)
        return force.square().sum(1).mean() + 0.1 * energy


class Middle(nn.Module):
    """Gradients at hidden values, three times in a row, and of an unused tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(8, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        part = h[:, :3]
        energy = torch.sin(self.last(torch.cat([part, part * part], 1))).sum()
        of_part, of_weight = grad(energy, [part, self.last.weight], create_graph=True)
        again = grad(grad(energy, h, create_graph=True)[0].square().sum(), h, create_graph=True)[0]
        assert grad(energy, x.clone().requires_grad_(), create_graph=True, allow_unused=True)[0] is None
        return of_part.square().sum() + of_weight.square().mean() + again.sum() + energy


@pytest.mark.parametrize(
    "model", [Equation(), Meta(first_order=True), long(Meta(first_order=False)), long(InPlace()), Middle()]
)
def test_gradients_of_gradients_equal_autograds(model: nn.Module) -> None:
    torch.manual_seed(0)
    checked_program(model.double(), torch.randn(4, 2 if isinstance(model, Equation) else 8, dtype=torch.float64))


@pytest.mark.parametrize("degrees", ({"tp": 2}, {"tp": 1, "dp": 2}), ids=str)
def test_a_penalty_is_split_over_ranks(degrees: dict[str, int]) -> None:
    check_equivalence(Penalty(*CRITICS["silu"]()), {"x": torch.randn(4, 8)}, **degrees)


def refusal(model: nn.Module) -> str:
    with pytest.raises(CaptureError) as caught:
        capture_program(model, {"x": torch.randn(4, 8)})
    return str(caught.value)


def test_a_backward_pass_with_random_numbers_is_refused() -> None:
    layers = CRITICS["tanh"]()
    text = refusal(Penalty(*layers, nn.Dropout(0.5)))
    assert "test_inner_gradients.py:" in text and "turn dropout off" in text
    capture_program(Penalty(*layers, nn.Dropout(0.0)), {"x": torch.randn(4, 8)})


def test_a_backward_pass_that_writes_gradients_is_refused() -> None:
    def written(y: torch.Tensor) -> Any:
        y.sum().backward()
        return y.sum()

    with pytest.raises(CaptureError, match=r"writes gradients in the forward pass; use torch.autograd.grad"):
        capture_program(OneLayer(written), {"x": torch.randn(4, 6)})
