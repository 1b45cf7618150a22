"""Bounds of integer inputs: each from the operators that read it, on models as their authors write them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture.input_ranges import input_ranges
from autopar.capture.program import capture_program
from autopar.errors import InputError

Inputs = dict[str, torch.Tensor]


def ints(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


class TextClassifier(nn.Module):
    """A table of 500 words, 10 classes, segments, and padding that is averaged over."""

    def __init__(self, words: int = 500, classes: int = 10) -> None:
        super().__init__()
        self.words, self.segments = nn.Embedding(words, 8), nn.Embedding(3, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, tokens: torch.Tensor, segment: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.words(tokens) + self.segments(segment.unsqueeze(1).expand_as(tokens))
        return {"loss": F.cross_entropy(self.head(hidden.mean(1)), target)}


class Detector(nn.Module):
    """Pixels and two kinds of labels: a class of every place of the picture, and one of the whole picture."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3, padding=1)
        self.places, self.whole = nn.Conv2d(8, 21, 1), nn.Linear(8, 4)

    def forward(self, image: torch.Tensor, mask_of_classes: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        hidden = self.body(image).relu()
        places = F.cross_entropy(self.places(hidden), mask_of_classes, ignore_index=255)
        return places + F.nll_loss(F.log_softmax(self.whole(hidden.mean((2, 3))), -1), kind)


class Ranker(nn.Module):
    """One integer input with a column per feature, shifted ids, a clamp, and a label that is a probability."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.ages = nn.Embedding(40, 4), nn.Embedding(12, 4), nn.Embedding(5, 4)
        self.head = nn.Linear(12, 1)

    def forward(self, ids: torch.Tensor, item: torch.Tensor, age: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        features = (self.users(ids[:, 0]), self.items(item + 2), self.ages((age // 10).clamp(max=4)))
        score = self.head(torch.cat(features, -1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(score, clicked.to(score.dtype))


class Translator(nn.Module):
    """The decoder reads the labels, shifted to the right, with the ignored ones replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(30, 8), nn.Embedding(17, 8)
        self.head = nn.Linear(8, 17)

    def forward(self, source: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        start = torch.zeros_like(labels[:, :1])
        shifted = torch.cat([start, labels[:, :-1]], 1)
        shifted = shifted.masked_fill(shifted == -100, 0)
        hidden = self.target(shifted) + self.source(source).mean(1, keepdim=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class PickedLogProbabilities(nn.Module):
    """A loss by `gather`, with invalid places clamped and weighed with zero."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 9)

    def forward(self, tokens: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        scores = F.log_softmax(self.head(self.table(tokens)), -1)
        picked = scores.gather(-1, answer.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        valid = (answer >= 0).to(picked.dtype)
        return -(picked * valid).sum() / valid.sum()


class Contradiction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(4, 8), nn.Embedding(4, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.first(ids) * self.second(ids - 10)).sum()


class Routed(nn.Module):
    """Hours of a day by remainder, one-hot kinds, rows picked and rows written."""

    def __init__(self) -> None:
        super().__init__()
        self.hours, self.kinds = nn.Embedding(24, 8), nn.Linear(6, 8)
        self.rows = nn.Parameter(torch.randn(7, 8))

    def forward(self, minute: torch.Tensor, kind: torch.Tensor, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        hidden = self.hours((minute // 60) % 24) + self.kinds(F.one_hot(kind, 6).to(self.rows.dtype)) + self.rows[row]
        memory = torch.zeros(5, 8, dtype=hidden.dtype).index_add(0, slot, hidden)
        return memory.square().sum()


class Table(nn.Module):
    """Indices and quantities in one input of numbers with fractions, as in the table of a recommender."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.head = nn.Embedding(40, 4), nn.Linear(6, 1)

    def forward(self, rows: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat((self.users(rows[:, 0].long()), plain), -1)).square().mean()


def bounds(model: nn.Module, inputs: Inputs) -> dict[str, tuple[float, float]]:
    found = input_ranges(capture_program(model, inputs))
    return {name: (r.low, r.high) for name, r in found.items()}


INFINITY = float("inf")
EXPECTED: dict[str, tuple[nn.Module, Inputs, dict[str, tuple[float, float]]]] = {
    "an index with a fraction": (
        Table(),
        {"rows": torch.ones(4, 3), "plain": torch.ones(4, 2)},
        {"rows": (0, 40)},
    ),
    "words and classes": (
        TextClassifier(),
        {"tokens": ints(4, 6), "segment": ints(4), "target": ints(4)},
        {"tokens": (0, 500), "segment": (0, 3), "target": (0, 10)},
    ),
    "more classes than words": (
        TextClassifier(words=10, classes=500),
        {"tokens": ints(4, 6), "segment": ints(4), "target": ints(4)},
        {"tokens": (0, 10), "segment": (0, 3), "target": (0, 500)},
    ),
    "two losses": (
        Detector(),
        {"image": torch.randn(2, 3, 8, 8), "mask_of_classes": ints(2, 8, 8), "kind": ints(2)},
        {"mask_of_classes": (0, 21), "kind": (0, 4)},
    ),
    "shifts and clamps": (
        Ranker(),
        {"ids": ints(4, 2), "item": ints(4), "age": ints(4), "clicked": ints(4)},
        {"ids": (0, 40), "item": (-2, 10), "age": (0, INFINITY), "clicked": (0, 2)},
    ),
    "labels that are read twice": (
        Translator(),
        {"source": ints(4, 5), "labels": ints(4, 6)},
        {"source": (0, 30), "labels": (0, 17)},
    ),
    "gather": (
        PickedLogProbabilities(),
        {"tokens": ints(4, 5), "answer": ints(4, 5)},
        {"tokens": (0, 64), "answer": (-INFINITY, 9)},
    ),
    "remainder, one-hot, index": (
        Routed(),
        {"minute": ints(4), "kind": ints(4), "row": ints(4), "slot": ints(4)},
        {"minute": (-INFINITY, INFINITY), "kind": (0, 6), "row": (-7, 7), "slot": (0, 5)},
    ),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_every_input_has_the_bounds_of_its_own_uses(case: str) -> None:
    model, inputs, expected = EXPECTED[case]
    assert expected == bounds(model, inputs)


def test_values_that_a_loss_skips() -> None:
    inputs = {"image": torch.randn(2, 3, 8, 8), "mask_of_classes": ints(2, 8, 8), "kind": ints(2)}
    found = input_ranges(capture_program(Detector(), inputs))
    assert found["mask_of_classes"].ignored == {255}
    assert found["mask_of_classes"].allows(255)
    labels = input_ranges(capture_program(Translator(), {"source": ints(4, 5), "labels": ints(4, 6)}))["labels"]
    assert labels.allows(-100) and not labels.allows(-1)


def test_a_skipped_value_that_another_operator_reads_is_not_allowed() -> None:
    class Unmasked(Translator):
        def forward(self, source: torch.Tensor, labels: torch.Tensor) -> Any:
            hidden = self.target(labels) + self.source(source).mean(1, keepdim=True)
            return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    found = input_ranges(capture_program(Unmasked(), {"source": ints(4, 5), "labels": ints(4, 6)}))["labels"]
    assert found.ignored == {-100} and not found.allows(-100)


class Offsets(nn.Module):
    """Positions within each sample, read from all samples in one row after another, and places counted from the end."""

    def forward(self, x: torch.Tensor, place: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        rows = x.reshape(samples * length, width)[(place + torch.arange(samples)[:, None] * length).flatten()]
        return rows.square().mean() + x[:, 0].gather(1, torch.where(last <= -1, last + width, last)).mean()


def test_negative_indices_are_of_the_sample_or_not_allowed() -> None:
    """`place` must not be negative, which is another sample's row; `last` may be."""
    inputs = {"x": torch.ones(4, 6, 8), "place": ints(4, 3), "last": ints(4, 2)}
    assert bounds(Offsets(), inputs) == {"place": (0, 6), "last": (-8, 8)}


def test_a_contradiction_names_both_operators() -> None:
    program = capture_program(Contradiction(), {"ids": ints(4)})
    with pytest.raises(InputError, match=r"'ids'.*second:embedding:0 reads 0 to 3.*first:embedding:0 reads 0 to 3"):
        input_ranges(program)
