"""A model that changes itself in its forward pass is captured, and the capture leaves it as it was."""

import pytest
import torch
from torch import nn

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
