"""Models that draw random numbers are equal to one device, because both sides draw the same numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_labels import check_random_labels
from suites import long
from torch import nn

from autopar import testing
from autopar.capture.program import capture_program
from autopar.errors import VerificationError
from autopar.lowering.randomness import Draw
from autopar.runtime.codegen.execute import captured_modules
from autopar.runtime.verify.shared_draws import SharedStream, on_one_device

WIDTH = 8


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def draw(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.last(self.draw(torch.tanh(self.first(x))))
        return out


class Dropout(_Layer):
    def draw(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.3, self.training)


class StochasticDepth(_Layer):
    """One number per sample, as image models drop residual branches."""

    def draw(self, x: torch.Tensor) -> torch.Tensor:
        keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(0.7)
        return x * keep.div_(0.7)


class DrawnChoice(_Layer):
    """A probability that depends on the data."""

    def draw(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.bernoulli(torch.sigmoid(x.detach()))


class GaussianNoise(_Layer):
    def draw(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn_like(x) * torch.rand_like(x)


class Gumbel(_Layer):
    def draw(self, x: torch.Tensor) -> torch.Tensor:
        return x * nn.functional.gumbel_softmax(x, dim=-1)


class Created(_Layer):
    """Operators that have a shape and no operand."""

    def draw(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, dtype=x.dtype) + torch.rand(x.shape[-1], dtype=x.dtype)
        order = torch.randperm(x.shape[-1])
        signs = 2 * torch.randint(0, 2, x.shape) - 1
        return (x + 0.1 * noise * signs)[..., order]


class ChannelDropout(_Layer):
    """Dropout of whole channels, and dropout that keeps mean and variance."""

    def draw(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout1d(x.unsqueeze(-1).repeat(1, 1, 2), 0.3, self.training).sum(-1)
        return nn.functional.alpha_dropout(x, 0.2, self.training)


class FeatureAlphaDropout(_Layer):
    def draw(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.feature_alpha_dropout(x.unsqueeze(-1), 0.3, self.training).squeeze(-1)


class DrawnAround(_Layer):
    """Numbers around values of the data: normal with a mean, a deviation or both, and Poisson."""

    def draw(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = x.detach(), x.detach().abs() + 0.1
        noise = torch.normal(mean, 0.1) + torch.normal(0.0, spread) + torch.normal(mean, spread)
        return x + noise + torch.poisson(spread)


LAYERS = (Dropout, StochasticDepth, DrawnChoice, GaussianNoise, Gumbel, Created)
LAYERS += (ChannelDropout, FeatureAlphaDropout, DrawnAround)


def network(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(layer(), layer(), nn.Linear(WIDTH, 4))


BATCH = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)), torch.arange(4))


@pytest.mark.parametrize("degrees", (long({"tp": 2}), long({"dp": 2}), {"tp": 2, "dp": 2}), ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_model_that_draws_equals_one_device(layer: Callable[[], nn.Module], degrees: dict[str, int]) -> None:
    torch.manual_seed(1)
    loss_fn = nn.functional.cross_entropy
    first = testing.check_equivalence(network(layer), BATCH, loss_fn=loss_fn, **degrees)
    assert first.worst_error < 1e-12 and not first.limits


@pytest.mark.parametrize("layer", (Dropout, StochasticDepth))
def test_random_labels_draw_the_same(layer: Callable[[], nn.Module]) -> None:
    check_random_labels(network(layer), BATCH, tp=2, dp=2, loss_fn=nn.functional.cross_entropy)


def test_only_dropout_draws_nothing_in_evaluation() -> None:
    class Both(_Layer):
        def draw(self, x: torch.Tensor) -> torch.Tensor:
            dropped = nn.functional.dropout1d(x.unsqueeze(-1), 0.3, self.training).squeeze(-1)
            return dropped + torch.randn_like(x)

    program = capture_program(network(Both), BATCH, loss_fn=nn.functional.cross_entropy)
    streams = on_one_device()
    captured_modules(program, streams=streams)
    flags = [draw.is_dropout for stream in streams._made.values() for draw in stream.use.draws]
    assert flags and flags == [True, False] * (len(flags) // 2)


def test_ranks_with_numbers_of_their_own_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, drawn = iter(range(10**6)), SharedStream._drawn

    def other(self: SharedStream, draw: Draw, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = replace(draw, key=f"{next(seeds)}") if self.mesh.names else draw  # one device has no mesh
        return drawn(self, own, *args, **kwargs)

    monkeypatch.setattr(SharedStream, "_drawn", other)
    with pytest.raises(VerificationError, match="differs from one device"):
        testing.check_equivalence(network(Dropout), BATCH, dp=2, loss_fn=nn.functional.cross_entropy)
