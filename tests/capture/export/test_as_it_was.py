"""A capture and a check leave a model as it was: no tensor of a trace stays behind, wherever forward keeps it."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture.export.own_changes import as_it_was
from autopar.capture.program import capture_program


class State:
    last: Any = None


@lru_cache
def ramp(size: int) -> torch.Tensor:
    return torch.arange(size) * 0.5


class Keeps(nn.Module):
    """Keeps a bias, or its activation, in the place `where`."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where, self.bias = nn.Linear(8, 8), where, None
        self.by_size: dict[int, torch.Tensor] = {}
        self.seen: list[Any] = []
        self.state = State()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        if self.where == "attribute":
            self.bias = ramp.__wrapped__(8)
            h = h + self.bias
        elif self.where == "dictionary":
            h = h + self.by_size.setdefault(8, ramp.__wrapped__(8))
        elif self.where == "list":
            self.seen.append((h, {"h": h}))
        elif self.where == "object":
            self.state.last = torch.distributions.Normal(h, 1.0, validate_args=False)
        elif self.where == "buffer":
            self.register_buffer("made", ramp.__wrapped__(8), persistent=False)
            h = h + self.made
        elif self.where == "cache":
            h = h + ramp(8)
        return F.silu(h).square().mean()


def held(value: Any) -> Iterator[Any]:
    """What a value reaches through attributes and containers."""
    yield value
    if isinstance(value, torch.Tensor):
        return
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for each in (*inner, *([vars(value)] if isinstance(value, (nn.Module, State)) else [])):
        yield from held(each)


@pytest.mark.parametrize("where", ("attribute", "dictionary", "list", "object", "buffer", "cache"))
def test_a_capture_leaves_nothing(where: str) -> None:
    ramp.cache_clear()
    model, x = Keeps(where), torch.randn(4, 8)
    before = [id(each) for each in held(model)]
    capture_program(model, {"x": x})
    assert [id(each) for each in held(model)] == before
    assert type(ramp(8)) is torch.Tensor and type(model(x).detach()) is torch.Tensor


def test_what_nobody_changed_stays_in_place() -> None:
    model = Keeps("list")
    model.seen.append(1)
    kept = model.seen
    with pytest.raises(KeyError), as_it_was(model):
        model.seen.append(2)
        model.where = "other"
        raise KeyError
    assert model.seen is kept and kept == [1] and model.where == "list"
