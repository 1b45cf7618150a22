"""An index that counts the rows picks each row for itself."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from autopar._torch.operators import aten
from autopar.capture.passes.own_rows import own_rows

B, S, D = 4, 6, 3
Picks = Callable[[Tensor, Tensor], Tensor]


def rows(b: int = B) -> Tensor:
    return torch.arange(b)


PICKS: dict[str, Picks] = {
    "padding mask": lambda x, i: x[rows()[:, None, None, None], (rows(S) + 0)[None, None, None, :]],
    "rows alone": lambda x, i: x[rows()],
    "fewer rows": lambda x, i: x[rows(3)],
    "last token": lambda x, i: x[rows(), i[:, 0]],
    "counted from the end": lambda x, i: x[rows(), i[:, 0] - S],
    "several tokens": lambda x, i: x[rows()[:, None], i],
    "an element": lambda x, i: x[rows(), i[:, 0], i[:, 1] % D],
    "a fixed token": lambda x, i: x[rows(), torch.full((1,), 2)],
    "columns": lambda x, i: x[:, rows(S)[:, None], rows(D)],
    "apart": lambda x, i: x[rows(), :, i[:, 0] % D],
    "rows second": lambda x, i: x.transpose(0, 1)[i[:, 0], rows()],
    "turned": lambda x, i: x[rows()[None, :], i.T],
    "int32": lambda x, i: x[rows(), i[:, 0].int()],
    "a diagonal": lambda x, i: x[:, :B][rows(), rows()],
    "expanded": lambda x, i: x[rows()[:, None].expand(B, 5), i[0, :1]],
}


class Picking(nn.Module):
    def __init__(self, picks: Picks) -> None:
        super().__init__()
        self.picks = picks

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.picks(x, i)


def rewritten(picks: Picks, x: Tensor, i: Tensor) -> fx.GraphModule:
    exported = torch.export.export(Picking(picks), (x, i), strict=False).graph_module
    own_rows(exported.graph)
    exported.graph.lint()
    exported.recompile()
    return exported


@pytest.mark.parametrize("name", PICKS)
def test_every_row_is_picked_as_before(name: str) -> None:
    x, i = torch.randn(B, S, D), torch.randint(S, (B, 2))
    module = rewritten(PICKS[name], x, i)
    counted = [n for n in module.graph.nodes if n.target is aten.index.Tensor and n.args[1][0] is not None]
    assert not counted
    for seed in range(3):
        torch.manual_seed(seed)
        x, i = torch.randn(B, S, D), torch.randint(S, (B, 2))
        assert torch.equal(PICKS[name](x, i), module(x, i)[0])


@pytest.mark.parametrize(
    "picks",
    [
        lambda x, i: x[rows().flip(0)],
        lambda x, i: x[rows() + 1 - 1 + i[:, 0] - i[:, 0]],  # equal for every input, but it is computed of an input
        lambda x, i: x[rows() % 2],
        lambda x, i: x[i[:, 0] % B, rows() % 3],
    ],
)
def test_another_index_stays(picks: Picks) -> None:
    x, i = torch.randn(B, S, D), torch.randint(S, (B, 2))
    module = rewritten(picks, x, i)
    assert any(n.target is aten.index.Tensor for n in module.graph.nodes)
    assert torch.equal(picks(x, i), module(x, i)[0])


def test_a_number_outside_of_one_dimension_is_no_element_of_another_row() -> None:
    x, i = torch.randn(B, S, D), torch.randint(D, (B, 2))
    module = rewritten(lambda x, i: x[rows(), i[:, 0], i[:, 1]], x, i)
    for row, bad in itertools.product((0, B - 1), (D, -D - 1)):
        wrong = i.clone()
        wrong[row, 1] = bad
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            module(x, wrong)
