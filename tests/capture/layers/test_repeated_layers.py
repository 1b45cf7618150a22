"""A deep model is exported with its distinct layers only, and the export equals an export of all layers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_models
import torch
from same_program import differences
from suites import long, thinned
from torch import nn

from autopar.capture import program as tracing
from autopar.capture.any_size import capture
from autopar.capture.layers.repeated_layers import Stack
from autopar.capture.layers.watched_layers import watched_stacks
from autopar.capture.request import Request
from autopar.errors import CaptureError
from autopar.models.load import resolve_model

Finish = Callable[["Model", list[torch.Tensor]], torch.Tensor]


class Layer(nn.Module):
    """A linear layer and what else is to be done with its result."""

    def __init__(self, number: int, more: Callable[[int, torch.Tensor], torch.Tensor] = lambda n, x: x) -> None:
        super().__init__()
        self.number, self.more = number, more
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(self.number, self.down(torch.tanh(self.up(x)))) + x


class Model(nn.Module):
    """Layers one after another; `finish` makes a loss of the values before and after each of them."""

    def __init__(self, layers: list[Layer], finish: Finish = lambda model, xs: xs[-1].sum()) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(layers)
        self.finish = finish

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.first(x)]
        for layer in self.layers:
            values.append(layer(values[-1]))
        return self.finish(self, values)


def of(more: Any, count: int = 9, finish: Finish = lambda model, xs: xs[-1].sum(), *, device: str = "meta") -> Model:
    with torch.device(device):
        return Model([Layer(n, more) for n in range(count)], finish)


def plain(number: int, x: torch.Tensor) -> torch.Tensor:
    return x


def every_third(number: int, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) if number % 3 == 1 else x


def from_third(number: int, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) if number < 3 else x


def by_depth(number: int, x: torch.Tensor) -> torch.Tensor:
    return x / (number + 1)


def seventh(number: int, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) if number == 7 else x


def inputs(device: str = "meta") -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(4, 10, 6, device=device)}


def stacks_of(model: nn.Module) -> tuple[Stack, ...]:
    return watched_stacks(Request.of(model, inputs()))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether graphs were written out for all layers."""
    found: list[bool] = []
    real = tracing.with_all_layers

    def noted(*arguments: Any) -> Any:
        flat = real(*arguments)
        found.append(flat is not None)
        return flat

    monkeypatch.setattr(tracing, "with_all_layers", noted)
    yield found


def check(model: nn.Module, example: Any, monkeypatch: pytest.MonkeyPatch, batch: int = 7) -> None:
    found = capture(Request.of(model, example), batch)
    with monkeypatch.context() as patched:
        patched.setattr(tracing, "watched_stacks", lambda *_, **__: ())
        whole = capture(Request.of(model, example), batch)
    assert found.unknown == whole.unknown
    assert found.record == whole.record and whole.record is not None
    assert differences(found.at(batch=batch), whole.at(batch=batch)) == []


@pytest.mark.parametrize("device", [long("meta"), "cpu"])
@pytest.mark.parametrize(
    "more, count, like",
    [
        (plain, 9, (0, 1, 2, *[2] * 6)),
        (every_third, 17, (*range(8), *[5, 6, 7] * 3)),
        (from_third, 13, (*range(6), *[5] * 7)),  # layer 3 takes from one of another kind
    ],
)
def test_layers_that_repeat(
    more: Any, count: int, like: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch, written: list[bool]
) -> None:
    model = of(more, count, device=device)
    (stack,) = stacks_of(model)
    assert (stack.path, stack.like) == ("layers", like)
    check(model, inputs(device), monkeypatch)
    assert written == [True, True]
    assert [name for name, _ in model.layers.named_children()] == [str(n) for n in range(count)]
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.layers)


@pytest.mark.parametrize(
    "model",
    [
        of(by_depth),
        of(seventh),
        of(plain, 6),  # more than half of the layers would be kept
        of(plain, finish=lambda model, xs: torch.stack(xs).sum()),
        of(plain, finish=lambda model, xs: (xs[-1] / len(model.layers)).sum()),
        of(plain, finish=lambda model, xs: (xs[-1] + xs[5]).sum()),
        of(plain, finish=lambda model, xs: (model.layers[8].up(xs[-1])).sum() + model.layers[2].up.weight.sum()),
        of(lambda n, x: x if x.sum() > 0 else -x),  # has no value on meta
    ],
    ids=["depth", "seventh", "short", "all-values", "count", "missing", "state", "numbers"],
)
def test_layers_that_do_not_repeat(model: Model) -> None:
    assert stacks_of(model) == ()
    assert len(model.layers) in (6, 9)


def test_other_settings() -> None:
    """A window that the capture is too short to show, and a layer on another device."""
    model = of(plain)
    for layer, window in zip(model.layers, [1_000] * 8 + [2_000], strict=True):
        layer.window = window  # type: ignore[assignment]
    moved = of(plain)
    moved.layers[8].to_empty(device="cpu")
    assert stacks_of(model) == () == stacks_of(moved)


def test_a_failed_capture_puts_layers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, real, counts = of(plain), tracing.capture_flat, list[int]()

    def fails_with_few(request: Request) -> Any:
        counts.append(len(model.layers))
        if counts[-1] < 9:
            raise CaptureError("few")
        return real(request)

    monkeypatch.setattr(tracing, "capture_flat", fails_with_few)
    assert capture(Request.of(model, inputs())).record is not None
    assert counts == [3, 9, 9]


def test_a_model_in_memory(monkeypatch: pytest.MonkeyPatch, written: list[bool]) -> None:
    model, example = tiny_models.llama(2, layers=8)
    before = torch.get_rng_state()
    check(model, example, monkeypatch)
    assert written == [True, True]
    assert torch.equal(torch.get_rng_state(), before)


def test_other_widths(monkeypatch: pytest.MonkeyPatch, written: list[bool]) -> None:
    """A layer of another width is no repetition, though it does the same."""
    model = of(plain)
    with torch.device("meta"):
        model.layers[8].up, model.layers[8].down = nn.Linear(6, 18), nn.Linear(18, 6)
    assert stacks_of(model) == ()
    check(model, inputs(), monkeypatch)
    assert written == []


PRESETS = {
    "llama3-8b": 8, "gpt2": 7, "mixtral-8x22b": 8, "gemma2-9b": 13, "t5-large": 9, "bert-large": 7,
    "whisper-large": 8, "qwen3-30b-a3b": 7, "vit-l-16": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(PRESETS, keep=("gpt2",)))
def test_presets(name: str, monkeypatch: pytest.MonkeyPatch, written: list[bool]) -> None:
    found = resolve_model(name, layers=PRESETS[name], hidden=64, seq_len=40, batch=7)
    check(found.model, found.example_inputs, monkeypatch)
    assert written[:2] == [True, True]
