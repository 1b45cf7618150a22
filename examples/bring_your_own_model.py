"""A module of your own, unmodified: any nn.Module that returns its loss.

    torchrun --standalone --nproc-per-node 4 examples/bring_your_own_model.py --tp 2

autopar does not know these layers by name. It captures them, finds the axes that can be split, and chooses.
The same module on the command line, from this folder:

    autopar plan bring_your_own_model:factory --cluster 4xcpu --tp 2
    autopar verify bring_your_own_model:factory --world-size 4 --tp 2
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import autopar

WIDTH, CLASSES, POINTS = 64, 16, 8


class Mixer(nn.Module):
    """Mixes over points, then over features."""

    def __init__(self, points: int, width: int) -> None:
        super().__init__()
        self.norm_points, self.norm_features = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_points = nn.Sequential(nn.Linear(points, 4 * points), nn.GELU(), nn.Linear(4 * points, points))
        self.over_features = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.over_points(self.norm_points(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_features(self.norm_features(x))


class Classifier(nn.Module):
    """Point sets to classes. Its forward returns the loss and other outputs."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(Mixer(POINTS, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, points: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(points)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(x.mean(dim=1))
        return {"loss": nn.functional.cross_entropy(scores, target), "scores": scores}


def make_batch(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Noisy points on a line in the plane, and the number of the line's direction."""
    target = torch.randint(CLASSES, (batch,), generator=generator)
    angle = target / CLASSES * torch.pi
    along = torch.randn(batch, POINTS, generator=generator)
    time = torch.linspace(0, 1, POINTS).expand(batch, POINTS)
    line = torch.stack((along * angle.cos()[:, None], along * angle.sin()[:, None], along, time), dim=-1)
    return {"points": line + 0.05 * torch.randn(line.shape, generator=generator), "target": target}


def factory() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The module, and the inputs of one rank. The command line takes this function as MODEL."""
    torch.manual_seed(0)
    return Classifier(), make_batch(16, torch.Generator().manual_seed(0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a module of your own on several ranks.")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    model, inputs = factory()  # equal on every rank, because it is seeded
    cluster = autopar.ClusterSpec.detect()
    parallel = autopar.parallelize(model, cluster, example_inputs=inputs, plan={"tp": options.tp})
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3)
    dp_rank, show = parallel.rank_mesh.sample_ranks.coordinate, dist.get_rank() == 0
    if show:
        print(parallel.plan.explain(), end="\n\n")
        print(parallel.code("layers.0"), end="\n\n")  # the code of one rank, with every collective
    generator = torch.Generator().manual_seed(dp_rank)  # ranks that differ only in tp read the same data
    for step in range(options.steps):
        loss = parallel.forward_backward(make_batch(16, generator))
        optimizer.step()
        optimizer.zero_grad()
        if show and (step % 20 == 0 or step == options.steps - 1):
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
