"""An index that counts the rows picks each row for itself."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from autopar._torch.operators import aten
from autopar.api import parallelize
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


def put(x: Tensor, *index: Tensor, value: Tensor | None = None, adds: bool = False) -> Tensor:
    shape = x[index].shape
    new = torch.linspace(1, 2, shape.numel()).view(shape) if value is None else value
    return x.index_put(index, new, accumulate=adds)


def offsets(i: Tensor) -> Tensor:
    return (rows() * S)[:, None] + i


PICKS |= {
    "written": lambda x, i: put(x, rows(), i[:, 0]),
    "written from the end": lambda x, i: put(x, rows(), i[:, 0] - S),
    "one number written": lambda x, i: put(x, rows(), i[:, 0], value=torch.zeros(())),
    "one row written": lambda x, i: put(x, rows(), i[:, 0], value=torch.ones(D)),
    "added": lambda x, i: put(x, rows()[:, None], i, adds=True),
    "elements written": lambda x, i: put(x, rows(), i[:, 0], i[:, 1] % D),
    "written apart": lambda x, i: aten.index_put.default(x, [rows(), None, i[:, 0] % D], torch.arange(S) / S),
    "written second": lambda x, i: put(x.transpose(0, 1), i[:, 0], rows()),
    "written turned": lambda x, i: put(x, rows()[None, :], (i * 0 + rows(2)).T),
    "end to end": lambda x, i: x.flatten(0, 1)[offsets(i)],
    "end to end in one dimension": lambda x, i: x.reshape(B * S, D)[(i + rows().view(-1, 1) * S).reshape(-1)],
    "end to end selected": lambda x, i: x.view(-1, D).index_select(0, offsets(i).view(-1)).view(B, 2, D),
    "end to end, one of a row": lambda x, i: x.view(-1, D)[torch.arange(0, B * S, S) + i[:, 0]],
    "end to end written": lambda x, i: put(x.view(-1, D), offsets(i[:, :1]).view(-1)).view(B, S, D),
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
    indexed = (aten.index.Tensor, aten.index_put.default)
    assert not [n for n in module.graph.nodes if n.target in indexed and n.args[1][0] is not None]
    assert not any(n.target is aten.index_select.default for n in module.graph.nodes)
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
        lambda x, i: x.flatten(0, 1)[(rows() * D)[:, None] + i],
        lambda x, i: x.flatten(0, 1)[(rows(2) * S) + i],
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


@pytest.mark.parametrize("bad", (-1, S))
def test_a_place_outside_of_a_sample_is_no_place_of_the_next(bad: int) -> None:
    x, i = torch.randn(B, S, D), torch.randint(S, (B, 2))
    module = rewritten(PICKS["end to end"], x, i)
    i[2, 1] = bad
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        module(x, i)


class Rows(nn.Module):
    """Writes or reads rows of every sample by its own places."""

    def __init__(self, picks: Picks) -> None:
        super().__init__()
        self.layer, self.picks = nn.Linear(D, D), picks

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.picks(torch.tanh(self.layer(x)), i).square().mean()


def written(y: Tensor, i: Tensor) -> Tensor:
    z = y.clone()
    z[torch.arange(y.shape[0]), i[:, 0]] = 0
    z[torch.arange(y.shape[0]), i[:, 1]] = y[:, 0]
    return z


@pytest.mark.parametrize("picks", (written, lambda y, i: y.flatten(0, 1)[(torch.arange(y.shape[0]) * S)[:, None] + i]))
def test_micro_batches_have_their_own_rows(picks: Picks) -> None:
    model, batch = Rows(picks).double(), {"x": torch.randn(B, S, D).double(), "i": torch.randint(S, (B, 2))}
    parallel = parallelize(copy.deepcopy(model), "1xcpu", example_inputs=batch, plan={"dp": 1, "accumulate": 2})
    try:
        loss, expected = parallel.forward_backward(batch), model(**batch)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0.0)
        gradient = parallel.whole_gradients()["layer.weight"]
        torch.testing.assert_close(gradient, model.layer.weight.grad, rtol=1e-12, atol=1e-15)
    finally:
        torch.distributed.destroy_process_group()
