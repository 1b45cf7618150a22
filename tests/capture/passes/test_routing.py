"""Routing by sorting is found by what is done with rows, and stays as it is where a row's place matters."""

from collections.abc import Callable

import pytest
import torch
from equivalence import case_of, check, check_random, labelled
from routed_models import DROPLESS, EXPERTS, GATES, HIDDEN, balance_loss, example
from suites import long, thinned
from torch import fx, nn
from torch.nn import functional as F

from autopar.capture.program import capture_program
from autopar.errors import PlanError
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.rules.grouped_product import GROUPED_MM
from autopar.rules.routed import ORDER, PRODUCT, ROUTED, UNTAKE

aten = torch.ops.aten


def targets(program: Program) -> list[fx.node.Target]:
    return [n.target for b in program.blocks for n in b.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("routing", DROPLESS)
def test_every_spelling_is_found(routing: str, choices: int) -> None:
    program = capture_program(*example(routing, choices=choices))
    found = targets(program)
    assert found.count(ORDER) == 1
    assert found.count(PRODUCT) == 2
    assert found.count(UNTAKE) == 1
    assert GROUPED_MM not in found
    assert not [t for t in found if "sort" in str(t)]
    assert program.mixes_batch is None


@pytest.mark.parametrize("gate", GATES)
def test_no_gate_couples_tokens(gate: str) -> None:
    case = case_of(example("sort_and_inverse", gate=gate, shared=True, layers=2))
    assert case.program.mixes_batch is None
    mesh = Mesh.of(dp=2, tp=2)
    check(case, labelled(case, mesh), mesh)
    check_random(case, mesh, 0)


@pytest.mark.parametrize("routing", thinned(DROPLESS, keep=list(DROPLESS)[::2]))
def test_equal_to_one_device(routing: str) -> None:
    """An odd length, and three choices of six experts."""
    case = case_of(example(routing, batch=2, sequence=5, experts=6, choices=3))
    for mesh in (Mesh.of(dp=2), Mesh.of(tp=2)):
        check(case, labelled(case, mesh), mesh)
        check_random(case, mesh, 1)


def _cumulative(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return rows.cumsum(0)


def _weighed_by_place(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return rows * (1 + place[:, None])


def _turned_around(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return rows.flip(0)


def _halves(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(0, (2, -1)).softmax(0).flatten(0, 1)


def _shifted(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[1:], rows[:1]])


def _twice_sorted(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return rows[place.flip(0).argsort()]


def _noisy(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return F.dropout(rows, 0.5)


PLACES = [_cumulative, _weighed_by_place, _turned_around, _halves, _shifted, _twice_sorted, _noisy]


class PlacesMatter(nn.Module):
    """Rows in the order of experts, changed by `change`, and put back."""

    def __init__(self, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.router, self.change = nn.Linear(HIDDEN, EXPERTS), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).flatten(0, 1)
        order = scores.argmax(-1).argsort(stable=True)
        rows = x.flatten(0, 1)[order]
        rows = self.change(rows, torch.arange(len(rows), device=x.device))
        out = torch.zeros_like(rows)
        out[order] = rows
        return (out * scores.amax(-1, keepdim=True)).square().mean()


@pytest.mark.parametrize("change", PLACES, ids=lambda f: f.__name__)
def test_rows_that_know_their_place_stay_as_they_are(change: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = PlacesMatter(change).double()
    case = case_of((model, {"x": torch.randn(4, 3, HIDDEN, dtype=torch.float64)}))
    assert not set(ROUTED) & set(targets(case.program))
    mesh = Mesh.of(dp=2)
    check(case, labelled(case, mesh), mesh)


def test_rows_that_do_not_know_it_are_found() -> None:
    """The model of the last test, with a change of every row alone."""
    torch.manual_seed(0)
    model = PlacesMatter(lambda rows, place: rows.softmax(-1)).double()
    case = case_of((model, {"x": torch.randn(4, 3, HIDDEN, dtype=torch.float64)}))
    assert ORDER in targets(case.program)
    for seed in range(4):
        check_random(case, Mesh.of(dp=2, tp=3) if seed % 2 else Mesh.of(dp=4), seed)


class LeavesSorted(nn.Module):
    """Sorted rows themselves are an output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x.argmax(-1).argsort(stable=True)
        rows = x[order]
        weights = torch.linspace(0, 1, len(x), dtype=x.dtype, device=x.device)
        return (rows * weights[:, None]).square().mean()


def test_sorted_rows_that_are_never_put_back_stay() -> None:
    program = capture_program(LeavesSorted(), {"x": torch.randn(6, 4)})
    assert ORDER not in targets(program)
    assert program.mixes_batch is not None


def test_labels_that_move_rows_between_ranks_are_refused() -> None:
    """The lowering refuses what the labeller never chooses."""
    case = case_of(example("sort_and_inverse"))
    mesh = Mesh.of(dp=2)
    blocks = labelled(case, mesh)
    (key,) = [k for b in blocks for k, label in b.labels.items() if "expert_order" in k and label == ("t.0",)]
    for block in blocks:
        if key in block.labels:
            block.labels[key] = ("I",)  # type: ignore[index]
    with pytest.raises(PlanError, match="rows in the order of a rank's own tokens"):
        check(case, blocks, mesh)


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), long(Mesh.of(tp=3)), Mesh.of(dp=2, tp=2)], ids=str)
def test_under_sequence_parallelism_rows_are_never_cut(mesh: Mesh) -> None:
    """Without the ban the cheapest labels slice sorted rows, and tokens get the rows of others."""
    case = case_of(example("sort_and_inverse", layers=2))
    check(case, labelled(case, mesh, True), mesh)


def test_capacity_and_balance_couple_samples_in_time_only() -> None:
    """An expert that takes the first tokens of the batch, and a product of two means."""
    for case in (case_of(example("capacity")), case_of(example("sort_and_inverse", more=balance_loss))):
        assert case.program.mixes_batch is not None
        mesh = Mesh.of(dp=2)
        check(case, labelled(case, mesh), mesh)
