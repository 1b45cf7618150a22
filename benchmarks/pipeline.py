"""autopar's pipeline against one written by hand with torch.distributed.pipelining: python benchmarks/pipeline.py

Both have the same Llama, gloo ranks, cuts, micro-batches and schedule (1F1B). The stages by hand follow torch's
tutorial. A step is forward and backward. Prints seconds per step, the ratio of paired rounds with its interval, and the
peak of resident memory.

Then it prints the idle share of two ranks, cut by autopar. Beside it is the bubble of equal stages,
(p - 1) / (n + p - 1) (Narayanan et al. 2021, section 2.2).
"""

import statistics
import time
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from paired import Programs, Step, by_autopar, main
from tensor_parallel import SEQUENCE, SIZES, model
from torch import nn

MICRO_BATCH, MICRO_BATCHES = 2, 4
BUBBLES = (2, 4, 8)
ROUNDS = 7


def batch(count: int = MICRO_BATCHES) -> dict[str, torch.Tensor]:
    shape, generator = (MICRO_BATCH * count, SEQUENCE), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SIZES["vocab_size"], shape, generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def cuts(world_size: int) -> list[int]:
    """The layer at which each stage begins: as many in each."""
    layers = SIZES["num_hidden_layers"]
    return [rank * layers // world_size for rank in range(world_size)]


class HandStage(nn.Module):
    """Some layers of a Llama, with the table before the first and the projection behind the last."""

    def __init__(self, whole: Any, start: int, stop: int) -> None:
        super().__init__()
        self.layers, self.rotary = whole.model.layers[start:stop], whole.model.rotary_emb
        self.table = whole.model.embed_tokens if start == 0 else None
        last = stop == len(whole.model.layers)
        self.norm, self.head = (whole.model.norm, whole.lm_head) if last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is not None:
            x = self.table(x)
        positions = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=positions, attention_mask=None)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def by_hand(world_size: int) -> Step:
    """`PipelineStage` and `Schedule1F1B`; the sum of the losses of all tokens over their number."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, data = dist.get_rank(), batch()
    start, stop = list(pairwise([*cuts(world_size), SIZES["num_hidden_layers"]]))[rank]
    stage = HandStage(model(), start, stop)
    count = data["labels"][:, 1:].numel()

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat = logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(flat, labels[:, 1:].flatten(), reduction="sum") / count

    torch_stage = PipelineStage(stage, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(torch_stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)

    def step() -> torch.Tensor:
        stage.zero_grad()
        losses: list[torch.Tensor] = []
        arguments = (data["input_ids"],) if rank == 0 else ()
        target = data["labels"] if rank == world_size - 1 else None
        schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())
        dist.all_reduce(total)
        return total

    return step


def plan(world_size: int, count: int) -> dict[str, Any]:
    paths = tuple(f"model.layers.{layer}" for layer in cuts(world_size)[1:])
    return {"pp": world_size, "schedule": "1f1b", "micro_batches": count, "cut_at": paths}


def staged(world_size: int, *, compiled: bool = False) -> Step:
    return by_autopar(model(), batch(), plan(world_size, MICRO_BATCHES), compiled=compiled)


PROGRAMS: Programs = {
    "torch by hand": by_hand,
    "autopar": staged,
    "autopar compiled": lambda world_size: staged(world_size, compiled=True),
}


def idle(rank: int, count: int) -> float:
    """The share of a step in which this rank computes nothing, the median of some steps."""
    from autopar.runtime.model.pipeline import _TorchStage

    own_cuts = {"pp": dist.get_world_size(), "schedule": "1f1b", "micro_batches": count}
    step, busy, shares = by_autopar(model(), batch(count), own_cuts), [0.0], []

    def timing(original: Any) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            out = original(*arguments, **options)
            busy[0] += time.perf_counter() - started
            return out

        return timed

    for _ in range(2):
        step()
    with (
        mock.patch.object(_TorchStage, "forward_one_chunk", timing(_TorchStage.forward_one_chunk)),
        mock.patch.object(_TorchStage, "backward_one_chunk", timing(_TorchStage.backward_one_chunk)),
    ):
        for _ in range(ROUNDS):
            dist.barrier()
            started, busy[0] = time.perf_counter(), 0.0
            step()
            dist.barrier()
            shares.append(1 - busy[0] / (time.perf_counter() - started))
    return statistics.median(shares)


def bubbles() -> None:
    from autopar.runtime.distributed.launch import Ranks

    print(f"\n{'micro-batches':>13} {'idle by rank':>16} {'mean':>6} {'(p-1)/(n+p-1)':>14}")
    for count in BUBBLES:
        with Ranks(2, timeout_s=600, checked=False) as ranks:
            shares = ranks.run("pipeline:idle", count)
        each = " ".join(f"{share:.3f}" for share in shares)
        print(f"{count:13d} {each:>16} {statistics.mean(shares):6.3f} {1 / (count + 1):14.3f}", flush=True)


if __name__ == "__main__":
    main("pipeline", "torch by hand", __doc__ or "")
    bubbles()
