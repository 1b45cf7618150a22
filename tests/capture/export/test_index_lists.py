"""A list of consecutive numbers as an index is a slice, also where the model lies on meta."""

from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture.export.index_lists import as_slices
from autopar.capture.program import capture_program

aten = torch.ops.aten
ALL = slice(None)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ([-1], (slice(4, 5),)),
        ((..., [-2], ALL), (..., slice(2, 3), ALL)),
        ((ALL, [0, 1]), (ALL, slice(0, 2))),
        ((None, ALL, [1, 2], ...), (None, ALL, slice(1, 3), ...)),
        ((ALL, [-2, -1]), (ALL, slice(2, 4))),
        (([0, 2],), None),
        (([1, 0],), None),
        (([0, 0],), None),
        (([-1, 0],), None),
        (([],), None),
        (([True, False, True, True, False],), None),
        (([[0]],), None),
        (([0], [1]), None),
        ((0, [1]), None),
        ((ALL, [7]), None),
    ],
    ids=str,
)
def test_consecutive_numbers(index: Any, expected: Any) -> None:
    x = torch.arange(60).reshape(5, 4, 3)
    found = as_slices(x, index)
    if expected is None:
        assert found is index
    else:
        assert found == expected
        assert torch.equal(x[found], x[index])


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(-1, 3, 4)[..., [-2, -1], :].square().sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_traced(device: str) -> None:
    with torch.device(device):
        program = capture_program(Picks(), {"x": torch.zeros(4, 4)})
    (node,) = [n for n in program.blocks[0].graph.nodes if n.target is aten.slice.Tensor]
    assert node.args[1:] == (1, 1, 3)
    assert not program.constants.results
