"""The cost of `parallel.loader` and of `run.log`: torchrun --standalone --nproc-per-node 2 benchmarks/loader.py

It prints milliseconds of rank 0, the median of all calls: a batch of 8 samples from torch's own loader and from
`parallel.loader`, without workers, and a line of metrics.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.runtime.distributed.broadcast import broadcast_object

SAMPLES, TOKENS, BATCH, LINES = 4096, 1025, 8, 300


def milliseconds(calls: Iterator[Any]) -> float:
    """The median time of an item."""
    found = []
    while True:
        started = time.perf_counter()
        if next(calls, None) is None:
            return 1e3 * statistics.median(found)
        found.append(time.perf_counter() - started)


def logged(run: Any, lines: int) -> Iterator[int]:
    for step in range(lines):
        run.log(step, 1.0, learning_rate=1e-3, gradient_norm=0.5)
        yield step + 1


def main() -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    model = nn.Sequential(nn.Linear(8, 4))
    batch = (torch.randn(4, 8), torch.arange(4))
    loss_fn = nn.functional.cross_entropy
    parallel = autopar.parallelize(model, f"{ranks}xcpu", example_inputs=batch, plan={"dp": ranks}, loss_fn=loss_fn)
    dataset = TensorDataset(torch.randint(100, (SAMPLES, TOKENS)))
    show: Callable[[str], None] = print if dist.get_rank() == 0 else lambda text: None
    show(f"DataLoader, {BATCH} samples: {milliseconds(iter(DataLoader(dataset, BATCH, shuffle=True))):.3f} ms")
    loader = parallel.loader(dataset, shuffle=True, global_batch=BATCH * ranks)
    show(f"parallel.loader, {BATCH} samples of {ranks} ranks each: {milliseconds(iter(loader)):.3f} ms")
    with tempfile.TemporaryDirectory() as folder, autopar.Run(broadcast_object(folder), parallel) as run:
        show(f"run.log: {milliseconds(logged(run, LINES)):.3f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
