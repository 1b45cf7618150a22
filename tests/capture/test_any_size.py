"""A model captured once: its program at other sizes is the one that a capture at these sizes gives."""

from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch
from one_layer import OneLayer
from same_program import differences
from suites import long
from torch import nn

from autopar.capture.any_size import Capture, capture
from autopar.capture.program import capture_program
from autopar.capture.request import Request
from autopar.cost_model.work.program_costs import program_works
from autopar.errors import CaptureError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.planning.fixed import choose_labels, program_for

X = {"x": torch.zeros(4, 10, 6)}


def alone(captured: Capture) -> Capture:
    """Without the model: a program that is not known is an error instead of a second capture."""
    return replace(captured, again=None)


def check(model: nn.Module, inputs: Any, batches: tuple[int, ...], sequence: int | None = None) -> Program:
    captured = alone(capture(Request.of(model, inputs)))
    assert captured.unknown is None
    for batch in batches:
        found = captured.at(batch=batch, sequence=sequence)
        if sequence is not None:
            inputs = {n: t[:, :1].expand(t.shape[0], sequence, *t.shape[2:]) for n, t in inputs.items()}
        assert differences(found, capture_program(model, inputs, batch=batch)) == []
    return found


@pytest.mark.parametrize("name", [long("llama"), "gpt2", "mlp", long("megatron")])
def test_another_batch(name: str) -> None:
    check(*getattr(tiny_models, name)(2), batches=(2, 4, 7, 64))


@pytest.mark.parametrize("name", [long("llama"), "gpt2"])
def test_another_sequence(name: str) -> None:
    model, inputs = getattr(tiny_models, name)(4, sequence=15)
    check(model, inputs, (6,), sequence=10)


@pytest.mark.parametrize(
    "finish",
    [
        lambda y: y[:, :-1].reshape(-1, 6).sum(),
        lambda y: y.sum() / (y.shape[0] * y.shape[1]),
        lambda y: y.sum() * (1 / y.shape[0]),
        lambda y: y.reshape(-1, 3).square().mean(),
        lambda y: torch.cat([y, y.new_zeros(y.shape[0], 3, 6)], 1).sum(),
        lambda y: (y[:, None] * y[None]).sum(),
        lambda y: (y + torch.arange(y.shape[1], dtype=torch.float32)[:, None]).sum(),
        lambda y: (y * torch.tensor([0.1, float("inf"), -0.0, 1.0, 2.0, 3.0])).sum(),
    ],
    ids=["shifted", "divided", "scaled", "flat", "padded", "pairs", "positions", "literal"],
)
def test_numbers_of_sizes(finish: Any) -> None:
    check(OneLayer(finish), X, (2, 7, 32))


def test_what_sizes_do_not_explain_is_captured_again() -> None:
    model = OneLayer(lambda y: (y / 2 ** y.shape[0]).sum())
    captured = capture(Request.of(model, X))
    assert captured.record is None
    assert captured.unknown is not None and "the number" in captured.unknown
    assert differences(captured.at(batch=40), capture_program(model, X, batch=40)) == []
    with pytest.raises(CaptureError, match=r"batch 40.*the number.*capture the model at these sizes"):
        alone(captured).at(batch=40)


def test_what_the_sequence_does_not_explain_leaves_the_batch() -> None:
    model = OneLayer(lambda y: (y / 2 ** y.shape[1]).sum())
    captured = alone(capture(Request.of(model, X)))
    assert differences(captured.at(batch=9), capture_program(model, X, batch=9)) == []
    with pytest.raises(CaptureError, match=r"sequence 8.*not known"):
        captured.at(batch=9, sequence=8)


@pytest.mark.parametrize("captured_at", (1, long(2), 4))
@pytest.mark.parametrize("name", ["llama", long("gpt2")])
def test_one_sequence(name: str, captured_at: int) -> None:
    """No axis shows the batch of one sequence. What is known of larger batches holds for it."""
    captured = alone(capture(Request.of(*getattr(tiny_models, name)(captured_at))))
    one, larger = captured.at(batch=1), captured.at(batch=5)
    assert captured.has_one_sequence
    assert one.batch == 1 and not one.batch_axes and larger.batch_axes
    assert (one.mixes_batch, one.loss_reduction, one.ignored) == (None, "sum", {"labels": -100})
    assert (larger.mixes_batch, larger.loss_reduction, larger.ignored) == (None, "sum", {"labels": -100})


