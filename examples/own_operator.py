"""An operator of your own, split over ranks: register its rule in one line, prove it, train.

    torchrun --standalone --nproc-per-node 2 examples/own_operator.py --tp 2

Without the rule (`--no-rule`) the script computes the same numbers, but every rank computes the whole operator. Its
operands are gathered in every layer, forward and backward. docs/adding_an_operator.md explains the notation.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar

WIDTH, INNER, CLASSES = 32, 128, 8


@torch.library.custom_op("own_operator::gated", mutates_args=())
def gated(gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up * scale``: in earnest a kernel of yours, here plain torch."""
    return nn.functional.silu(gate) * up * scale


@gated.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(up)


def save_operands(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def gated_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up, scale = ctx.saved_tensors
    sigmoid = torch.sigmoid(gate)
    activated = gate * sigmoid
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    grad_scale = (grad * activated * up).flatten(0, -2).sum(0)
    return grad * up * scale * slope, grad * activated * scale, grad_scale


gated.register_autograd(gated_backward, setup_context=save_operands)


def register() -> None:
    """The rule: n is split like the columns that feed it; the operator is linear in `up`, and in `scale`."""
    autopar.register_rule(gated, "... n, ... n, n -> ... n", linear=[[1], [2]])


def prove() -> None:
    """Run the operator whole and in shards, forward and backward, on calls that look like the model's."""

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64)

    samples = [(real(2, 3, 12), real(2, 3, 12), real(12)), (real(6, 4), real(6, 4), real(4))]
    print(autopar.prove_rule(gated, samples))


class Layer(nn.Module):
    """A gated feed-forward network around the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.scale = nn.Parameter(torch.ones(INNER))
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(gated(self.gate(h), self.up(h), self.scale))


class Classifier(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, point: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embed(point)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), target)


def make_batch(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Points on a disc; the class is the sector in which a point lies."""
    angle = torch.rand(batch, generator=generator)
    radius = 0.5 + torch.rand(batch, generator=generator)
    turned = 2 * torch.pi * angle
    point = torch.stack((radius * turned.cos(), radius * turned.sin()), dim=-1)
    return {"point": point, "target": (angle * CLASSES).long()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model with an operator of your own on several ranks.")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--no-rule", action="store_true", help="leave the operator whole")
    options = parser.parse_args()

    if not options.no_rule:
        register()
        if os.environ.get("RANK", "0") == "0":
            prove()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    parallel = autopar.parallelize(
        Classifier(),
        autopar.ClusterSpec.detect(),
        example_inputs=make_batch(64, generator),
        plan={"tp": options.tp},
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3)
    show = dist.get_rank() == 0
    if show:
        print(parallel.plan.explain(), end="\n\n")
        print(parallel.code("layers.0"), end="\n\n")
    for step in range(options.steps):
        loss = parallel.forward_backward(make_batch(64, generator))
        optimizer.step()
        optimizer.zero_grad()
        if show and (step % 20 == 0 or step == options.steps - 1):
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
