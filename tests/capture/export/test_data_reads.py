"""Values that a model reads while it is captured: of constants they are computed, of inputs they are decisions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deciding_models import (
    Encoder,
    Lengths,
    PaddedIfNeeded,
    RelativePositions,
    built,
    of_lengths,
    tokens_and_padding,
)
from input_models import cases
from one_layer import OneLayer, checked_program
from suites import long
from torch import nn

from autopar.capture.any_size import capture
from autopar.capture.program import capture_program
from autopar.capture.request import Request
from autopar.errors import CaptureError
from autopar.runtime.codegen.execute import run_reference
from autopar.runtime.parameters.packed import packed_source
from autopar.testing import check_equivalence

X = torch.randn(4, 10, 16, dtype=torch.float64)
MODELS: dict[str, tuple[Any, dict[str, torch.Tensor], int]] = {
    "a causal mask": (Encoder, tokens_and_padding(), 0),
    "only padding": (lambda: Encoder(causal=False), tokens_and_padding(), 0),
    "padding if needed": (PaddedIfNeeded, tokens_and_padding(), 2),
    "no padding": (PaddedIfNeeded, tokens_and_padding(padded=()), 2),
    "lengths": (Lengths, of_lengths(3, 9, 4, 2), 1),
    "relative positions": (RelativePositions, {"x": X}, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_captured_branch_is_the_branch_of_the_model(name: str) -> None:
    kind, batch, num_decisions = MODELS[name]
    model = built(kind)
    program = capture_program(model, batch, specialise=True)
    assert len(program.decisions) == num_decisions
    source = packed_source(program, dict(model.named_parameters()).__getitem__)
    parameters = {n: source(n).detach() for n in program.parameters}
    found = run_reference(program, parameters, batch, dict(model.named_buffers()))[program.loss]
    torch.testing.assert_close(found, model(**batch).detach(), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("name", MODELS)
def test_its_parts_on_ranks_equal_one_device(name: str) -> None:
    kind, batch, _ = MODELS[name]
    check_equivalence(built(kind), batch, tp=2, dp=2, specialise=True)


def test_a_read_of_an_input_is_refused_with_line_value_and_option() -> None:
    with pytest.raises(CaptureError) as caught:
        capture_program(built(Lengths), of_lengths(3, 9, 4, 2))
    text = str(caught.value)
    assert "deciding_models.py:" in text and "`longest = int(lengths.max())` reads 9" in text
    assert "input 'lengths'" in text and "specialise=True" in text


def test_a_read_of_an_activation_is_refused_with_the_option_too() -> None:
    model = OneLayer(lambda y: y.sum() if y.mean() > 0 else y.square().sum())
    with pytest.raises(CaptureError, match=r"depends on the parameter 'layer\.weight'"):
        capture_program(model, {"x": torch.randn(4, 6)}, specialise=True)


def of_a_norm(look: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A model that clamps activations if `look` says so."""

    def loss(y: torch.Tensor) -> torch.Tensor:
        hidden = y + nn.functional.layer_norm(nn.functional.dropout(y, 0.0), (y.shape[-1],))
        return (hidden.clamp(-0.1, 0.1) if look(hidden) else hidden).square().mean()

    return OneLayer(loss)


