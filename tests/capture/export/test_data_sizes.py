"""Tensors whose size data decides: the size of the example inputs is captured, and later batches must have it too."""

from collections.abc import Callable

import pytest
import torch
from suites import thinned
from torch import nn
from torch.nn import functional as F

from autopar.capture.program import capture_program
from autopar.errors import CaptureError
from autopar.runtime.codegen.execute import run_reference
from autopar.testing import check_equivalence

Finish = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Counted(nn.Module):
    """A linear layer whose output a function of it and of an input of integers turns into the loss."""

    def __init__(self, finish: Finish) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("edge", torch.tensor(1))
        self.finish = finish

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return self.finish(torch.tanh(self.layer(x)), n).square().sum()


def written(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    z = y * 2
    z[n > 1] = y[n < 2][:1] + y[n > 1]
    return z


def edges_without_loops(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    edges = torch.stack([n[:, 0], n[:, 1]])
    edges = edges[:, edges[0] != edges[1]]
    return torch.zeros_like(y[:, 0]).index_add(0, edges[1], y[edges[0], 0])


SIZES: dict[str, Finish] = {
    "mask": lambda y, n: y[n > 1],
    "mask of a dimension": lambda y, n: y[:, n[0] > 1],
    "mask and numbers": lambda y, n: y[n[:, 0] > 0, 2],
    "masked_select": lambda y, n: torch.masked_select(y, n[..., None] > 1),
    "nonzero": lambda y, n: y.flatten(0, 1)[torch.nonzero(n.flatten()).squeeze(1)],
    "where": lambda y, n: y[torch.where(n > 1)],
    "argwhere": lambda y, n: y[tuple(torch.argwhere(n).t())],
    "repeat_interleave": lambda y, n: y[:, 0].repeat_interleave(n[:, 0], 0),
    "repeat_interleave of numbers": lambda y, n: y[torch.repeat_interleave(n[:, 0])],
    "slice": lambda y, n: y[:, : n.max()],
    "arange": lambda y, n: y[:, torch.arange(n.max(), device=y.device)],
    "new_zeros": lambda y, n: torch.cat([y, y.new_zeros(4, n.max(), 6)], 1),
    "pad": lambda y, n: F.pad(y, (0, n.max())),
    "one_hot": lambda y, n: F.one_hot(n).to(y.dtype) @ y[:, 0, :4].sum(0),
    "one_hot of a number": lambda y, n: F.one_hot(n, max(n.max() + 1, 2)).to(y.dtype)[..., :3] @ y[:, 0, :3].sum(0),
    "roll": lambda y, n: y[:, 0].roll(n[0, 1], -1) * torch.arange(6),
    "topk": lambda y, n: y.topk(n.max(), 1).values,
    "full": lambda y, n: y + torch.full((6,), n.max(), dtype=y.dtype),
    "written": written,
    "edges": edges_without_loops,
}
ALL_ROWS_STAY = ("mask", "mask and numbers", "masked_select", "nonzero", "where")  # without the option
X, N = torch.randn(4, 5, 6, dtype=torch.float64), torch.tensor([[0, 2, 1, 3, 3], [1, 1, 0, 2, 0]] * 2)


@pytest.mark.parametrize("name", thinned(SIZES, keep=list(SIZES)[::2]))
def test_the_model_is_the_model_of_the_example_inputs(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = Counted(SIZES[name]).double(), {"x": X, "n": N}
    if name in ALL_ROWS_STAY:
        assert not capture_program(model, inputs).decisions
    else:
        with pytest.raises(
            CaptureError, match=r"test_data_sizes.py:.*(whose shape|number or the order).* specialise=True"
        ):
            capture_program(model, inputs)
    program = capture_program(model, inputs, specialise=True)
    assert program.decisions and all(isinstance(decision.value, int) for decision in program.decisions)
    found = run_reference(program, dict(model.named_parameters()), inputs, dict(model.named_buffers()))
    torch.testing.assert_close(found[program.loss], model(**inputs), rtol=1e-12, atol=0.0)
    check_equivalence(model, inputs, tp=2, dp=2, specialise=True)


ROWS: dict[str, Finish] = {
    "first": lambda y, n: y[n[0, 0]],
    "in the middle": lambda y, n: y[:, n[0, 1], 1:],
    "behind all": lambda y, n: torch.stack([y[b, ..., None, n[b, 0] - 1] for b in range(4)]),
    "of a position that weights decide": lambda y, n: y[y.detach().sum((1, 2)).argmax()],
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_data_selects_is_no_decision(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = Counted(ROWS[name]).double(), {"x": X, "n": N}
    program = capture_program(model, inputs)
    assert not program.decisions
    for given in (inputs, {"x": X.flip(0), "n": N.flip(0)}):
        found = run_reference(program, dict(model.named_parameters()), given, dict(model.named_buffers()))
        torch.testing.assert_close(found[program.loss], model(**given), rtol=1e-12, atol=0.0)
    check_equivalence(model, inputs, tp=2, dp=2)


def test_a_size_that_weights_decide_is_refused_with_the_option_too() -> None:
    model = Counted(lambda y, n: y[:, y[0, :, 0] > 0]).double()
    with pytest.raises(CaptureError, match=r"shape depends on data, and the data depends on the parameter"):
        capture_program(model, {"x": X, "n": N}, specialise=True)


class Padded(nn.Module):
    """Pads by a number that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(6, 6, 3)
        self.register_buffer("total", torch.tensor(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(F.pad(x, (self.total // 2, self.total - self.total // 2))).square().sum()


def test_a_size_of_a_buffer_needs_no_option() -> None:
    model = Padded().double()
    x = X.transpose(1, 2).contiguous()
    check_equivalence(model, {"x": x}, tp=2, dp=2)


def test_an_input_that_is_moved_to_its_own_device_is_known() -> None:
    def finish(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if torch.zeros(3).sum() > 0:  # a read before the move
            y = -y
        n = n.to(y.device)
        return y[n > 1]

    check_equivalence(Counted(finish).double(), {"x": X, "n": N}, tp=2, specialise=True)


def test_fewer_rows_have_their_own_sizes() -> None:
    """Two of four rows have half of the true elements, in every micro-batch."""
    model, inputs = Counted(lambda y, n: y[n > 1]).double(), {"x": X, "n": N}
    program = capture_program(model, inputs, batch=2, specialise=True)
    assert [decision.value for decision in program.decisions] == [4]
    rows = {name: value[2:] for name, value in inputs.items()}
    found = run_reference(program, dict(model.named_parameters()), rows, dict(model.named_buffers()))
    torch.testing.assert_close(found[program.loss], model(**rows), rtol=1e-12, atol=0.0)
