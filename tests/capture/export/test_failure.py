"""The message of a failed capture names the cause: the model's own error, or the line that cannot be traced."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from one_layer import OneLayer
from torch import nn
from torch.nn import functional as F

from autopar.capture.program import capture_program
from autopar.errors import CaptureError

X = {"x": torch.randn(4, 6)}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert ids.shape[1] < 9, f"{ids.shape[1]} words are too many"
        return F.cross_entropy(self.head(self.embed(ids).mean(1)), labels)


def ids(rows: int = 4, length: int = 5) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


def refusal(model: nn.Module, inputs: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        capture_program(model, inputs)
    return str(caught.value)


@pytest.mark.parametrize("device", ("cpu", "meta"))
@pytest.mark.parametrize(
    ("inputs", "error"),
    (
        ({"ids": ids().float(), "labels": ids()[:, 0]}, "Long, Int"),
        ({"ids": ids(), "labels": ids(3)[:, 0]}, "batch_size"),
        ({"ids": ids()}, "TypeError"),
        ({"ids": ids(), "labels": ids()[:, 0], "more": ids()}, "'more'"),
        ({"ids": ids(length=9), "labels": ids()[:, 0]}, "9 words are too many"),
    ),
)
def test_the_models_own_error_is_shown(inputs: dict[str, torch.Tensor], error: str, device: str) -> None:
    text = refusal(Classifier().to(device), inputs)
    assert "fails on one device, without autopar" in text and error in text
    assert "torch.where" not in text
    assert "test_failure.py" in text or "argument" in text  # a wrong argument fails before the model's first line


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_a_batch_that_is_not_in_every_input_is_named(device: str) -> None:
    """The example inputs run, but the second input has the batch in dimension 1."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * weight.t()).square().mean()

    inputs = {"x": torch.randn(4, 6), "weight": torch.randn(6, 4)}
    with pytest.raises(CaptureError) as caught:
        capture_program(Transposed().to(device), inputs, batch=8)
    text = str(caught.value)
    assert "runs with the example inputs, but fails on one device with other sizes" in text
    assert "'x' from (4, 6) to (8, 6), and kept 'weight' (6, 4)" in text and "test_failure.py" in text
    capture_program(Transposed().to(device), inputs)


def test_a_failed_capture_leaves_buffers_and_random_state() -> None:
    model = OneLayer(lambda y: y.sum() + torch.zeros(3)[:7].reshape(7).sum())
    model.layer = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    state = torch.get_rng_state()
    refusal(model, X)
    assert torch.equal(model.layer[1].running_mean, torch.zeros(6))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("finish", "named"),
    (
        (lambda y: torch.from_numpy(y.detach().numpy()).sum() + y.sum(), ".numpy() leaves torch"),
        (lambda y: y.sum() * y.detach().sum().item(), "reads a value that depends on the parameter"),
        (lambda y: y.sum() * y.detach().flatten().tolist()[0], "reads a value that depends on the parameter"),
        (lambda y: y.cuda().sum(), "a tensor is put on 'cuda', but the model is on cpu"),
        (lambda y: y.to("cuda:0").sum(), "a tensor is put on 'cuda', but the model is on cpu"),
        (lambda y: y.sum() + torch.ones(1, device="cuda"), "a tensor is put on 'cuda', but the model is on cpu"),
        (lambda y: torch.unique(y).sum(), "makes a tensor whose shape depends on data"),
        (lambda y: y.sum() * np.random.rand(), "draws random numbers with NumPy or Python"),
        (lambda y: y.sum() * (2 if random.random() < 0.5 else 3), "draws random numbers with NumPy or Python"),
    ),
)
def test_what_no_trace_can_follow_is_named_with_its_line(finish: Callable[..., Any], named: str) -> None:
    text = refusal(OneLayer(finish), X)
    assert named in text and "test_failure.py:" in text


def test_a_model_that_prints_its_values_is_captured() -> None:
    capture_program(OneLayer(lambda y: (str(y.mean()), f"{y.mean():.3f}", y.sum())[-1]), X)


def test_a_second_capture_that_fails_logs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    bound = torch.randn(4, 6)
    capture_program(OneLayer(lambda y: (y + bound).square().sum()), X)
    assert capfd.readouterr() == ("", "")


class Masked(nn.Module):
    """A mask that a run makes and a capture does not, as T5's descendants write it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape[0])
        return (self.head(x) * mask[:, None]).square().mean()  # type: ignore[index]


def test_an_input_that_a_run_fills_in_is_named() -> None:
    text = refusal(Masked(), X)
    assert "test_failure.py" in text and "'mask'" in text and "give it in the example inputs" in text
    assert capture_program(Masked(), X | {"mask": torch.ones(4)}).blocks


class Scaled(nn.Module):
    """A scale of 2 for a parameter's data, which a trace cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.data = self.scale.data * 2
        return (self.layer(x) * self.scale).square().sum()


INTERNAL = ("github", "Guard", "fake tensor", "torch.export", "constant'", "unbacked", "symbol", "dynamo", "functorch")


@pytest.mark.parametrize(
    ("model", "remedy"),
    (
        (Scaled(), "copy it into a buffer with copy_"),
        (OneLayer(lambda y: F.one_hot(y.argmax(1), y.argmax(1).max() + 1).sum() * y.sum()), "use torch.where"),
        (OneLayer(lambda y: torch.func.grad(lambda z: z.square().sum())(y).sum()), "torch.autograd.grad"),
        (OneLayer(lambda y: torch.func.vmap(torch.func.grad(lambda z: z.sin().sum()))(y).sum()), "torch.autograd.grad"),
        (OneLayer(lambda y: torch.func.jacrev(torch.tanh)(y[0]).sum()), "torch.autograd.grad"),
    ),
)
def test_no_text_of_torchs_machinery_reaches_a_user(model: nn.Module, remedy: str) -> None:
    text = refusal(model, X)
    assert not [word for word in INTERNAL if word in text] and remedy in text
    assert "test_failure.py:" in text


@pytest.mark.parametrize(
    "error",
    (
        RuntimeError("We found a fake tensor in the constant's list. Please file an issue on github."),
        AttributeError("'Tensor' object has no attribute 'constant'"),
        KeyError("an internal key"),
        AssertionError(),
    ),
)
def test_an_error_of_torch_is_replaced_by_our_words(error: Exception) -> None:
    """Also one that no list knows: the frame that raised it tells."""
    code = compile("def raises(error):\n    raise error\n", torch.__file__, "exec")
    scope: dict[str, Any] = {}
    exec(code, scope)

    def finish(y: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            scope["raises"](error)
        return y.sum()

    text = refusal(OneLayer(finish), X)
    assert "test_failure.py:" in text and type(error).__name__ not in text
    assert not str(error) or str(error) not in text
