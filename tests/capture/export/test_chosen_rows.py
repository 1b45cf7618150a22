"""Rows that data chooses: all rows stay in the program, and every batch has the loss and gradients of the module."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.program import capture_program
from autopar.errors import CaptureError
from autopar.runtime.codegen.execute import run_reference
from autopar.testing import check_equivalence

Body = Callable[["Layers", Tensor, Tensor], Tensor]
WIDTH, CLASSES = 6, 3


class Layers(nn.Module):
    """Two layers, a router and a function that makes the loss of their output and of an input of integers."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in "abc")
        self.body = body

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.body(self, torch.tanh(self.first(x)), n)


def experts_by_rows(model: Layers, y: Tensor, n: Tensor) -> Tensor:
    flat = y.flatten(0, 1)
    weights, best = model.router(flat).softmax(-1).topk(2)
    out = torch.zeros_like(flat)
    for k, expert in enumerate(model.experts):
        rows, ranks = torch.where(best == k)
        out[rows] += weights[rows, ranks, None] * expert(flat[rows])
    return out.square().sum()


def experts_by_mask(model: Layers, y: Tensor, n: Tensor) -> Tensor:
    out, best = torch.zeros_like(y), model.router(y).argmax(-1)
    for k, expert in enumerate(model.experts):
        mask = best == k
        out[mask] = expert(y[mask]) * y[mask].norm(dim=-1, keepdim=True)
    return out.square().mean()


def labelled(model: Layers, y: Tensor, n: Tensor) -> Tensor:
    mask = n != -100
    logits, labels = model.router(y)[mask], n[mask] % CLASSES
    return (
        F.cross_entropy(logits, labels) + F.mse_loss(logits[:, 0], labels.to(y.dtype)) + logits.mean() + logits.amax()
    )


def roots(model: Layers, y: Tensor, n: Tensor) -> Tensor:
    positive = y > 0.1
    some = y[positive]
    return some.log().sum() + some[some > 0.5].sqrt().sum() + torch.masked_select(y, n[..., None] > 0).sum()


def points(model: Layers, y: Tensor, n: Tensor) -> Tensor:
    places = (n.flatten() >= 0).nonzero().view(-1)
    kinds = n.flatten()[places] % CLASSES
    found = torch.gather(model.router(y.flatten(0, 1)[places]), 1, kinds.unsqueeze(1)).view(-1)
    found = found * torch.ones(places.shape[0]).to(found) + found.view(places.numel(), 1).sum(-1)
    return y.new_zeros(n.numel()).index_add_(0, places, found).view_as(n).sum(1).square().sum()


BODIES = {f.__name__: f for f in (experts_by_rows, experts_by_mask, labelled, roots, points)}


def batch(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    n = torch.randint(0, 5, (4, 5))
    return {"x": torch.randn(4, 5, WIDTH, dtype=torch.float64), "n": n.masked_fill(torch.rand(4, 5) < 0.3, -100)}


@pytest.mark.parametrize("name", BODIES)
def test_another_batch_chooses_other_rows(name: str) -> None:
    torch.manual_seed(0)
    model = Layers(BODIES[name]).double()
    program = capture_program(model, batch(1))
    assert not program.decisions
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    for seed in (1, 2):
        loss, expected = run_reference(program, parameters, batch(seed), {})[program.loss], model(**batch(seed))
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        right = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    check_equivalence(model, batch(1), tp=2, dp=2)


REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sorted": lambda y, n: y[n > 1].cumsum(0).sum(),
    "the first": lambda y, n: y[n > 1][0].sum(),
    "counted": lambda y, n: y[n > 1].sum() / len(y[n > 1]),
    "tested": lambda y, n: y[n > 1].sum() if len(y[n > 1]) else y.sum(),
    "divided": lambda y, n: y[n > 1].sum() / y[n > 1].shape[0],
    "skipped": lambda y, n: y[n > 1].sum() if y[n > 1].numel() == 0 else y.sum(),
    "by another mask": lambda y, n: (y[n > 1] + y[n > 2]).sum(),
    "numbers": lambda y, n: y[n[:, 0] > 1].sum() * len(y[n[:, 0] > 1].tolist()),
    "joined": lambda y, n: torch.cat([y[n > 1], y[n > 2]]).sum(),
    "largest": lambda y, n: y[n > 1].argmax() * y.sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_needs_the_number_of_rows_is_refused(name: str) -> None:
    model = Layers(lambda own, y, n: REFUSED[name](y, n)).double()
    with pytest.raises(CaptureError, match=r"test_chosen_rows.py:\d+: `.*needs the number .* specialise=True"):
        capture_program(model, batch(1))


def test_a_remedy_does_not_help_where_weights_choose() -> None:
    model = Layers(lambda own, y, n: y[y > 0].cumsum(0).sum()).double()
    with pytest.raises(CaptureError, match="needs the number or the order of rows") as found:
        capture_program(model, batch(1))
    assert "specialise" not in str(found.value)
