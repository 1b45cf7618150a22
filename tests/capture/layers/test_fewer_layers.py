"""The second capture of a deep model has only its distinct layers, and equals a capture of all layers."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tiny_models
import torch
from same_program import differences
from suites import thinned
from torch import nn

from autopar.capture.any_size import capture
from autopar.capture.layers import fewer_layers
from autopar.capture.request import Request
from autopar.models.load import resolve_model

X = {"x": torch.zeros(4, 10, 6)}


class Calls:
    """The numbers of the layers that ran, where a capture does not look: it leaves a model's lists as they were."""

    def __init__(self) -> None:
        numbers: list[int] = []
        self.add, self.read = numbers.append, numbers.copy

    @property
    def numbers(self) -> list[int]:
        return self.read()


class Layer(nn.Module):
    """A linear layer that notes each of its calls."""

    def __init__(self, number: int, calls: Calls, width: int = 6) -> None:
        super().__init__()
        self.number, self.calls = number, calls
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add(self.number)
        rows = x.reshape(x.shape[0] * x.shape[1], 6)
        return self.down(torch.tanh(self.up(rows))).reshape(x.shape) + x


class Model(nn.Module):
    """Layers one after another; `finish` makes a loss of the module and the values before and after each layer."""

    def __init__(self, layers: Callable[[Calls], list[nn.Module]], finish: Any = lambda model, xs: xs[-1].sum()):
        super().__init__()
        self.calls = Calls()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(layers(self.calls))
        self.finish = finish

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.first(x)]
        for layer in self.layers:
            values.append(layer(values[-1]))
        loss: torch.Tensor = self.finish(self, values)
        return loss


def equal(count: int) -> Callable[[Calls], list[nn.Module]]:
    return lambda calls: [Layer(n, calls) for n in range(count)]


class Scaled(Layer):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Windowed(Layer):
    """Looks back no further than a window, which the first capture is too short to show."""

    window = 1_000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.shape[1] <= self.window else super().forward(x).cumsum(1)


def with_values(kind: type[Layer], name: str, values: list[Any]) -> Callable[[Calls], list[nn.Module]]:
    def layers(calls: Calls) -> list[nn.Module]:
        made = [kind(n, calls) for n in range(len(values))]
        for layer, value in zip(made, values, strict=True):
            setattr(layer, name, value)
        return list(made)

    return layers


def check(model: nn.Module, inputs: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, batch: int | None = 7) -> Any:
    """The capture with fewer layers, which is the one with all of them."""
    found = capture(Request.of(model, inputs), batch)
    with monkeypatch.context() as patched:
        patched.setattr(fewer_layers, "repeated_layers", lambda model, flat: ())
        whole = capture(Request.of(model, inputs), batch)
    assert found.unknown == whole.unknown
    assert found.record == whole.record
    if batch is not None:
        assert differences(found.at(batch=batch), whole.at(batch=batch)) == []
    return found


@pytest.mark.parametrize(
    "layers, finish, calls",
    [
        (equal(5), None, [0, 1, 2, 3, 4, 0, 0]),
        (equal(2), None, [0, 1, 0, 1]),  # no call is saved
        (with_values(Scaled, "scale", [1.0, 2.0] * 3), None, [0, 1, 2, 3, 4, 5, 0, 1, 0, 1]),
        (with_values(Scaled, "scale", [1.0, 2.0, 3.0, 4.0, 5.0]), None, [0, 1, 2, 3, 4] * 2),
        (with_values(Windowed, "window", [1_000, 2_000, 3_000]), None, [0, 1, 2] * 2),
        (with_values(Windowed, "window", [1_000] * 5), None, [0, 1, 2, 3, 4, 0, 0]),
        (lambda calls: [Layer(n, calls, 6 + n) for n in range(3)], None, [0, 1, 2] * 2),
        (equal(5), lambda model, xs: sum(xs).sum(), [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4]),
        (equal(5), lambda model, xs: (xs[-1] / len(model.layers)).sum(), [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4]),
        (equal(5), lambda model, xs: (xs[-1] + xs[3]).sum(), [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4]),
    ],
    ids=["equal", "two", "alternating", "floats", "windows", "one-window", "widths", "all-values", "count", "missing"],
)
def test_layers_that_are_captured_again(
    layers: Any, finish: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(layers) if finish is None else Model(layers, finish)
    capture(Request.of(model, X))
    assert model.calls.numbers == calls
    assert [name for name, _ in model.layers.named_children()] == [str(n) for n in range(len(model.layers))]
    check(model, X, monkeypatch)


@pytest.mark.parametrize("name", ["llama", "gpt2", "megatron"])
def test_tiny_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make: Any = getattr(tiny_models, name)
    model, inputs = make(2, layers=4) if name != "megatron" else make(2)
    check(model, inputs, monkeypatch)


PRESETS = {
    "gpt2": 5, "llama3-8b": 4, "t5-large": 5, "mixtral-8x22b": 3, "gemma2-9b": 6, "bert-large": 3, "vit-l-16": 3,
    "whisper-large": 3, "qwen3-30b-a3b": 4, "falcon-40b": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(PRESETS, keep=("gpt2", "mixtral-8x22b")))
def test_presets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve_model(name, layers=PRESETS[name], hidden=64, seq_len=40, batch=7)
    taken = []
    real = fewer_layers.with_fewer_layers
    monkeypatch.setattr(fewer_layers, "with_fewer_layers", lambda *args: taken.append(real(*args)) or taken[-1])
    captured = check(found.model, found.example_inputs, monkeypatch)
    assert captured.record is not None
    assert taken[0] is not None


def test_a_failed_capture_puts_layers_back() -> None:
    model = Model(equal(5), lambda model, xs: xs[len(model.layers)].sum() + model.layers[4].up.weight.sum())
    captured = capture(Request.of(model, X))
    assert captured.record is not None and len(model.layers) == 5
