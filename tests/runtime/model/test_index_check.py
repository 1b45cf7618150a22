"""The check of indices on one rank: it refuses what one device refuses, and runs what one device runs."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lookup_models import MODELS, WIDTH, WORDS, batch_of, built, corrupted
from torch import nn
from torch.nn import functional as F

from autopar.api import parallelize
from autopar.capture.lookups import lookups
from autopar.capture.program import capture_program
from autopar.capture.value_range import ValueRange
from autopar.errors import RuntimeInputError
from autopar.runtime.model.index_check import IndexCheck, first_outside, outside_text
from autopar.runtime.model.module import ParallelModel


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    """`parallelize` makes a world of one rank, which would keep other tests from theirs."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def on_one_rank(model: nn.Module, batch: dict[str, torch.Tensor], **wish: Any) -> ParallelModel:
    return parallelize(model, "1xcpu", example_inputs=batch, plan={"dp": 1, **wish})


@contextmanager
def counted_checks() -> Iterator[mock.Mock]:
    """How often the indices were computed from the batch."""
    with mock.patch.object(IndexCheck, "check", autospec=True, side_effect=IndexCheck.check) as checks:
        yield checks


NUMBERS = (-1000, -101, -100, -32, -31, -25, -2, -1, 0, 1, 2, 3, 4, 5, 6, 19, 20, 21, 23, 24, 29, 30, 31, 32, 100)


@pytest.mark.parametrize("name", MODELS)
def test_random_batches_are_refused_if_one_device_refuses_them(name: str) -> None:
    """Up to two numbers of a legal batch are changed. Losses of the others are one device's."""
    parallel, reference = on_one_rank(built(name), batch_of(name, 4)), built(name)
    draw = random.Random(0)
    num_refused = 0
    for attempt in range(60):
        batch = batch_of(name, 4, seed=10 * attempt)
        for _ in range(draw.choice((0, 1, 1, 2))):
            changed = draw.choice(list(batch))
            place = tuple(draw.randrange(size) for size in batch[changed].shape)
            batch = corrupted(batch, changed, place, draw.choice(NUMBERS))
        try:
            expected = reference(**batch)["loss"].detach()
        except IndexError:
            num_refused += 1
            with pytest.raises(RuntimeInputError, match="got the index"):
                parallel.forward_backward(batch)
            with pytest.raises(RuntimeInputError, match="got the index"):
                parallel.evaluate(batch)
        else:
            torch.testing.assert_close(parallel.forward_backward(batch), expected)
            torch.testing.assert_close(parallel.evaluate(batch)["loss"], expected)
    assert 15 < num_refused < 45


def test_inputs_within_their_ranges_cost_one_comparison() -> None:
    """Indices are computed for the first batch, and for inputs outside of the ranges that are enough."""
    parallel = on_one_rank(built("packed documents"), batch_of("packed documents", 4))
    with counted_checks() as checks:
        for seed in range(3):
            parallel.forward_backward(batch_of("packed documents", 4, seed=seed))
        assert checks.call_count == 1
        parallel.forward_backward(corrupted(batch_of("packed documents", 4), "labels", (0, 0), WORDS))
        assert checks.call_count == 2


def test_ranges_that_are_not_enough_are_no_comparison() -> None:
    """A bucket of two inputs has no range of one input. So the indices of every batch are computed."""
    parallel = on_one_rank(built("recommender"), batch_of("recommender", 4))
    with counted_checks() as checks:
        for seed in range(3):
            parallel.forward_backward(batch_of("recommender", 4, seed=seed))
        assert checks.call_count == 3


class OwnPlaces(nn.Module):
    """Learned positions that are counted in the model: a sequence may be too long for them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(6, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_a_sequence_that_is_too_long_for_the_positions() -> None:
    def batch(length: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.ones(4, length).long(), "labels": torch.ones(4, length).long()}

    parallel = on_one_rank(OwnPlaces(), batch(6))
    parallel.forward_backward(batch(6))
    with pytest.raises(
        RuntimeInputError, match=r"an index that the model makes itself: rank 0 got the index 6, .*places.weight"
    ):
        parallel.forward_backward(batch(8))
    parallel.forward_backward(batch(4))


class ClassOfWord(nn.Module):
    """A table of constants between the word and its class."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("class_of", torch.arange(30) % 4)
        self.classes, self.head = nn.Embedding(4, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, word: torch.Tensor) -> torch.Tensor:
        return self.head(self.classes(self.class_of[word])).square().mean()


def test_an_index_that_is_looked_up() -> None:
    """The first lookup is compared before the second one is computed. A table that changes is compared again."""
    batch = {"word": torch.arange(24).reshape(4, 6)}
    parallel = on_one_rank(ClassOfWord(), batch)
    with counted_checks() as checks:
        parallel.forward_backward(batch)
        parallel.forward_backward(batch)
        assert checks.call_count == 1
    with pytest.raises(RuntimeInputError, match=r"'word': rank 0 got the index 30, but index:0 reads -30 to 29"):
        parallel.forward_backward(corrupted(batch, "word", (3, 5), 30))
    parallel.buffer("class_of").copy_(torch.arange(30) % 5)
    with pytest.raises(
        RuntimeInputError, match=r"'word': rank 0 got the index 4, but classes:embedding:0 reads 0 to 3"
    ):
        parallel.forward_backward(batch)
    parallel.forward_backward({"word": batch["word"] % 4})


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.bfloat16))
def test_the_first_number_outside(dtype: torch.dtype) -> None:
    allowed = ValueRange(low=2, high=40, extra=frozenset({100}))
    assert first_outside(torch.tensor([[2, 39], [100, 7]], dtype=dtype), allowed) is None
    assert first_outside(torch.tensor([[2, 39], [100, 41]], dtype=dtype), allowed) == 41
    assert first_outside(torch.tensor([[2, 1], [100, 0]], dtype=dtype), allowed) == 1
    assert first_outside(torch.tensor([], dtype=dtype), allowed) is None
    assert first_outside(torch.tensor([200], dtype=torch.int64).to(dtype), ValueRange()) is None
    assert first_outside(torch.tensor([1], dtype=dtype), ValueRange(high=1000)) is None


def test_numbers_that_are_none() -> None:
    assert first_outside(torch.tensor([1.0, float("nan")]), ValueRange(low=0, high=3)) is not None
    assert first_outside(torch.tensor([True, False]), ValueRange(low=0, high=1)) == 1


def test_the_message_names_ranks_input_index_and_bound() -> None:
    found = lookups(capture_program(built("packed documents"), batch_of("packed documents", 4)))
    assert outside_text([(0, 0), (0, 0)], found) == ""
    assert (
        outside_text([(1, 24, 0), (0, 0, 0), (1, 24, 0), (3, -5, 0)], found)
        == "input 'tokens': ranks 0, 2 got the index 24, but wte:embedding:0 reads 0 to 23 (rows of wte.weight); "
        "input 'labels': rank 3 got the index -5, but cross_entropy_loss:0 reads 0 to 23 (classes) and ignores -1; "
        "correct the batch, or make the table larger"
    )
    assert "; and 2 more; correct" in outside_text([(1, 24 + rank) for rank in range(5)], found)