@pytest.mark.parametrize(
    "look",
    [
        lambda y: not torch.isfinite(y).all(),
        lambda y: torch.isinf(y).any() or torch.isnan(y).any(),
        lambda y: torch.isnan(y.to(torch.float64).reshape(-1) / 2).any().item(),
    ],
)
def test_activations_are_captured_without_overflow(look: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, x = of_a_norm(look), torch.randn(4, 6)
    program = capture_program(model, {"x": x})
    assert program.decisions == ()
    notes = [note for note in program.notes if "is captured for values without overflow" in note]
    assert notes and all("test_data_reads.py:" in note for note in notes)
    found = run_reference(program, dict(model.named_parameters()), {"x": x}, {})[program.loss]
    torch.testing.assert_close(found, model(x=x).detach())
    check_equivalence(model, {"x": x}, tp=2, dp=2)


@pytest.mark.parametrize(
    "made",
    [
        lambda y: y.log(),
        long(lambda y: 1 / y),
        lambda y: y / y.sum(),
        long(lambda y: y * torch.inf),
        lambda y: y.masked_fill(torch.eye(y.shape[0], y.shape[1]).bool(), -torch.inf) + y,
        long(lambda y: y + torch.full((y.shape[1],), -torch.inf)),
        long(lambda y: y.clone().fill_diagonal_(torch.nan)),
        lambda y: (y.view(-1).fill_(torch.inf), y)[1],
    ],
)
def test_values_that_may_be_infinite_without_overflow_are_refused(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = OneLayer(lambda y: (x.clamp(-1, 1) if torch.isinf(x := made(y)).any() else x).sum())
    with pytest.raises(CaptureError, match=r"isinf.* reads a value that depends on the parameter"):
        capture_program(model, {"x": torch.randn(4, 6)})


def test_random_numbers_are_no_decision() -> None:
    model = OneLayer(lambda y: y.sum() * 2 if torch.rand(()) > 0.5 else y.sum())
    with pytest.raises(
        CaptureError, match=r"depends on random numbers; .*, or turn this draw off in the configuration"
    ) as caught:
        capture_program(model, {"x": torch.randn(4, 6)}, specialise=True)
    assert "=True" not in str(caught.value) and not caught.value.option


def test_a_constant_that_was_written_to_is_read_as_it_is_then() -> None:
    def finish(y: torch.Tensor) -> torch.Tensor:
        steps = torch.zeros(4)
        row = steps[1:3]
        row[0] = 7
        return y.sum() * int(steps.max())

    model = OneLayer(finish)
    x = torch.randn(4, 6)
    program = capture_program(model, {"x": x})
    loss = run_reference(program, dict(model.named_parameters()), {"x": x}, {})[program.loss]
    torch.testing.assert_close(loss, model(x))


def test_a_weight_that_is_written_into_a_constant_makes_it_unknown() -> None:
    def finish(y: torch.Tensor) -> torch.Tensor:
        steps = torch.zeros(4)
        view = steps[1:3]
        view[0] = y.detach().sum()
        return y.sum() * int(steps.max())

    with pytest.raises(CaptureError, match="depends on the parameter"):
        capture_program(OneLayer(finish), {"x": torch.randn(4, 6)}, specialise=True)


class Counts(nn.Module):
    """Reads a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.steps < 10:
            x = x / 10
        self.steps += 1
        return self.layer(x).sum()


def test_a_buffer_that_changes_is_no_constant() -> None:
    with pytest.raises(
        CaptureError, match="buffer 'steps', which the forward pass changes; do this outside of forward"
    ):
        capture_program(Counts(), {"x": torch.randn(4, 6)})


def test_a_model_on_meta_decides_by_its_inputs() -> None:
    model = PaddedIfNeeded().to("meta")
    program = capture_program(model, tokens_and_padding(), specialise=True)
    assert [decision.value for decision in program.decisions] == [True, True]


def test_a_captured_model_decides_alike_at_every_batch() -> None:
    captured = capture(Request.of(built(PaddedIfNeeded), tokens_and_padding(), specialise=True))
    for batch in (4, 8, 12):
        assert [decision.value for decision in captured.at(batch=batch).decisions] == [True, True]


def test_fewer_rows_decide_as_all_rows() -> None:
    """Only the last row is padded, and the capture has two rows."""
    batch = tokens_and_padding(padded=(3,))
    program = capture_program(built(PaddedIfNeeded), batch, batch=2, specialise=True)
    assert [decision.value for decision in program.decisions] == [True, True]


def test_a_capture_leaves_no_tensor_in_the_model() -> None:
    kind, inputs, _ = cases()["a kept loss"]
    kept = built(kind)
    capture_program(kept, inputs)
    assert not hasattr(kept, "loss")


class Converted(nn.Module):
    """A parameter that gets its own data again, and tensors of tensors: `as_tensor` alone keeps the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.scale.data = self.scale.data.to(dtype=h.dtype, device=h.device)
        listed = torch.tensor([[h[0, 0], 2.0], [h[0, 1], h.mean()]], dtype=h.dtype)
        h = torch.as_tensor(h) + 1
        return (h * self.scale + h.data).square().mean() + (listed * h.sum()).mean()


def test_data_and_lists_of_tensors_have_no_gradient() -> None:
    checked_program(Converted().double(), torch.randn(4, 6, dtype=torch.float64))


def test_which_decisions_of_micro_batches_are_those_of_the_batch() -> None:
    """Of one extreme they are; of a sum, or of several extremes, they need not be."""
    finish: dict[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], str | None] = {
        lambda y, n: y.sum() * (2 if n.max() + 1 > 9 else 3): None,
        lambda y, n: y[:, : n.max()].sum(): None,
        lambda y, n: y.sum() / int(n.sum()): "reads a sum over the batch",
        lambda y, n: y.sum() * (2 if (n.max() > 9) | (n.min() < 1) else 3): "needs all samples at once",
        lambda y, n: y.sum() * (2 if n.max(0).values.sum() > 9 else 3): "needs all samples at once",
    }
    inputs = {"x": torch.randn(4, 6), "n": torch.randint(1, 5, (4, 3), generator=torch.Generator().manual_seed(0))}
    for loss, reason in finish.items():
        mixes = capture_program(OfTwo(loss), inputs, specialise=True).mixes_batch
        assert mixes is None if reason is None else reason in str(mixes), mixes


class OfTwo(nn.Module):
    def __init__(self, finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.finish = nn.Linear(6, 6), finish

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return self.finish(torch.tanh(self.layer(x)), n)


CHECKS: dict[Callable[[torch.Tensor, torch.Tensor], Any], tuple[int, bool]] = {}


def check(decisions: int, notes: bool = False) -> Callable[..., Any]:
    """A check, the number of decisions that it gives, and whether a note says that it is left out."""

    def kept(function: Any) -> Any:
        CHECKS[function] = decisions, notes
        return function

    return kept


@check(2)
def _(y: torch.Tensor, n: torch.Tensor) -> None:
    if n.max() > 9 or not (n >= 0).all():
        raise ValueError(f"{n.max()} is too large")


@check(1)
def _(y: torch.Tensor, n: torch.Tensor) -> None:
    assert n.max().item() < 9 and n.shape[0] > 1, "too large"


@check(1)
def _(y: torch.Tensor, n: torch.Tensor) -> None:
    if y.shape[0] < 0:
        pass
    elif (n > 0).all():
        n.sum()
    else:
        raise ValueError


@check(2)
def _(y: torch.Tensor, n: torch.Tensor) -> None:
    torch._assert((n > 0).any(), "nothing")
    torch._check((n < 9).all().item(), lambda: "too large")


@check(0, notes=True)
def _(y: torch.Tensor, n: torch.Tensor) -> None:
    if not ((y.abs() <= 1).all() and y.abs().sum().item() < 1e6):
        raise ValueError("too large")


@pytest.mark.parametrize("number", range(len(CHECKS)))
def test_a_check_needs_no_option(number: int) -> None:
    inspect = list(CHECKS)[number]
    decisions, notes = CHECKS[inspect]
    model = OfTwo(lambda y, n: (inspect(y, n), y.square().mean())[1])
    program = capture_program(model, {"x": torch.randn(4, 6), "n": torch.randint(1, 5, (4, 3))})
    assert len(program.decisions) == decisions and program.mixes_batch is None
    assert any("is not checked, because it depends on the parameter" in note for note in program.notes) == notes


@pytest.mark.parametrize(
    "finish",
    (
        lambda y, n: y.sum() if n.max() > 3 else y.mean(),
        lambda y, n: y.sum() * n.max().item(),
        lambda y, n: y[: n.shape[0]].sum() if bool(n.max() > 3) else y.mean(),
    ),
)
def test_a_branch_is_no_check(finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match="specialise=True"):
        capture_program(OfTwo(finish), {"x": torch.randn(4, 6), "n": torch.randint(1, 5, (4, 3))})
