"""Values that no rank could hold are refused by name and line; sparse gradients of tables become dense."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture.program import capture_program
from autopar.errors import CaptureError, InputError
from autopar.testing import check_equivalence

X = torch.randn(4, 6, 8)


class Graph(nn.Module):
    """Node features that neighbours exchange through a matrix of any layout."""

    adjacency: torch.Tensor

    def __init__(self, hold: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.project = nn.Linear(8, 4)
        hold(self, torch.eye(6).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(torch.sparse.mm(self.adjacency, x[0])).square().sum() + self.project(x).square().sum()


@pytest.mark.parametrize(
    ("hold", "named"),
    [
        (lambda m, a: m.register_buffer("adjacency", a), "buffer 'adjacency' is a sparse_coo tensor"),
        (lambda m, a: m.register_buffer("adjacency", a.to_sparse_csr()), "buffer 'adjacency' is a sparse_csr tensor"),
        (lambda m, a: setattr(m, "adjacency", a), "constant 'adjacency' is a sparse_coo tensor"),
        (lambda m, a: setattr(m, "adjacency", nn.Parameter(a)), "parameter 'adjacency' is a sparse_coo tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_tensor_is_named(hold: Any, named: str) -> None:
    with pytest.raises(CaptureError, match=named):
        capture_program(Graph(hold), {"x": X})


def test_the_same_graph_with_a_dense_matrix_is_captured() -> None:
    model = Graph(lambda m, a: m.register_buffer("adjacency", a.to_dense()))
    model.forward = lambda x: (model.project(model.adjacency @ x)).square().sum()  # type: ignore[method-assign]
    assert check_equivalence(model, {"x": X}, tp=2, dp=2).passed


class Makes(nn.Module):
    """A layer and a function of its result."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.project, self.then = nn.Linear(8, 4), then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.project(x)).square().sum()


def sparse(y: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(torch.eye(4, dtype=y.dtype).to_sparse(), y[0].t())


def positive(y: torch.Tensor) -> torch.Tensor:
    return y[..., y[0, 0] > 0]


def distinct(y: torch.Tensor) -> torch.Tensor:
    return y * torch.unique(y).sum()


def counted(y: torch.Tensor) -> torch.Tensor:
    return y * torch.unique(y, return_counts=True)[1].sum()


def test_a_sparse_operator_is_named_with_its_line() -> None:
    line = Makes.forward.__code__.co_firstlineno + 1
    what = rf"operator aten.to_sparse.default \(.*test_unusable.py:{line}\) returns a sparse_coo tensor"
    with pytest.raises(CaptureError, match=what):
        capture_program(Makes(sparse), {"x": X})


@pytest.mark.parametrize("then", [positive, distinct, counted])
def test_a_size_that_depends_on_data_is_named_with_its_line(then: Any) -> None:
    line = then.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"test_unusable.py:{line}: .* makes a tensor whose shape depends on data"):
        capture_program(Makes(then), {"x": X})


class Table(nn.Module):
    def __init__(self, bag: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(12, 8, sparse=True, mode="sum") if bag else nn.Embedding(12, 8, sparse=True)
        self.project = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.project(self.table(ids)).square().sum()


@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients_of_a_table_are_dense(bag: bool) -> None:
    assert check_equivalence(Table(bag), {"ids": torch.randint(0, 12, (4, 3))}, tp=2, dp=2).passed


def test_a_loss_without_parameters_has_no_gradient_to_compare() -> None:
    model = nn.Sequential(nn.Tanh())
    with pytest.raises(InputError, match="depends on no trained parameter"):
        check_equivalence(model, (X, X), loss_fn=nn.functional.mse_loss, tp=2)
