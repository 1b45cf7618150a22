"""Tests for no rows: the branch for some rows is captured if it gives the same without any, and refused otherwise."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from suites import thinned
from torch import Tensor, nn

from autopar.capture.program import capture_program
from autopar.errors import CaptureError
from autopar.runtime.codegen.execute import run_reference
from autopar.testing import check_equivalence

Rows = Callable[[Tensor, Tensor], Tensor]
WIDTH = 6


class Layer(nn.Module):
    """A layer, and a function that makes the loss of its output and a mask."""

    def __init__(self, loss: Rows) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(WIDTH, WIDTH), loss

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.loss(torch.tanh(self.layer(x)), n > 1)


def nothing(y: Tensor) -> Tensor:
    return y.sum() * 0.0


def returns_early(y: Tensor, m: Tensor) -> Tensor:
    if not m.any():
        return nothing(y)
    return y[m].square().mean()


def divides_by_the_number(y: Tensor, m: Tensor) -> Tensor:
    loss = nothing(y)
    if m.sum() > 0:
        loss = loss + (y * m[..., None]).sum() / m.float().sum()
    return loss


def its_rows(y: Tensor, m: Tensor) -> Tensor:
    places = m.flatten().nonzero().squeeze(1)
    if len(places) == 0:
        return nothing(y)
    rows = y.flatten(0, 1)[places]
    return rows.square().sum() / len(rows)


def reads_the_number(y: Tensor, m: Tensor) -> Tensor:
    number = m.sum().item()
    return y[m].square().sum() / number if number > 0 else nothing(y)


def every_row(y: Tensor, m: Tensor) -> Tensor:
    total = nothing(y)
    for row, mask in zip(y, m, strict=True):
        if mask.sum() == 0:
            continue
        total = total + row[mask].mean()
    return total / len(y)


def chosen_by_weights(y: Tensor, m: Tensor) -> Tensor:
    mask = y[..., 0] > 0.3
    return y[mask].square().mean() if mask.any() else nothing(y)


def masks_if_needed(y: Tensor, m: Tensor) -> Tensor:
    mask = m if m.any() else None
    return y.square().mean() if mask is None else (y * (1 - mask[..., None] * 0.5)).square().mean()


def takes_all_if_it_can(y: Tensor, m: Tensor) -> Tensor:
    if m.all():
        return y.square().sum() / m.numel()
    return (y.square() * m[..., None]).sum() / m.sum().clamp(min=1)


EQUAL: dict[str, Rows] = {
    "the largest of number and one": lambda y, m: y[m].square().sum() / max(len(y[m]), 1),
    "the largest of one and a number that is read": lambda y, m: y[m].sum() / max(1, m.sum().item()),
    "a number and a constant": lambda y, m: y[m].sum() / (m.sum().item() + 1e-6),
    "each row by the number": lambda y, m: (y[m] / len(y[m])).square().sum(),
    "columns of chosen rows": lambda y, m: y[m][y[m] > 0.2].square().sum(),
}
EQUAL["a tensor is equal to itself"] = lambda y, m: y.sum() if torch.equal(y, y) else y.abs().sum()
EQUAL |= {f.__name__: f for f in (returns_early, divides_by_the_number, its_rows, reads_the_number)}
EQUAL |= {f.__name__: f for f in (every_row, chosen_by_weights, masks_if_needed, takes_all_if_it_can)}


def batches() -> Iterator[dict[str, Tensor]]:
    """Batches with some rows, with a row in some sequences, with one row, with all, and with none."""
    torch.manual_seed(0)
    n = torch.randint(0, 4, (4, 5))
    one = (torch.arange(20).view(4, 5) == 7) * 3
    for chosen in (n, n * (torch.arange(4) % 2)[:, None], one, n * 0 + 3, n * 0):
        yield {"x": torch.randn(4, 5, WIDTH, dtype=torch.float64), "n": chosen}
    yield {"x": torch.zeros(4, 5, WIDTH, dtype=torch.float64), "n": n * 0}


@pytest.mark.parametrize("name", thinned(EQUAL, keep=list(EQUAL)[::3]))
def test_a_batch_without_rows_has_the_loss_and_the_gradients_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    model = Layer(EQUAL[name]).double()
    program = capture_program(model, next(batches()))
    assert not program.decisions
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    for batch in batches():
        loss, expected = run_reference(program, parameters, batch, {})[program.loss], model(**batch)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14, equal_nan=True)
        for one, other in zip(
            torch.autograd.grad(loss, list(parameters.values())),
            torch.autograd.grad(expected, list(model.parameters())),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", ["its_rows", "chosen_by_weights"])
def test_ranks_test_the_rows_of_all(name: str) -> None:
    torch.manual_seed(0)
    check_equivalence(Layer(EQUAL[name]).double(), next(batches()), tp=2, dp=2)


def counts_groups(y: Tensor, m: Tensor) -> Tensor:
    groups = 0
    for mask in m:
        if mask.any():
            groups += 1
    return y.sum() / (groups + 1)


def depends_on_another_test(y: Tensor, m: Tensor) -> Tensor:
    scale = 1.0 if m.any() else 3.0
    other = y[..., 0] > 0
    return nothing(y) + (scale * y[other].square().mean() if other.any() else 0.0) + (y[m].sum() if m.any() else 0.0)


OTHERWISE: dict[str, Rows] = {
    "another loss": lambda y, m: y[m].sum() if m.any() else y.sum(),
    "one more": lambda y, m: y.sum() + (1 + y[m].sum() if m.any() else 0.0),
    "another function": lambda y, m: y.abs().mean() if not m.any() else (y * (1 + m[..., None])).square().mean(),
    "a mean outside": lambda y, m: (nothing(y) if m.any() else y.prod() * 0) + y[m].mean(),
    "a constant": lambda y, m: y[m].sum() if m.any() else torch.zeros((), dtype=y.dtype, requires_grad=True),
    "a flag": lambda y, m: y.sum() * (2 if m.any() else 1),
}
OTHERWISE |= {f.__name__: f for f in (counts_groups, depends_on_another_test)}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_branch_that_gives_something_else_without_rows_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"_tests.py:\d+: .*\nThe branch for some rows was tried with none: "):
        capture_program(Layer(OTHERWISE[name]).double(), next(batches()))


def doubled(y: Tensor, m: Tensor) -> Tensor:
    return (2.0 * y if m.any() else y).square().mean()


@pytest.mark.parametrize("number", (math.nan, math.inf, 3e38, 1e-30))
def test_parameters_without_initial_values_hide_no_difference(number: float) -> None:
    """A command that needs shapes alone builds a model without initial values. Not a number equals anything."""
    model = Layer(doubled).double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, number)
    with pytest.raises(CaptureError, match=r"without any, .* is another value"):
        capture_program(model, next(batches()))


def test_a_small_difference_of_float32_is_found() -> None:
    model, (batch, *_) = Layer(lambda y, m: y.square().mean() + (1e-5 if m.any() else 0.0)), batches()
    with pytest.raises(CaptureError, match="was tried with none: without any, 'loss' is another value"):
        capture_program(model, {name: x.float() if x.is_floating_point() else x for name, x in batch.items()})


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        best, out = self.router(x).argmax(-1), x.clone()
        for k, expert in enumerate(self.experts):
            mask = best == k
            if mask.any():
                out[mask] = expert(x[mask])
        return out.square().mean()


NUMBERS: dict[str, Rows] = {
    "range": lambda y, m: sum((y[k % 4] for k in range(len(y[m]))), y[0]).sum(),
    "an item of a list": lambda y, m: y.sum() * [*range(50)][y[m].shape[0]],
    "a slice": lambda y, m: y.flatten(0, 1)[: y[m].shape[0]].sum(),
    "a slice of a list": lambda y, m: sum([*y, *y, *y, *y, *y][: len(y[m])]).sum(),  # type: ignore[union-attr]
    "a list as long": lambda y, m: sum([y.sum()] * y[m].shape[0]),
    "places": lambda y, m: (torch.arange(y[m].shape[0])[:, None] * y[m]).sum(),
    "a value": lambda y, m: (torch.full((3,), y[m].shape[0]) * y.sum()).sum(),
    "a new value": lambda y, m: y.new_tensor(y[m].shape[0]) * y.sum(),
    "a value of a shape": lambda y, m: (torch.full_like(y, y[m].numel()) * y).sum(),
    "a logarithm": lambda y, m: y.sum() * math.log(y[m].shape[0]),
    "halves": lambda y, m: y.sum() * (y[m].shape[0] // 2 + (y[m].shape[0] & 1) + (+y[m].shape[0])),
    "the largest": lambda y, m: y.flatten().topk(y[m].shape[0]).values.sum(),
    "parts": lambda y, m: y.flatten(0, 1).split([len(y[m]), 20 - len(y[m])])[0].sum(),
    "the smallest": lambda y, m: y[m].sum() / min(len(y[m]), 5),
    "two rows": lambda y, m: y[m].sum() if len(y[m]) > 1 else nothing(y),
    "a text": lambda y, m: y.sum() * float(f"{y[m].shape[0]}"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_rows_becomes_no_number_in_silence(name: str) -> None:
    with pytest.raises(CaptureError, match=r"cannot be captured: .*test_row_tests.py:\d+: "):
        capture_program(Layer(NUMBERS[name]).double(), next(batches()))


def test_an_expert_without_rows_has_no_gradient() -> None:
    with pytest.raises(CaptureError, match=r"'experts.\d.\w+' has no gradient, so that an optimizer leaves it alone"):
        capture_program(Experts().double(), {"x": next(batches())["x"]})
