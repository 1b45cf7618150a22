"""A search that a test runs in two processes."""

from pathlib import Path

import torch
from kept_captures import capturing
from torch import nn

import autopar


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self, width: int = 64, layers: int = 6, vocabulary: int = 96) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x).transpose(1, 2)
        return out


def searched(rank: int, path: Path) -> tuple[int, str]:
    """Write the plan; this process's hash of a text, and the trials."""
    with torch.device("meta"):
        model = Model()
    ids = torch.empty(2, 16, dtype=torch.long, device="meta")
    with capturing():
        found = autopar.plan(
            model,
            "4xh100",
            example_inputs={"ids": ids, "target": ids},
            loss_fn=nn.functional.cross_entropy,
            global_batch=8,
            fix={"pp": {4, 2}, "schedule": {"1f1b", "gpipe", "interleaved-1f1b"}},
            trials=15,
            seed=5,
        )
    assert found.plan is not None
    found.plan.save(path)
    return hash("text"), f"{found.trials}\n{found.best}\n{found.others}"
