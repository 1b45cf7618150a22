"""Two programs that do the same step, timed on the same ranks in alternated rounds, and the ratio of their times.

Machines are noisy. A disturbance slows both programs of a round, so the median of paired ratios does not depend on it.
The interval is a bootstrap over rounds. Programs whose losses differ do not do the same step, and are refused.
"""

import argparse
import gc
import importlib
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MIN_BLOCK_S = 0.05
RESAMPLES = 2000
TOLERANCE = 1e-4  # of losses in float32, relative
Step = Callable[[], torch.Tensor]
Programs = Mapping[str, Callable[[int], Step]]  # name -> the step of a program on that many ranks


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median ratio of paired times, and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def slowest(seconds: float) -> float:
    """The largest of all ranks' values."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def block(step: Step, count: int) -> float:
    """Seconds per step of the slowest rank over `count` steps."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    return slowest(time.perf_counter() - start) / count


def timed(programs: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds per step of every program and round; each round runs all of them, in turn from either end."""
    for step in programs.values():  # first steps allocate, compile and connect
        block(step, 2)
    counts = {name: max(1, round(MIN_BLOCK_S / block(step, 1) + 0.5)) for name, step in programs.items()}
    found: dict[str, list[float]] = {name: [] for name in programs}
    for index in range(rounds):
        for name in list(programs) if index % 2 else reversed(list(programs)):
            found[name].append(block(programs[name], counts[name]))
    return found


def ratio(ours: list[float], theirs: list[float], seed: int = 0) -> Ratio:
    """The ratio of two programs' times, by pairs of one round."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    chooser = random.Random(seed)
    medians = sorted(statistics.median(chooser.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return Ratio(statistics.median(pairs), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)])


def race(rank: int, module: str, names: list[str], world_size: int, rounds: int) -> tuple[dict[str, list[float]], ...]:
    """Times of every program, and the losses that each computes before the first of them."""
    programs: Programs = importlib.import_module(module).PROGRAMS
    steps = {name: programs[name](world_size) for name in names}
    losses = {name: [_number(step())] for name, step in steps.items()}
    expected = losses[names[0]][0]
    if any(abs(loss - expected) > TOLERANCE * abs(expected) for (loss,) in losses.values()):
        raise ValueError(f"the programs compute different losses: {losses}")
    return timed(steps, rounds), losses


def by_autopar(
    model: torch.nn.Module, data: Mapping[str, torch.Tensor], plan: Mapping[str, Any], *, compiled: bool = False
) -> Step:
    """Forward and backward of autopar's program under a plan for all ranks."""
    import autopar

    found = autopar.parallelize(model, f"{dist.get_world_size()}xcpu", example_inputs=data, plan=plan)
    if compiled:
        found.compile()

    def step() -> torch.Tensor:
        found.zero_grad()
        return found.forward_backward(data)

    return step


def _number(value: torch.Tensor) -> float:
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


def peak(rank: int, module: str, name: str, world_size: int) -> float:
    """Peak megabytes of resident memory in a step, above what the process had before the model was made."""
    families = (f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mixtral"))
    for needed in ("autopar.api", *families):
        importlib.import_module(needed)  # imported modules do not count, for any program
    programs: Programs = importlib.import_module(module).PROGRAMS
    before = _resident("VmRSS")
    step = programs[name](world_size)
    step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    for _ in range(3):
        step()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    """Megabytes of this process: its resident set now, or the peak of it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return float(line.split()[1]) * 1024 / 1e6


def main(module: str, baseline: str, text: str) -> None:
    """The table of one benchmark: every program of a module's PROGRAMS over its baseline."""
    from autopar.runtime.distributed.launch import Ranks

    programs: Programs = importlib.import_module(module).PROGRAMS
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="also run with torch.compile of the generated blocks")
    arguments = parser.parse_args()
    names = [name for name in programs if arguments.compile or "compiled" not in name]
    print(f"{'ranks':>5} {'program':18s} {'s per step':>10} {'over ' + baseline:>22} {'peak MB':>8} {'loss':>8}")
    for world_size in arguments.ranks:
        with Ranks(world_size, timeout_s=1200, checked=False) as ranks:
            times, losses = ranks.run("paired:race", module, names, world_size, arguments.rounds)[0]
        for name in names:
            with Ranks(world_size, timeout_s=600, checked=False) as ranks:
                megabytes = max(ranks.run("paired:peak", module, name, world_size))
            against = "" if name == baseline else str(ratio(times[name], times[baseline]))
            median, loss = statistics.median(times[name]), losses[name][0]
            print(f"{world_size:5d} {name:18s} {median:10.4f} {against:>22} {megabytes:8.0f} {loss:8.4f}", flush=True)
