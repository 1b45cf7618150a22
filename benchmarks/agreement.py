"""The cost of the checks before every step: python benchmarks/agreement.py

It measures the comparison of the ranks (`runtime/model/preflight_check.py`), both parts of the check of indices
(`runtime/model/index_check.py`), and the step of a small data-parallel model with and without them. All inputs of the
model are within their ranges, and some labels are ignored, so the step has the first part only.

The gloo ranks of this machine have TORCH_DISTRIBUTED_DEBUG off. It prints milliseconds of the slowest rank: the median
of paired rounds, and the least one. On a busy machine the least one is nearest to an idle machine's.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping
from unittest import mock

import torch
import torch.distributed as dist
from paired import Step, timed
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.nn import functional as F

from autopar.runtime.checkpoint.saving import Saver
from autopar.runtime.model.preflight_check import PreflightCheck

SHAPES: Mapping[str, tuple[int, ...]] = {"tokens": (8, 1024), "images": (32, 3, 224, 224)}
WORDS, CLASSES = 50_000, 6


class Words(nn.Module):
    """A table of words, one linear layer, and a class of every word."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(WORDS, 12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(self.table(x)).flatten(0, 1), labels.flatten())


class Pixels(nn.Module):
    """Some pixels, one linear layer, and a class of every image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x.flatten(1)[:, :12]), labels)


def programs(world_size: int, data: str) -> dict[str, Step]:
    import autopar
    from autopar.capture.analysis import analyse
    from autopar.runtime.model.index_check import IndexCheck
    from autopar.runtime.model.inputs import read_batch
    from autopar.runtime.model.known_code import KnownCode
    from autopar.runtime.model.preflight_check import STEP
    from autopar.runtime.model.shape_cache import ShapeCache

    generator = torch.Generator().manual_seed(dist.get_rank())
    shape, is_text = SHAPES[data], data == "tokens"
    x = torch.randint(0, WORDS, shape, generator=generator) if is_text else torch.rand(shape)
    labels = torch.randint(0, CLASSES, shape if is_text else shape[:1], generator=generator)
    labels[: len(labels) // 2] = -100
    batch, model = {"x": x, "labels": labels}, Words() if is_text else Pixels()
    parallel = autopar.parallelize(model, f"{world_size}xcpu", example_inputs=batch, plan={"dp": world_size, "zero": 0})
    agreement = PreflightCheck(parallel.rank_mesh, parallel.program.inputs, Saver())
    read = read_batch(parallel.program, batch, shape[0], any_shape=False)
    analysis, constants = analyse(parallel.program, parallel.plan.mesh), dict[str, torch.Tensor]()
    code = KnownCode(parallel.program, analysis, parallel.plan, parallel.rank_mesh, torch.device("cpu"))
    indices = IndexCheck(code)

    def ranks() -> torch.Tensor:
        return torch.tensor(agreement.check(STEP, True, 0, read, False)[0])

    def computed() -> torch.Tensor:
        indices.check([batch], constants, agreement.exchange)
        return x

    def compared() -> torch.Tensor:
        assert not indices.is_unsure(batch, constants)
        return x

    def step() -> torch.Tensor:
        return parallel.forward_backward(batch)

    def without() -> torch.Tensor:
        with (
            mock.patch.object(PreflightCheck, "check", lambda self, *_: ([shape[0]] * world_size, False)),
            mock.patch.object(ShapeCache, "is_unsure", lambda self, *_: False),
        ):
            return step()

    computed()
    return {
        "ranks compared": ranks,
        "inputs in ranges": compared,
        "indices computed": computed,
        "step with checks": step,
        "step without": without,
    }


def run(rank: int, world_size: int, store: str, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", store=FileStore(store, world_size), rank=rank, world_size=world_size)
    for data, shape in SHAPES.items():
        times = timed(programs(world_size, data), rounds)
        for name, seconds in times.items() if rank == 0 else ():
            middle, least = 1e3 * statistics.median(seconds), 1e3 * min(seconds)
            print(f"{world_size:5d} {f'{data} {shape}':28s} {name:18s} {middle:8.3f} {least:8.3f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
    print(f"{'ranks':>5} {'data of a rank':28s} {'':18s} {'ms':>8} {'least':>8}")
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            rank_arguments = (world_size, os.path.join(folder, "store"), arguments.rounds)
            torch.multiprocessing.spawn(run, rank_arguments, nprocs=world_size)


if __name__ == "__main__":
    main()
