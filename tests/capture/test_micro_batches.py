"""The loss of the batch from the losses of its micro-batches."""

import copy
from typing import Any

import pytest
import torch
from equivalence import case_of, check, labelled
from torch import nn
from torch.nn import functional

from autopar.capture.any_size import capture
from autopar.capture.micro_batches import extreme_of
from autopar.capture.program import capture_program
from autopar.capture.request import Request
from autopar.ir.degrees import Degrees
from autopar.ir.sharding import Mesh
from autopar.runtime.parameters.materialise import parameter_source
from autopar.runtime.verify.float64_program import promoted
from autopar.runtime.verify.reference import Case, reference_steps


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


class Halves(nn.Module):
    """A weight for each half of all tokens. Two sequences are the halves by chance, six sequences are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weights = nn.Linear(4, 8), nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = self.layer(x).view(2, x.shape[0] * x.shape[1], 4)
        return (halves * self.weights.view(2, 1, 1)).tanh().square().mean()


@pytest.mark.parametrize("batch", [2, 3, 4, 6])
def test_a_number_that_equals_the_batch_by_chance_hides_no_coupling(batch: int) -> None:
    """The message names the operator that couples samples, and no operator before it."""
    x = torch.randn(6, 5, 4)
    captured = capture(Request.of(Halves(), {"x": x}))
    for program in (capture_program(Halves(), {"x": x}, batch=batch), captured.at(batch=batch)):
        assert "reshape:0 (aten.reshape.default) needs all samples at once" in str(program.mixes_batch)
        assert program.ignored is None


class Pools(nn.Module):
    """Attention to all tokens and to pooled tokens. No token is pooled at short lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.layer(x)
        pooled = keys[:, : len(x[0]) // 64].new_zeros((len(x), len(x[0]) // 64, 8)).unsqueeze(1)
        every = torch.cat([keys.unsqueeze(1), pooled], 2).squeeze(1)
        return functional.scaled_dot_product_attention(keys, every, every).square().mean()


def test_a_value_without_elements_couples_nothing() -> None:
    torch.manual_seed(0)
    model, x = Pools().double(), torch.randn(6, 5, 4, dtype=torch.float64)
    assert capture_program(model, {"x": x}, batch=2).mixes_batch is None
    case = case_of((model, {"x": x}))
    for mesh in (Mesh.of(dp=2), Mesh.of(dp=3, tp=2)):
        check(case, labelled(case, mesh), mesh)


class Fixed(nn.Module):
    """Runs at one size, so no second capture shows which number is the batch size."""

    def __init__(self, divisor: str) -> None:
        super().__init__()
        self.layer, self.divisor = nn.Linear(4, 4), divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = self.layer(x).view(4, 4, 4).square().sum((1, 2))
        return losses.sum() / (len(x) if self.divisor == "batch" else 3)


@pytest.mark.parametrize("divisor", ["batch", "three"])
def test_without_a_second_capture_a_number_may_be_the_batch_size(divisor: str) -> None:
    program = capture_program(Fixed(divisor), {"x": torch.randn(4, 4, 4)})
    assert "a second capture at other sizes gave another graph" in str(program.notes)
    assert ("depends on the batch size" in str(program.mixes_batch)) == (divisor == "batch")


class Counting(nn.Module):
    """A buffer to which every batch adds its loads; with `reads` the loss depends on it."""

    def __init__(self, *, reads: bool = False, overwrites: bool = False) -> None:
        super().__init__()
        self.layer, self.reads, self.overwrites = nn.Linear(4, 3), reads, overwrites
        self.register_buffer("loads", torch.zeros(3))
        self.loads: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.layer(x)
        with torch.no_grad():
            counts = functional.one_hot(scores.argmax(-1), 3).sum(0)
            if self.overwrites:
                self.loads.copy_(counts)
            else:
                self.loads.add_(counts)
        if self.reads:
            scores = scores + self.loads
        return scores.square().mean()


def test_a_buffer_may_add_sums_up() -> None:
    """The buffer holds the sum over all micro-batches, as over the whole batch."""
    torch.manual_seed(0)
    model, x = Counting().double(), torch.randn(6, 4, dtype=torch.float64)
    program = promoted(capture_program(model, {"x": x}, batch=2))
    assert program.mixes_batch is None
    source = parameter_source(copy.deepcopy(model), state=None, seed=0, dtype=None)
    found = reference_steps(Case(program, source, [{"x": x}], Degrees(accumulate=3)))
    model(x)
    torch.testing.assert_close(found.buffers["loads"], model.loads)
    assert model.loads.sum() == len(x)


@pytest.mark.parametrize("how", ["reads", "overwrites"])
def test_other_buffers_may_not(how: str) -> None:
    program = capture_program(Counting(**{how: True}), {"x": torch.randn(6, 4)})
    assert program.mixes_batch is not None


@pytest.mark.parametrize(
    ("decides", "joined"),
    (
        (lambda n, mask: mask.any(), max),
        (lambda n, mask: mask.all(), min),
        (lambda n, mask: ~(mask != 0).any().logical_not(), None),
        (lambda n, mask: mask.logical_not().any().logical_not(), min),
        (lambda n, mask: n.max() + 1 > 3, max),
        (lambda n, mask: n.amin().to(torch.float64) <= 3, max),
        (lambda n, mask: n.max() == 3, None),
        (lambda n, mask: n.max().bool(), None),
        (lambda n, mask: n.min().logical_not(), None),
        (lambda n, mask: mask.any().long() < 1, min),
        (lambda n, mask: 3 - n.max(), None),
    ),
)
def test_a_decision_that_rises_or_falls_with_an_extreme_is_one_of_its_micro_batches(decides: Any, joined: Any) -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y = self.head(x).square().mean()
            return 2 * y if decides(n, mask) else y

    inputs = {"x": torch.randn(4, 4), "n": torch.arange(4), "mask": torch.tensor([True, False, True, False])}
    program = capture_program(Deciding(), inputs, specialise=True)
    (decision,) = program.decisions
    assert program.mixes_batch is None and extreme_of(program, decision.name) is joined
