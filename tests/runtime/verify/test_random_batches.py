"""Random batches of `verify`: every integer is within the bounds of its uses, and equal in every process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture.program import capture_program
from autopar.ir.degrees import Degrees
from autopar.runtime.verify.random_batches import notes_on_inputs, random_batches, values_that_decide
from autopar.runtime.verify.reference import constants_of


class Tagger(nn.Module):
    """Words of 300, tags of 5; words whose length is given are averaged under an integer mask."""

    def __init__(self, words: int, tags: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, 8), nn.Linear(8, tags)

    def forward(
        self, words: torch.Tensor, lengths: torch.Tensor, keep_mask: torch.Tensor, tags: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.table(words) * keep_mask.unsqueeze(-1) / lengths.view(-1, 1, 1)
        return F.cross_entropy(self.head(hidden).transpose(1, 2), tags, ignore_index=-1)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


@pytest.mark.parametrize(("words", "tags"), [(300, 5), (5, 300)])
def test_integers_are_within_the_bounds_of_their_own_uses(words: int, tags: int) -> None:
    inputs = {"words": ones(16, 12), "lengths": ones(16), "keep_mask": ones(16, 12), "tags": ones(16, 12)}
    program = capture_program(Tagger(words, tags), inputs)
    found = random_batches(program, Degrees(), 4, 0)
    assert [tuple(batch["tags"].shape) for batch in found] == [(16, 12)] * 4
    every = {name: torch.stack([batch[name] for batch in found]) for name in inputs}
    assert every["words"].min() == 0 and words - 1 >= every["words"].max() > 0.9 * (words - 1)
    assert every["tags"].min() == -1 and tags - 1 >= every["tags"].max() > 0.9 * (tags - 1)
    assert not (every["tags"][:, 0] == -1).any()  # the first sequence is whole
    assert (every["lengths"].min(), every["lengths"].max()) == (1, 8)
    assert every["keep_mask"].eq(1).all()
    assert notes_on_inputs(program) == (
        "no operator bounds the integer input 'lengths': it is drawn from 1 to 8",
        "no operator bounds the integer input 'keep_mask': it is 1 everywhere",
    )
    again = random_batches(program, Degrees(), 4, 0)
    assert all(
        torch.equal(batch[name], other[name]) for batch, other in zip(found, again, strict=True) for name in inputs
    )


def test_labels_of_places_of_a_picture() -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(3, 7, 1)

        def forward(self, picture: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.body(picture), labels)

    program = capture_program(Places(), {"picture": torch.randn(2, 3, 4, 6), "labels": ones(2, 4, 6)})
    (batch,) = random_batches(program, Degrees(), 1, 0)
    assert {-100, *range(7)} >= set(batch["labels"].flatten().tolist())


def test_small_integers_stay_within_their_type() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5000, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids.long()).square().sum()

    program = capture_program(Table(), {"ids": torch.ones(64, 8, dtype=torch.uint8)})
    (batch,) = random_batches(program, Degrees(), 1, 0)
    assert batch["ids"].dtype is torch.uint8 and batch["ids"].max() > 200


@pytest.mark.parametrize("offset_first", (False, True))
def test_offsets_that_are_added_narrow_an_index(offset_first: bool) -> None:
    """Several tables in one, as recommenders have them: an index of the last table is the least bounded one."""

    class Fields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offsets", torch.tensor([0, 30, 70]))
            self.table = nn.Embedding(77, 4)

        def forward(self, fields: torch.Tensor) -> torch.Tensor:
            rows = self.offsets + fields if offset_first else fields + self.offsets
            return self.table(rows).square().sum()

    model = Fields()
    program = capture_program(model, {"fields": ones(64, 3)})
    constants = constants_of(program, dict(model.named_buffers()).__getitem__)
    (batch,) = random_batches(program, Degrees(), 1, 0, constants=constants)
    assert set(batch["fields"].flatten().tolist()) == set(range(7))
    assert notes_on_inputs(program, constants) == ()
    model(**batch)


def test_offsets_of_bags_have_the_example_values() -> None:
    """Random offsets are no bags: they do not begin at 0, and they are not sorted."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(20, 4, mode="sum")

        def forward(self, x: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return (self.table(ids, offsets) * x).square().sum()

    inputs = {"x": torch.ones(4, 4), "ids": ones(12), "offsets": torch.tensor([0, 2, 7, 7])}
    program = capture_program(Bags(), inputs)
    given = values_that_decide(program, inputs)
    assert given.keys() == {"offsets"}
    (batch,) = random_batches(program, Degrees(), 1, 0, given)
    assert batch["offsets"].tolist() == [0, 2, 7, 7]
    assert "the input 'offsets' has the values of the example inputs, because it must be sorted" in notes_on_inputs(
        program
    )
    Bags()(**batch)


class Halves(nn.Module):
    """The first rows of the batch are compared with others, as a preference loss does it."""

    def __init__(self, pairs: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.pairs = nn.Linear(6, 3), pairs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.pairs(self.layer(x).sum(-1))
        loss: torch.Tensor = -nn.functional.logsigmoid(first - second).mean()
        return loss


@pytest.mark.parametrize(
    "pairs",
    [lambda r: r.chunk(2), lambda r: (r[::2], r[1::2]), lambda r: r.view(2, -1).unbind(0), lambda r: r.split(4)],
)
def test_a_model_that_halves_its_batch_is_noted(pairs: Callable[[torch.Tensor], Any]) -> None:
    (note,) = notes_on_inputs(capture_program(Halves(pairs), {"x": torch.randn(8, 6)}))
    assert "takes parts of the batch" in note and "the rows of the global batch" in note


@pytest.mark.parametrize("pairs", [lambda r: (r, 0.5), lambda r: (r.view(8, 1), 0.5), lambda r: (r.view(1, 8), 0.5)])
def test_a_whole_batch_is_not_noted(pairs: Callable[[torch.Tensor], Any]) -> None:
    assert notes_on_inputs(capture_program(Halves(pairs), {"x": torch.randn(8, 6)})) == ()
