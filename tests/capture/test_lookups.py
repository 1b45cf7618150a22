"""Lookups of a program: which indices are known before a step, and what each of them may hold."""

from typing import Any

import pytest
import torch
from lookup_models import batch_of, built
from torch import nn
from torch.nn import functional as F

from autopar.capture.lookups import Lookup, lookups
from autopar.capture.program import capture_program


def ints(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


def words(found: tuple[Lookup, ...]) -> list[tuple[tuple[str, ...], str]]:
    return [(lookup.inputs, lookup.allowed.bounded_by[0]) for lookup in found]


def test_an_index_has_its_inputs_and_its_table() -> None:
    program = capture_program(built("recommender"), batch_of("recommender", 4))
    assert words(lookups(program)) == [
        (("history",), "items:embedding:0 reads 0 to 31 (rows of items.weight)"),
        (("minute",), "hours:embedding:0 reads 0 to 23 (rows of hours.weight)"),
        (("country", "device"), "buckets:embedding:0 reads 0 to 5 (rows of buckets.weight)"),
        (("item",), "index:0 reads -31 to 30 (positions)"),
        (("item",), "cross_entropy_loss:0 reads 0 to 30 (classes)"),
    ]


class Rotary(nn.Module):
    """Layers that look up the same places, and one that looks up its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("cosines", torch.randn(16, 8))

    def forward(self, tokens: torch.Tensor, places: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x) * self.cosines[places if index < 2 else last]
        return x.square().mean()


def test_equal_lookups_of_repeated_layers_count_once() -> None:
    program = capture_program(Rotary(), {"tokens": ints(4, 6), "places": ints(4, 6), "last": ints(4, 6)})
    assert [lookup.inputs for lookup in lookups(program)] == [("tokens",), ("places",), ("last",)]


class Routed(nn.Module):
    """A router chooses a row, noise chooses another, a buffer that counts steps a third, and a batch the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.rows = nn.Linear(8, 5), nn.Parameter(torch.randn(5, 8))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        chosen = self.rows[self.router(x).argmax(-1)]
        noise = self.rows[torch.randint_like(row, 5)]
        stepped = self.rows[(row + self.steps) % 5]
        return (chosen + noise + stepped + self.rows[row]).square().mean()


def test_an_index_of_weights_noise_or_changing_buffers_is_not_known() -> None:
    program = capture_program(Routed(), {"x": torch.randn(4, 8), "row": ints(4)})
    found = lookups(program)
    assert [lookup.inputs for lookup in found] == [("row",)]
    assert found[0].index.op == "placeholder"


class Nested(nn.Module):
    """A lookup whose index is looked up: the class of a word, in a table of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("class_of", torch.arange(30) % 4)
        self.classes = nn.Embedding(4, 8)

    def forward(self, word: torch.Tensor) -> torch.Tensor:
        return self.classes(self.class_of[word]).square().mean()


def test_a_lookup_comes_after_those_that_it_depends_on() -> None:
    found = lookups(capture_program(Nested(), {"word": ints(4, 6)}))
    assert [(lookup.node.name, lookup.depth) for lookup in found] == [("index", 0), ("classes_out", 1)]


OPERATORS: dict[str, tuple[Any, tuple[int, int] | None]] = {
    "gather": (lambda x, i: x.gather(0, i), (0, 7)),
    "index_select": (lambda x, i: x.index_select(0, i), (0, 7)),
    "index": (lambda x, i: x[i], (-7, 7)),
    "index_fill": (lambda x, i: x.index_fill(0, i, 0.5), (-7, 7)),
    "index_add": (lambda x, i: x.index_add(0, i, torch.ones_like(x[:3])), (0, 7)),
    "index_copy": (lambda x, i: x.index_copy(0, i, torch.ones_like(x[:3])), (0, 7)),
    "index_put": (lambda x, i: x.index_put((i,), torch.ones_like(x[:3])), (-7, 7)),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0), (0, 7)),
    "scatter_add": (lambda x, i: x.scatter_add(0, i, torch.ones_like(x[:3])), (0, 7)),
    "one_hot": (lambda x, i: F.one_hot(i, 7).to(x.dtype) @ x, (0, 7)),
    "embedding": (lambda x, i: F.embedding(i, x.unsqueeze(1)), (0, 7)),
    "nll_loss": (lambda x, i: F.nll_loss(x.expand(3, 7).log_softmax(-1), i), (0, 7)),
    "cross_entropy": (lambda x, i: F.cross_entropy(x.expand(3, 7), i), (0, 7)),
    "cross_entropy by probability": (lambda x, i: F.cross_entropy(x[:3], i.to(x.dtype)), None),
    "binary_cross_entropy": (lambda x, i: F.binary_cross_entropy_with_logits(x[:3], i.to(x.dtype)), None),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_the_bounds_are_those_of_torch(case: str) -> None:
    """torch refuses the numbers beside the bounds, and takes the others."""
    operator, expected = OPERATORS[case]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.randn(7))

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = operator(self.x, index)
            return out.square().mean()

    found = lookups(capture_program(Model(), {"index": ints(3)}))
    assert ([] if expected is None else [expected]) == [(f.allowed.low, f.allowed.high) for f in found]
    if expected is not None:
        for value, is_legal in (
            (expected[0], True),
            (expected[1] - 1, True),
            (expected[0] - 1, False),
            (expected[1], False),
        ):
            index = torch.tensor([0, 1, value])
            if is_legal:
                operator(torch.randn(7), index)
            else:
                with pytest.raises((IndexError, RuntimeError)):
                    operator(torch.randn(7), index)
