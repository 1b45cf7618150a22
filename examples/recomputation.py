"""Recomputation: values inside a layer are computed again for the backward pass instead of being saved.

    python examples/recomputation.py
    python examples/recomputation.py --recompute-blocks 1         (in the first layer of every stage only)

It trains the same pipeline without, with selective and with full recomputation. It prints the bytes that each run saves
for the backward pass and the time of a step, and checks that the losses are equal.
"""

import argparse
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from byte_model import ByteModel
from common import SEED, Text, explained, local_parts, on_ranks, parser, say, train_steps

import autopar


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--pp", type=int, default=2, help="ranks")
    options.add_argument(
        "--recompute-blocks",
        help="layers of a stage that are computed again, or of each such as 2,0 (default: all)",
    )
    chosen = options.parse_args()
    on_ranks(chosen.pp, lambda: train(chosen))


def train(options: argparse.Namespace) -> None:
    blocks = {"recompute_blocks": options.recompute_blocks}
    wishes: list[dict[str, Any]] = [
        {"recompute": "none"},
        {"recompute": "selective", **blocks},
        {"recompute": "full", **blocks},
    ]
    losses, most, seconds = zip(*(one_run(options, wish) for wish in wishes), strict=True)
    for wish, kept, taken in zip(wishes, most, seconds, strict=True):
        what = f"recompute {wish['recompute']}"
        say(f"{what}: at most {kept / 1e6:.2f} MB for the backward pass on any rank, {taken:.3f} s a step")
    worst = max(abs(a - b) for other in losses[1:] for a, b in zip(losses[0], other, strict=True))
    say(f"losses of the runs differ by at most {worst:.1e}")


def one_run(options: argparse.Namespace, wish: dict[str, Any]) -> tuple[list[float], int, float]:
    """Losses, the most bytes saved on any rank, and seconds of a step."""
    torch.manual_seed(SEED)
    model = ByteModel(options.layers, options.width, options.seq_len)
    text = Text(options.batch, options.seq_len)
    parallel = autopar.parallelize(
        model, autopar.ClusterSpec.detect(), example_inputs=text.batch(0), plan={"pp": options.pp, **wish}
    )
    say(explained(parallel))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    train_steps(parallel, optimizer, text, 1, model)  # the first step makes buffers and groups
    started = time.perf_counter()
    kept = Kept(parallel.parameters())
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda held: held.tensor):
        losses = train_steps(parallel, optimizer, text, options.steps, None)
    most = torch.tensor(kept.most)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return losses, int(most), (time.perf_counter() - started) / options.steps


class Kept:
    """Counts the bytes that autograd holds for backward passes: `most` at any time, weights and views left out."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self.weights = {part.untyped_storage().data_ptr() for part in local_parts(weights)}
        self.users: dict[int, int] = {}  # of each block of memory
        self.now = self.most = 0

    def pack(self, tensor: torch.Tensor) -> "Held":
        held, memory = Held(tensor.detach()), tensor.untyped_storage()
        where, size = memory.data_ptr(), memory.nbytes()
        if where not in self.weights:
            weakref.finalize(held, self.free, where, size)
            self.users[where] = self.users.get(where, 0) + 1
            self.now += size * (self.users[where] == 1)
            self.most = max(self.most, self.now)
        return held

    def free(self, where: int, size: int) -> None:
        self.users[where] -= 1
        self.now -= size * (self.users[where] == 0)


class Held:
    """A tensor whose end can be noticed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


if __name__ == "__main__":
    main()
