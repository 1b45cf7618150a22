"""Saving and loading beside plain torch.distributed.checkpoint: python benchmarks/checkpoint.py

The model is that of `examples/demo.py`, a Llama of 10 million parameters with AdamW, under tp 2 × dp 2 with ZeRO-3 on
four gloo ranks. Each round runs, in this order and the next time in the other: a synchronous save, an asynchronous one,
a step beside an asynchronous save, a load, and a save and a load of the same tensors with torch's own storage. Every
time is that of the slowest rank. The stall is the time of the call of an asynchronous save.

It prints medians, the throughput of autopar as a part of torch's, and the stall as a part of the synchronous save.
torch's storage has no hashes, and unpickles its metadata.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from paired import ratio, slowest
from torch.distributed import FileStore  # type: ignore[attr-defined]

import autopar
from autopar.runtime.model.module import ParallelModel

PLAN = {"tp": 2, "dp": 2, "zero": 3}
LENGTH, ROWS = 128, 4


def demo_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model: torch.nn.Module = LlamaForCausalLM(config)
    return model


class Measured:
    """What is timed, on one rank."""

    def __init__(self, root: Path) -> None:
        ids = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 256
        self.batch, self.root, self.count = {"input_ids": ids, "labels": ids}, root, 0
        self.parallel: ParallelModel = autopar.parallelize(demo_model(), "4xcpu", example_inputs=self.batch, plan=PLAN)
        self.optimizer = torch.optim.AdamW(self.parallel.parameters())
        self.step()
        self.ours()
        self.theirs()

    def step(self) -> None:
        self.parallel.forward_backward(self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def ours(self, *, asynchronous: bool = False) -> None:
        self.count += 1
        self.parallel.save(self.root / "ours", self.optimizer, step=self.count, keep_last=2, asynchronous=asynchronous)

    def loaded(self) -> None:
        self.parallel.load(self.root / "ours", self.optimizer)

    def _state(self) -> dict[str, object]:
        return {
            "model": self.parallel.state_dict(),
            "optimizer": self.parallel.optimizer_state_dict(self.optimizer),
        }

    def theirs(self) -> None:
        dcp.save(self._state(), checkpoint_id=self.root / "theirs")

    def theirs_loaded(self) -> None:
        dcp.load(self._state(), checkpoint_id=self.root / "theirs")

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.root / "theirs").iterdir())


def timed(action: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    return slowest(time.perf_counter() - start)


def run(rank: int, world_size: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    store = FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    measured = Measured(Path(folder))
    finish = measured.parallel.finish_saving

    def stall() -> None:
        measured.ours(asynchronous=True)

    found: dict[str, list[float]] = {}
    names = ("save", "stall", "load", "torch save", "torch load", "step", "step beside a save")
    for index in range(-1, rounds):
        for name in names if index % 2 else reversed(names):
            action: Callable[[], object] = {
                "save": measured.ours,
                "stall": stall,
                "load": measured.loaded,
                "torch save": measured.theirs,
                "torch load": measured.theirs_loaded,
            }.get(name, measured.step)
            if name == "step beside a save":
                stall()
            seconds = timed(action)
            finish()
            if index >= 0:  # the first round allocates
                found.setdefault(name, []).append(seconds)
    if rank == 0:
        report(found, measured.num_bytes(), rounds)
    dist.destroy_process_group()


def report(found: dict[str, list[float]], num_bytes: int, rounds: int) -> None:
    print(f"{num_bytes / 1e6:.1f} MB of state, {rounds} rounds")
    for name, seconds in found.items():
        print(f"{name:20s} median {1e3 * statistics.median(seconds):9.2f} ms, least {1e3 * min(seconds):9.2f} ms")
    print(f"throughput of a save beside torch's: {ratio(found['torch save'], found['save'])}")
    print(f"throughput of a load beside torch's: {ratio(found['torch load'], found['load'])}")
    print(f"stall as a part of a save:           {ratio(found['stall'], found['save'])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where files are written (default: a temporary folder)"
    )
    arguments = parser.parse_args()
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
    folder = tempfile.mkdtemp(dir=arguments.folder)
    try:
        torch.multiprocessing.spawn(run, (4, folder, arguments.rounds), nprocs=4)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
