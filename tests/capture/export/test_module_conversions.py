"""Conversions of modules inside of forward: left out if they change nothing, and refused if they do."""

import pytest
import torch
from equivalence import case_of, check, labelled
from torch import nn
from torch.nn import functional as F

from autopar.capture.program import capture_program
from autopar.errors import CaptureError
from autopar.ir.sharding import Mesh


class Converting(nn.Module):
    """A router that follows its input, as Switch Transformers and soft-moe-pytorch write it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.router, self.dtype = nn.Linear(8, 16), nn.Linear(16, 4), dtype

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.first.to(x.device)(x))
        self.router = self.router.to(self.dtype)
        return {"loss": F.cross_entropy(self.router(hidden.to(self.dtype)).float(), labels)}


INPUTS = {"x": torch.randn(4, 8), "labels": torch.arange(4)}


def test_a_conversion_that_changes_nothing() -> None:
    model = Converting()
    case = case_of((model, INPUTS))
    mesh = Mesh.of(dp=2, tp=2)
    check(case, labelled(case, mesh), mesh)
    assert model.router.weight.is_leaf and type(model.router.weight) is nn.Parameter


def test_any_other_conversion_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"forward converts Linear from torch.float32 on cpu to torch.bfloat16"):
        capture_program(Converting(torch.bfloat16), INPUTS)
