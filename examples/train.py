"""A whole training script: data, accumulation, a schedule, evaluation, saving, resuming. Copy it, and change the parts.

    torchrun --standalone --nproc-per-node 4 train.py README.md
    autopar status runs/first --follow          (beside it, in another terminal)

The same command starts the run and goes on with it. On several hosts, torchrun starts the script on each of them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

STEPS, WARM_UP, EVALUATE_EVERY, SAVE_EVERY = 60, 5, 20, 10
GLOBAL_BATCH, LENGTH = 16, 64  # sequences of one step on all ranks; tokens of a sequence
PLAN = {"tp": 2, "zero": 3, "accumulate": 2}  # or None: autopar searches the plan
RUN = "runs/first"


class Windows(Dataset[dict[str, torch.Tensor]]):
    """The bytes of a text, in windows of equal length. Any dataset with a length and an index does."""

    def __init__(self, text: bytes) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.tokens) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": window, "labels": window}


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8
    )
    with torch.device("meta"):  # no rank ever holds the whole model; its own initialisation runs shard by shard
        return LlamaForCausalLM(config)


def endless(loader: Any) -> Iterator[Any]:
    """One epoch after another. The first one may begin in its middle."""
    while True:
        yield from loader


def evaluated(parallel: autopar.ParallelModel, loader: Any) -> float:
    """The mean loss of held-out data."""
    parallel.eval()
    losses = [parallel.evaluate(batch)["loss"].item() for batch in loader]
    parallel.train()
    return sum(losses) / len(losses)


def main() -> None:
    text = Path(sys.argv[1]).read_bytes()
    cut = len(text) * 4 // 5
    training, held_out = Windows(text[:cut]), Windows(text[cut:])

    shapes = {name: value[None] for name, value in training[0].items()}
    cluster = autopar.ClusterSpec.detect()  # the devices of this torchrun job
    parallel = autopar.parallelize(
        build_model(), cluster, example_inputs=shapes, plan=PLAN, global_batch=GLOBAL_BATCH, seed=0
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=cluster.device_type == "cuda")
    warm_up = LinearLR(optimizer, 0.1, total_iters=WARM_UP)
    schedule = SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, STEPS - WARM_UP)], [WARM_UP])
    data = parallel.loader(training, shuffle=True, seed=0, drop_last=True)  # this rank's part of every global batch
    validation = parallel.loader(held_out, drop_last=True)
    state = {"schedule": schedule, "data": data}

    with autopar.Run(RUN, parallel, total_steps=STEPS) as run:
        done = parallel.latest_step(run.checkpoints) or 0
        if done:
            parallel.load(run.checkpoints, optimizer, state)
        batches = endless(data)
        for step in range(done + 1, STEPS + 1):
            loss = parallel.forward_backward(next(batches))  # all micro-batches of the step
            norm = parallel.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            rate = schedule.get_last_lr()[0]
            schedule.step()
            found = {}
            if step % EVALUATE_EVERY == 0:
                found = {"held out": evaluated(parallel, validation)}
            run.log(step, loss, learning_rate=rate, gradient_norm=norm, extra=found)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if step % SAVE_EVERY == 0 or step == STEPS:
                parallel.save(run.checkpoints, optimizer, state, step=step, keep_last=2, asynchronous=True)
        parallel.finish_saving()
        parallel.export_hf(run.path / "exported")  # for from_pretrained of transformers
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
