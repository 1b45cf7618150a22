"""A model that changes itself in its forward pass is captured, and the capture leaves it as it was."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autopar.capture.export.export import outputs_of
from autopar.capture.program import capture_program


class TwoModes(nn.Module):
    """Takes another submodule for short inputs, and remembers that it did, as BigBird does."""

    def __init__(self) -> None:
        super().__init__()
        self.long = True
        self.layer: nn.Module = nn.Sequential(nn.Linear(8, 8), LongOnly())
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if x.shape[1] < 100 and self.long:
            self.long = False
            self.layer = nn.Sequential(self.layer[0])
        return self.layer(x).square().mean()


class LongOnly(nn.Module):
    """Runs with no short input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] < 100:
            raise ValueError("too short")
        return x.tanh()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_mode_of_the_inputs_is_captured(device: str) -> None:
    with torch.device(device):
        model = TwoModes()
        inputs = {"x": torch.randn(4, 6, 8)}
    before = dict(model.named_modules())
    for _ in range(2):
        program = capture_program(model, inputs)
        targets = {str(n.target) for block in program.blocks for n in block.graph.nodes if n.op == "call_function"}
        assert "aten.linear.default" in targets
        assert "aten.tanh.default" not in targets
        assert (model.long, model.num_calls, dict(model.named_modules())) == (True, 0, before)


def test_the_changes_of_buffers_stay_part_of_the_model() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return self.layer(x).square().mean()

    assert set(capture_program(Counts(), {"x": torch.randn(4, 8)}).updates) == {"seen"}


class Averaged(nn.Module):
    """Keeps a running mean of its outputs, by assignment or in place."""

    def __init__(self, *, assigns: bool, size: int = 8) -> None:
        super().__init__()
        self.layer, self.assigns = nn.Linear(8, 8), assigns
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        new = 0.9 * self.mean + 0.1 * y.detach().mean(0) if self.mean.shape == y.shape[1:] else y.detach().mean(0)
        if self.assigns:
            self.mean = new
        else:
            self.mean.copy_(new)
        return (y - self.mean).square().mean()


def test_an_assigned_buffer_is_an_update() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    programs = [capture_program(Averaged(assigns=assigns), {"x": x}) for assigns in (True, False)]
    assert all(list(program.updates) == ["mean"] for program in programs)
    copies = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)
    operators = [[n.target for b in p.blocks for n in b.operators if n.target not in copies] for p in programs]
    assert operators[0] == operators[1]


def test_a_capture_leaves_the_buffer() -> None:
    model = Averaged(assigns=True)
    before = model.mean
    capture_program(model, {"x": torch.randn(4, 8)})
    assert model.mean is before
    assert not model.mean.any()


def test_a_buffer_of_another_shape_is_named() -> None:
    program = capture_program(Averaged(assigns=True, size=3), {"x": torch.randn(4, 8)})
    assert not program.updates
    assert any("the buffer 'mean' gets another shape in the forward pass" in note for note in program.notes)


class Caching(nn.Module):
    """Adds a cache to its outputs, which changes its loss here."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean() * (2 if self.config.use_cache else 1)


def test_the_unmodified_model_has_no_cache_either() -> None:
    """`verify` compares the captured model with `outputs_of`."""
    model, x = Caching(), torch.randn(4, 8)
    loss = outputs_of(model, {"x": x})["loss"]
    torch.testing.assert_close(loss, model.layer(x).square().mean())
    assert model.config.use_cache
