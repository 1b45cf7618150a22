"""A copy of a model that holds no weights, and is captured as the model is."""

import threading

import torch
from torch import nn

from autopar.capture.program import capture_program
from autopar.capture.weightless import weightless


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight
        self.norm.weight.requires_grad_(False)
        self.register_buffer("scale", torch.full((8,), 2.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(ids)) * self.scale).square().mean()


def test_ties_buffers_and_modes_are_kept_without_values() -> None:
    model = Tied()
    model.norm.eval()
    found = weightless(model)
    assert isinstance(found, Tied) and found is not model and not found.norm.training
    assert all(t.is_meta for t in (*found.parameters(), *found.buffers()))
    assert found.head.weight is found.table.weight and not found.norm.weight.requires_grad
    assert [n for n, _ in found.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert found.state_dict().keys() == model.state_dict().keys()
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    inputs = {"ids": torch.arange(8) % 16}
    assert capture_program(found, inputs).fingerprint == capture_program(model, inputs).fingerprint
    assert weightless(found) is found


def test_a_model_that_cannot_be_copied_is_kept() -> None:
    model = Tied()
    model.lock = threading.Lock()  # type: ignore[assignment]
    assert weightless(model) is model


def test_a_model_with_plain_tensors_is_kept() -> None:
    model = Tied()
    model.shifts = [torch.ones(8)]  # type: ignore[assignment]
    assert weightless(model) is model
