"""Rows that data chooses: all rows stay in the program, and every batch has the loss and gradients of the module."""

from collections.abc import Callable
from typing import Any

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
    return some.log().sum() + some[some > 0.5].sqrt().sum() + torch.masked_select(y, mask=n[..., None] > 0).sum()


def points(model: Layers, y: Tensor, n: Tensor) -> Tensor:
    places = (n.flatten() >= 0).nonzero().view(-1)
    kinds = n.flatten()[places] % CLASSES
    found = torch.gather(model.router(y.flatten(0, 1)[places]), 1, kinds.unsqueeze(1)).view(-1)
    found = found * torch.ones(places.shape[0]).to(found) + found.view(places.numel(), 1).sum(-1)
    return y.new_zeros(n.numel()).index_add_(0, places, found).view_as(n).sum(1).square().sum()


def by_their_number(y: Tensor, mask: Tensor) -> Tensor:
    rows = y[mask]
    found = rows.square().sum() / rows.shape[0] + rows.abs().sum() / rows.numel() + rows.exp().sum() / rows.size(0)
    return found * (1 + 1 / (rows.numel() + 2))


def two_experts(y: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    out[mask] += F.gelu(y[mask]) * y[mask].sum(-1, keepdim=True)
    out[~mask] = y[~mask].tanh()
    return out.square().mean()


ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by their number": by_their_number,
    "two experts": two_experts,
    "counted": lambda y, m: y[m].sum() / len(y[m]),
    "operators": lambda y, m: ((2 - y[m]) * y[m] / (1 + abs(y[m])) - (-y[m]) ** 3)[:, 1:].mean(),
    "a finite gradient": lambda y, m: (y[m].abs().log() + y[m].abs().sqrt() + y[m].norm(dim=-1, keepdim=True)).mean(),
    "of sequences": lambda y, m: y[..., :3].mean((1, 2))[m.any(1)].square().mean(),
    "functions": lambda y, m: F.layer_norm(F.normalize(y[m], dim=-1), (6,)).softmax(-1)[..., 0].mean(),
    "soft targets": lambda y, m: F.cross_entropy(y[m], y.detach().softmax(-1)[m], label_smoothing=0.1),
    "divergence": lambda y, m: F.kl_div(
        y[m].log_softmax(-1), y.detach().roll(1, -1).softmax(-1)[m], reduction="batchmean"
    ),
    "each loss": lambda y, m: F.cross_entropy(y[m], y.detach().argmax(-1).roll(1, -1)[m], reduction="none").mean(),
    "margin": lambda y, m: F.triplet_margin_loss(y[m], y[m].roll(1, -1), y.detach()[m].roll(2, -1)),
    "a mask written twice": lambda y, m: (y[m & ~m.roll(1, 1)] * y.detach()[m & ~m.roll(1, 1)]).mean(),
}
BODIES: dict[str, Body] = {name: lambda own, y, n, f=f: f(y, n > 1) for name, f in ROWS.items()}
BODIES |= {f.__name__: f for f in (experts_by_rows, experts_by_mask, labelled, roots, points)}


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
    "tested": lambda y, n: y[n > 1].sum() if len(y[n > 1]) else y.sum(),
    "the first two": lambda y, n: (y[n > 1][:1] * y).sum() + y[n > 1][:2].sum(),
    "a plain number": lambda y, n: y[n > 1].sum() / float(y[n > 1].shape[0]),
    "a whole number": lambda y, n: y[n > 1].sum() / int(y[n > 1].numel()),
    "a deviation": lambda y, n: y[n > 1].std(),
    "in another order": lambda y, n: y[n > 1].flip(0)[:, 0].sum(),
    "of each other": lambda y, n: (y[n > 1] @ y[n > 1].t()).sum(),
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


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x.square().mean()


def unseen(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x.square().mean()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.parametrize("take", [scripted, unseen, lambda x: Doubled.apply(x).mean()])
def test_code_that_nobody_watches_does_not_take_rows(take: Callable[[Tensor], Tensor]) -> None:
    """Either the code is watched, and the loss is right, or it is refused."""
    model = Layers(lambda own, y, n: take(y[n > 1])).double()
    try:
        program = capture_program(model, batch(1))
    except CaptureError as error:
        assert "rows that data chooses" in str(error)
        return
    found = run_reference(program, dict(model.named_parameters()), batch(2), {})[program.loss]
    torch.testing.assert_close(found, model(**batch(2)), rtol=1e-12, atol=0.0)
