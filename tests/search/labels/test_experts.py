"""The experts of a program: products of channels and heads are none, and a form that no rank can split is named."""

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.analysis import analyse
from autopar.errors import PlanError
from autopar.search.labels.choices import num_experts

EXPERTS, WIDTH, INNER = 4, 16, 24


class Mixer(nn.Module):
    """Depthwise and grouped convolutions along a sequence, and a matrix for each head: a dense hybrid."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.grouped = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.heads = nn.Parameter(torch.randn(4, WIDTH // 4, WIDTH // 4))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.grouped(self.depthwise(x.mT)).mT.unflatten(-1, (4, -1))
        return self.out(torch.einsum("bshd,hde->bshe", mixed, self.heads).flatten(2)).square().mean()


class Experts(nn.Module):
    """Every expert computes every token: the matrices of one batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weights = self.router(rows).softmax(-1)
        made = torch.bmm(torch.bmm(rows.expand(EXPERTS, -1, -1), self.up).relu(), self.down)
        return (made * weights.mT.unsqueeze(-1)).sum(0).square().mean()


class Copied(Experts):
    """Each token copies the matrices of its expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        expert = self.router(rows).argmax(-1)
        made = torch.bmm(torch.bmm(rows.unsqueeze(1), self.up[expert]).relu(), self.down[expert])
        return made.square().mean()


@pytest.mark.parametrize(("kind", "expected"), [(Mixer, ()), (Experts, (EXPERTS,)), (Copied, ())])
def test_only_experts_count(kind: type[nn.Module], expected: tuple[int, ...]) -> None:
    program = autopar.capture_program(kind(), {"x": torch.randn(2, 8, WIDTH)})
    assert num_experts(program, analyse(program)) == expected


@pytest.mark.parametrize(
    ("kind", "named"), [(Mixer, "the model has no experts"), (Copied, 'experts_implementation="grouped_mm"')]
)
def test_an_expert_degree_names_its_remedy(kind: type[nn.Module], named: str) -> None:
    inputs: dict[str, Any] = {"x": torch.randn(2, 8, WIDTH)}
    with pytest.raises(PlanError, match=named):
        autopar.estimate(kind(), "2xcpu", {"dp": 2, "ep": 2}, example_inputs=inputs)