def test_sequences_that_depend_on_each_other() -> None:
    captured = capture(Request.of(OneLayer(lambda y: (y * y.flip(0)).sum()), X))
    assert captured.has_one_sequence
    assert captured.at(batch=1).mixes_batch == captured.at(batch=4).mixes_batch is not None


@pytest.mark.parametrize(
    ("finish", "says"),
    [
        (lambda y: y.squeeze(0).square().sum(), "another shape"),
        (lambda y: (y / 2 ** y.shape[0]).sum(), "the number"),
    ],
    ids=["squeezed", "unexplained"],
)
def test_one_sequence_that_is_not_known(finish: Any, says: str) -> None:
    """It may run alone after a capture of its own. In micro-batches it is refused."""
    captured = capture(Request.of(OneLayer(finish), X))
    assert not captured.has_one_sequence
    with pytest.raises(CaptureError, match=says):
        alone(captured).at(batch=1)
    assert program_for(captured, Degrees(micro_batch=1)).batch == 1
    with pytest.raises(
        PlanError, match=f"accumulate = 2 may change the loss: a capture of one.*{says}.*larger micro_b"
    ):
        program_for(captured, Degrees(micro_batch=1, accumulate=2))


def test_one_sequence_of_one_token() -> None:
    captured = alone(capture(Request.of(*tiny_models.llama(2, sequence=1))))
    assert captured.has_one_sequence
    assert captured.at(batch=1).mixes_batch is None
    longer = capture(Request.of(*tiny_models.llama(2, sequence=8)))
    with pytest.raises(CaptureError, match="one element"):
        longer.at(batch=2, sequence=1)


def test_a_sequence_beyond_those_captured_is_refused() -> None:
    captured = capture(Request.of(*tiny_models.llama(2, sequence=16)))
    with pytest.raises(CaptureError, match="sequences of 6 and 16"):
        captured.at(batch=4, sequence=32)


class Windowed(nn.Module):
    """Attention to the eight tokens before: causal in sequences of eight, no more in longer ones."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])
        mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 8)
        q = self.project(x)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().sum()


def test_a_window_that_matters_fixes_the_sequence() -> None:
    model, inputs = Windowed(), {"x": torch.zeros(2, 16, 4)}
    captured = alone(capture(Request.of(model, inputs)))
    assert differences(captured.at(batch=5), capture_program(model, inputs, batch=5)) == []
    with pytest.raises(CaptureError, match="mask"):
        captured.at(batch=5, sequence=8)


def test_constants_that_are_equal_by_chance_are_captured_again() -> None:
    def finish(y: torch.Tensor) -> torch.Tensor:
        rows, columns = (torch.arange(n, dtype=torch.float32) for n in y.shape[:2])
        return (y * rows[:, None, None] * columns[:, None]).sum()

    model = OneLayer(finish)
    captured = capture(Request.of(model, X))
    assert differences(captured.at(batch=10), capture_program(model, X, batch=10)) == []
    with pytest.raises(CaptureError, match="two constants would be equal"):
        alone(captured).at(batch=10)


def test_labels_and_their_works_are_those_of_a_capture() -> None:
    model, inputs = tiny_models.llama(2)
    cluster, degrees = ClusterSpec.preset("4xh100"), Degrees(tp=2, dp_shard=2, micro_batch=4)
    found = []
    for program in (alone(capture(Request.of(model, inputs))).at(batch=8), capture_program(model, inputs, batch=8)):
        decided, analysis, labels = choose_labels(program, cluster, degrees)
        works = program_works(program, analysis, labels.blocks, decided.mesh)
        found.append((labels.blocks, works.counts, repr(works.family)))
    assert found[0] == found[1]


class Chunked(nn.Module):
    """Sums chunks of eight tokens, so that a sequence of other lengths has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).unflatten(1, (x.shape[1] // 8, 8)).sum(2).square().mean()


def test_a_sequence_in_chunks_varies_by_half_of_it() -> None:
    program = capture_program(Chunked(), {"x": torch.zeros(4, 64, 6)})
    assert program.sequence == 64
    assert not any("second capture" in note for note in program.notes)
