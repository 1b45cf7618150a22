"""In-place operators, on views too, and buffers that forward changes."""

import pytest
import torch
from one_layer import Body, checked_program, squared
from suites import thinned
from torch import nn

from autopar.capture.program import capture_program
from autopar.errors import CaptureError
from autopar.runtime.codegen.execute import run_reference


def shifted(y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros_like(y)
    z[:, 1:] = y[:, :-1]
    z[:, 0] = 3
    return z + y


def masked_slice(y: torch.Tensor) -> torch.Tensor:
    z = y * 2
    z[..., 0].masked_fill_(z[..., 1] > 0, -1.0)
    return z


def by_mask(y: torch.Tensor) -> torch.Tensor:
    z = y.clone()
    z[z > 0.5] = 0.25
    return z * y


def rows_by_mask(y: torch.Tensor) -> torch.Tensor:
    z = y.clone()
    z[z[..., 0] > 0] = y[0, 0] * 2
    return z * y


def power(y: torch.Tensor) -> torch.Tensor:
    return (1 + y.square()).pow_(-0.5).masked_fill_(y == 0, 0.0)


def by_rows(y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros_like(y)
    z[:, torch.tensor([2, 0])] = y[:, :2]
    z.index_add_(1, torch.tensor([1, 1]), y[:, 1:])
    return z


def view_of_view(y: torch.Tensor) -> torch.Tensor:
    z = y * 1
    flat = z.view(-1).view(4, -1)
    z.mul_(3)
    return flat + 1


def piece(y: torch.Tensor) -> torch.Tensor:
    z = y * 1
    first = z.transpose(0, 1)[..., :3]
    first.add_(5)
    return z * 2


def in_a_region(y: torch.Tensor) -> torch.Tensor:
    z = y.detach() * 1
    with torch.no_grad():
        z[:, 0] = 7
        z.mul_(2)
    return z + y


def cut(y: torch.Tensor) -> torch.Tensor:
    z = y * 2
    w = z.sum()
    z.detach_()
    return z * y + w


def rounded(y: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros(6, dtype=torch.float64)
    counts.copy_(y.float()[0, 0])
    halves = (y.detach() > 0).long()
    halves.mul_(3).clamp_(max=2)
    return y * counts + halves


def masked_heads(y: torch.Tensor) -> torch.Tensor:
    heads = y.view(4, 3, 2, 3).transpose(1, 2)
    heads.masked_fill_(heads.detach() > 0.5, 0.0)
    z = torch.zeros_like(y)
    z[:, 1:].copy_(heads.transpose(1, 2).flatten(2)[:, 1:])
    return z


def spectrum(y: torch.Tensor) -> torch.Tensor:
    waves = torch.fft.rfft(y)
    found = torch.zeros_like(waves)
    found[..., 1:3] = waves[..., :2] * 2
    found[..., 3] = waves[..., 0]
    found[..., :2] += waves[..., 2:]
    return torch.fft.irfft(found, n=6)


BODIES: dict[str, Body] = {
    f.__name__: f
    for f in (
        shifted,
        masked_slice,
        by_mask,
        rows_by_mask,
        power,
        by_rows,
        view_of_view,
        piece,
        in_a_region,
        cut,
        rounded,
        masked_heads,
        spectrum,
    )
}


@pytest.mark.parametrize("body", thinned(BODIES, keep=list(BODIES)[::2]))
def test_the_program_computes_what_the_module_computes(body: str) -> None:
    torch.manual_seed(0)
    model, x = squared(BODIES[body]).double(), torch.randn(4, 3, 6, dtype=torch.float64)
    program = checked_program(model, x)
    for block in program.blocks:
        assert not any(n.target._schema.is_mutable for n in block.graph.nodes if n.op == "call_function")


class Counting(nn.Module):
    """Buffers changed in several ways, one used again after it was changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.ones(6, dtype=torch.float64))
        self.register_buffer("last", torch.zeros(4, 6, dtype=torch.float64), persistent=False)
        self.register_buffer("table", torch.zeros(3, 6, dtype=torch.float64))
        self.register_buffer("constant", torch.full((6,), 2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.count += 1
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.table[1:] = y.detach()[:2]
        z = y * self.average * self.constant + self.last * self.count
        self.last.copy_(x)
        return z.square().sum()


def test_changed_buffers_have_new_values() -> None:
    torch.manual_seed(0)
    model, x = Counting().double(), torch.randn(4, 6, dtype=torch.float64)
    program = capture_program(model, {"x": x})
    assert program.updates.keys() == {"count", "average", "last", "table"}
    assert program.constants.buffers == ("constant",)
    assert {n: b.persistent for n, b in program.buffers.items()}["last"] is False
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    for _ in range(3):
        values = run_reference(program, dict(model.named_parameters()), {"x": x}, buffers)
        buffers |= {name: values[update] for name, update in program.updates.items()}
        assert torch.allclose(values[program.loss], model(x), rtol=1e-13)
        for name, buffer in model.named_buffers():
            assert torch.allclose(buffers[name], buffer, rtol=1e-13), name
            assert buffers[name].dtype == buffer.dtype


class Tracking(nn.Module):
    """Counts calls, and may keep an average of what it sees."""

    def __init__(self, *, averages: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.averages = averages
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.averages:
            self.average.lerp_(x.mean(0), 0.1)
        return self.layer(x).square().mean()


def test_a_counter_lets_the_batch_be_split_and_an_average_does_not() -> None:
    counting = capture_program(Tracking(averages=False), {"x": torch.zeros(4, 6)})
    assert counting.mixes_batch is None and counting.updates.keys() == {"count"}
    averaging = capture_program(Tracking(averages=True), {"x": torch.zeros(4, 6)})
    assert averaging.mixes_batch is not None and averaging.updates.keys() == {"count", "average"}


def test_a_changed_parameter_is_refused() -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.layer.weight.clamp_(-1, 1)
            return self.layer(x).sum()

    with pytest.raises(CaptureError, match=r"changes layer\.weight in its forward pass; only buffers"):
        capture_program(Clipped(), {"x": torch.zeros(4, 6)})


def test_a_default_that_only_the_operator_in_place_has_is_kept() -> None:
    """A trace leaves out the probability of one half, which `bernoulli_` has as its default."""
    program = capture_program(
        squared(lambda y: y * y.new_empty(y.shape[0], 1).bernoulli_(0.5)), {"x": torch.zeros(4, 6)}
    )
    drawn = [n for n in program.blocks[0].graph.nodes if n.target is torch.ops.aten.bernoulli.p]
    assert [n.args[1] for n in drawn] == [0.5]
