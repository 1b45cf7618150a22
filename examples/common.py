"""Shared by the examples: starting ranks, text to learn, the training loop, and the check against one device.

A script calls `on_ranks(4, train)`. Started alone, it starts itself again as four ranks under torchrun. Every rank
calls `train`, also under your own torchrun.
"""

import argparse
import copy
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime.model.module import ParallelModel
from autopar.runtime.parameters.materialise import parameter_source

SEED, MAX_NORM, MAX_TEXT_BYTES = 0, 1.0, 4_000_000
TOLERANCE = 1e-5  # of the loss, float32
HELD_OUT = 1_000_003  # a step that no run reaches

Batch = dict[str, torch.Tensor]


def on_ranks(num_ranks: int, train: Callable[[], None]) -> None:
    """Call `train` on every rank; torchrun picks a free port."""
    if "RANK" in os.environ:
        train()
        dist.barrier()
        dist.destroy_process_group()
        return
    print(f"starting {num_ranks} ranks", flush=True)
    sys.exit(start_ranks(num_ranks, sys.argv[1:]))


def start_ranks(num_ranks: int, arguments: Sequence[str], *, quiet: bool = False) -> int:
    """Run this script under torchrun with other arguments, and return its status. `quiet` hides what it reports."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    few_words = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "TORCH_LOGS": "-dtensor"}
    with tempfile.TemporaryDirectory() as logs:  # torchrun leaves the folder that it makes by itself
        command = [*launcher, "--log-dir", logs, os.path.abspath(sys.argv[0]), *arguments]
        errors = subprocess.DEVNULL if quiet else None
        return subprocess.run(command, env=few_words | os.environ, stderr=errors).returncode


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all examples have."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--width", type=int, default=128)
    made.add_argument("--batch", type=int, default=16, help="sequences of all ranks together in one step")
    made.add_argument("--seq-len", type=int, default=64)
    return made


def say(*words: object) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


class Text:
    """Random windows of the source of Python's standard library, byte by byte; the step decides which."""

    def __init__(self, sequences: int, seq_len: int) -> None:
        self.sequences, self.seq_len = sequences, seq_len
        found = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name):
            found += path.read_bytes()
        self._bytes = torch.frombuffer(found[:MAX_TEXT_BYTES], dtype=torch.uint8)
        self.size = len(self._bytes)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """One of the equal parts of a step's sequences; labels are the inputs, models shift them."""
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
        starts = torch.randint(self.size - self.seq_len, (self.sequences,), generator=generator)
        tokens = torch.stack([self._bytes[s : s + self.seq_len] for s in starts.tolist()]).long()
        tokens = tokens.chunk(parts)[part]
        return {"input_ids": tokens, "labels": tokens.clone()}


def on_one_device(model: nn.Module) -> nn.Module:
    """The unmodified model on CPU with its weights. A model on meta gets the weights that every plan gives it."""
    return materialised(model, parameter_source(model, seed=SEED))


def materialised(model: torch.nn.Module, source: Callable[[str], torch.Tensor]) -> torch.nn.Module:
    """A CPU copy of a meta model that holds the weights and buffers of `source`; tied parameters stay tied."""
    plain = copy.deepcopy(model)
    made: dict[int, torch.nn.Parameter] = {}
    for path, module in plain.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                value = source(prefix + name).detach().clone()
                made[id(parameter)] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, _ in module.named_buffers(recurse=False):
            module._buffers[name] = source(prefix + name).clone()
    return plain.train()


def train_steps(
    parallel: ParallelModel, optimizer: torch.optim.Optimizer, text: Text, steps: int, check: nn.Module | None
) -> list[float]:
    """The training loop, the same for every strategy; returns the losses.

    The first loss is compared with the loss of `check`, the unmodified model. The script ends if they differ.
    """
    dp = parallel.rank_mesh.sample_ranks  # ranks that differ only in tp, cp or pp read the same text
    expected = None
    if check is not None and dist.get_rank() == 0:  # the one rank that holds the whole model for a moment
        expected = loss_of(on_one_device(check), text.batch(0))
    losses: list[float] = []
    for step in range(steps):
        started = time.perf_counter()
        loss = parallel.forward_backward(text.batch(step, dp.coordinate, dp.degree))
        parallel.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 5 == 0 or step == steps - 1:
            say(f"step {step:3}  loss {losses[-1]:.4f}  {time.perf_counter() - started:.2f} s")
        if step == 0 and expected is not None:
            compare("first step", losses[0], expected)
    return losses


@torch.no_grad()
def loss_of(plain: nn.Module, batch: Batch) -> float:
    """The loss of an unmodified model."""
    return float(plain(**batch)["loss"])


def compare(what: str, loss: float, expected: float) -> None:
    """Print the difference of a loss from one device's loss, and end the script if it is too large."""
    print(f"{what}: loss {loss:.6f}, on one device {expected:.6f}, difference {abs(loss - expected):.1e}", flush=True)
    if not abs(loss - expected) <= TOLERANCE:
        sys.exit(f"{what}: the parallel run differs from the single-device run")


def explained(parallel: ParallelModel, *titles: str) -> str:
    """The sections of the plan's explanation whose titles begin with these; without any, the degrees."""
    wanted = titles or ("Plan for",)
    return "\n\n".join(s for s in parallel.plan.explain().split("\n\n") if s.startswith(wanted))


def held_out_loss(parallel: ParallelModel, text: Text) -> float:
    """The loss of text that is not trained on. Collective."""
    dp = parallel.rank_mesh.sample_ranks
    return parallel.evaluate(text.batch(HELD_OUT, dp.coordinate, dp.degree))["loss"].item()


def state_of(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """The state that torch.distributed.checkpoint saves and loads in place, under the model's own names."""
    return {"model": parallel.state_dict(), "optimizer": parallel.optimizer_state_dict(optimizer)}


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Let a new optimizer allocate its state, for a checkpoint to be loaded into; weights are spoiled."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def local_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's parts of tensors that may be sharded."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of `local_parts`."""
    return sum(t.numel() * t.element_size() for t in local_parts(tensors))
