"""The script of test_parallelize under torchrun: every case trains three steps and writes its losses as JSON."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from integration_models import materialised
from safetensors.torch import save_file
from torch import nn

import autopar
from autopar.api import parallelize
from autopar.ir.plan import Plan
from autopar.models.load import resolve_model
from autopar.runtime.parameters.materialise import parameter_source

GLOBAL_BATCH, SEQUENCE, STEPS = 8, 16, 3
Batch = Any
Case = tuple[list[float], list[float]]


class Regression(nn.Module):
    """A plain module with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20, bias=False), nn.Linear(20, 12)
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.frozen(self.down(torch.relu(self.up(x)))), target)


class Square(nn.Module):
    """The mean of squares of an output, several outputs, inputs in one tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean(), x


def gpt2(device: str) -> nn.Module:
    torch.manual_seed(0)
    return resolve_model("gpt2", layers=2, hidden=64, seq_len=SEQUENCE, batch=2, device=device).model


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def token_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        ids, labels = (torch.randint(0, 64, (GLOBAL_BATCH, SEQUENCE), generator=generator) for _ in range(2))
        labels[torch.arange(SEQUENCE) >= torch.randint(2, SEQUENCE, (GLOBAL_BATCH, 1), generator=generator)] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def float_batches(num: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(GLOBAL_BATCH, 12, generator=generator) for _ in range(num)) for _ in range(STEPS)]


def mapped(batch: Batch, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    if isinstance(batch, dict):
        return {name: function(value) for name, value in batch.items()}
    return tuple(function(value) for value in batch)


def alone(model: nn.Module, data: list[Batch]) -> list[float]:
    """Losses of the unmodified model on one device, on the global batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for batch in data:
        out = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = out if isinstance(out, torch.Tensor) else out[0]
        losses.append(float(loss.detach()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def together(model: nn.Module, data: list[Batch], **options: Any) -> list[float]:
    """The same under `parallelize`; every data-parallel rank takes its own rows."""
    world = dist.get_world_size() if dist.is_initialized() else int(sys.argv[2])
    example = options.pop("example_inputs", None)
    parallel = parallelize(model, f"{world}xcpu", example_inputs=example, **options)
    degrees, coordinate = parallel.plan.degrees, parallel.rank_mesh.sample_ranks.coordinate
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for batch in data:
        own = mapped(batch, lambda value: value.chunk(degrees.dp)[coordinate])
        losses.append(float(parallel.forward_backward(own)))
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def cases(folder: Path, world: int) -> dict[str, Callable[[], Case]]:
    """(parallel, single-device) losses by case."""
    tokens = token_batches()
    rows = mapped(tokens[0], lambda value: value[: GLOBAL_BATCH // world])
    split = {"tp": min(2, world), "dp": max(1, world // 2), "zero": 3}
    half = mapped(tokens[0], lambda value: value[: GLOBAL_BATCH // split["dp"]])

    @cache
    def state() -> dict[str, torch.Tensor]:
        return gpt2("cpu").state_dict()

    @cache
    def reference() -> list[float]:
        return alone(gpt2("cpu"), tokens)

    def weights() -> Path:
        path = folder / "model.safetensors"
        if dist.get_rank() == 0:
            save_file({n: v.contiguous() for n, v in state().items() if n != "lm_head.weight"}, path)
        dist.barrier()
        return path

    def plan() -> Plan:
        return parallelize(gpt2("meta"), f"{world}xcpu", example_inputs=half, plan=split).plan

    def saved_plan() -> Path:
        path, made = folder / f"plan-{dist.get_rank()}.json", plan()
        made.save(path)
        assert Plan.load(path) == made
        return path

    def split_over(**options: Any) -> Case:
        return together(gpt2("meta"), tokens, example_inputs=half, **options), reference()

    def own_initialisation() -> Case:
        meta = gpt2("meta")
        plain = materialised(meta, parameter_source(meta, seed=3))
        return together(meta, tokens, example_inputs=rows, seed=3), alone(plain, tokens)

    named = [dict(zip(("x", "target"), batch, strict=True)) for batch in float_batches(2)]
    return {
        "cpu model": lambda: (together(gpt2("cpu"), tokens, example_inputs=rows), reference()),
        "state dict, mapping": lambda: split_over(plan=split, state=state()),
        "safetensors, plan": lambda: split_over(plan=plan(), state=str(weights())),
        "path of a plan": lambda: split_over(plan=saved_plan(), state=state()),
        "own initialisation": own_initialisation,
        "dict inputs": lambda: _plain(Regression, named, world),
        "tuple inputs": lambda: _plain(Regression, float_batches(2), world),
        "mean of squares": lambda: _plain(Square, float_batches(1), world),
        "different weights": lambda: _plain(Square, float_batches(1), world, seed=dist.get_rank()),
    }


def _plain(build: Callable[[], nn.Module], data: list[Batch], world: int, seed: int = 0) -> Case:
    example = mapped(data[0], lambda value: value[: GLOBAL_BATCH // world])
    return together(seeded(build, seed), data, example_inputs=example), alone(seeded(build), data)


def derived_inputs(world: int) -> list[int | None]:
    """Without example inputs a transformers model's own are derived: batch and sequence of the program."""
    parallel = autopar.parallelize(gpt2("meta"), autopar.ClusterSpec.preset(f"{world}xcpu"))
    return [parallel.program.batch, parallel.program.sequence]


if __name__ == "__main__":
    out, world_size, chosen = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    derived = derived_inputs(world_size) if "cpu model" in chosen else []
    every = cases(out, world_size)
    result = {"losses": {name: every[name]() for name in chosen or every}, "derived": derived}
    (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
