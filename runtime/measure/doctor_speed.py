"""Speeds that `autopar doctor` measures on every rank at the same time: device speeds and link speeds.

Each round begins together on all ranks. A rank's figure is the figure of its median round. `autopar.commands.doctor`
compares the figures. A measurement repeats its work until a round takes `ROUND_S`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from autopar.runtime.measure.calibrate_device import Pace
from autopar.runtime.measure.calibrate_links import there_and_back

multiply = torch.mm
ROUNDS, ROUND_S, MOST_REPEATS = 7, 0.02, 1000
MATMUL_DTYPES = ("float64", "float32", "bfloat16", "float16")  # torch multiplies these without further arguments
MATMUL_SIZE = {"cpu": 256, "cuda": 8192}
COPY_BYTES = {"cpu": 2**25, "cuda": 2**30}
# the first for latency, the last for bandwidth
MESSAGE_BYTES = {
    "cpu": {"8 B": 8, "64 KiB": 2**16, "4 MiB": 2**22},
    "cuda": {"8 B": 8, "1 MiB": 2**20, "256 MiB": 2**28},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedMeasurement:
    """One figure of one rank: its rounds in seconds of the work done once, and how much work that is."""

    name: str
    kind: str
    amount: float
    rounds_s: tuple[float, ...]
    peer: int | None = None


def device_speeds(device: torch.device, dtypes: Iterable[str]) -> Iterator[SpeedMeasurement]:
    """Matrix products in the given dtypes of `MATMUL_DTYPES`, and copies of memory. Collective."""
    for name in (name for name in MATMUL_DTYPES if name in dtypes):
        is_emulated = name in ("bfloat16", "float16") if device.type == "cpu" else name == "float64"
        size = MATMUL_SIZE[device.type] // (4 if is_emulated else 1)  # slow units, or none
        a, b = (torch.randn(size, size, device=device, dtype=getattr(torch, name)) for _ in range(2))
        rounds = rounds_of(partial(multiply, a, b), device)
        yield SpeedMeasurement(name=f"matmul {name}", kind="flops", amount=2.0 * size**3, rounds_s=rounds)
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    rounds = rounds_of(partial(target.copy_, source), device)
    yield SpeedMeasurement(name="memory copy", kind="copy", amount=2.0 * COPY_BYTES[device.type], rounds_s=rounds)


def link_speeds(device: torch.device) -> Iterator[SpeedMeasurement]:
    """All-reduces over all ranks, and messages there and back between every rank and the next. Collective."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return
    for words, size in MESSAGE_BYTES[device.type].items():
        data = torch.zeros(max(1, size // 4), device=device)
        rounds = rounds_of(partial(dist.all_reduce, data), device)
        amount = 4.0 * data.numel()
        yield SpeedMeasurement(name=f"all-reduce of {words}", kind="all-reduce", amount=amount, rounds_s=rounds)
    for words, size in MESSAGE_BYTES[device.type].items():
        data = torch.zeros(max(1, size // 4), device=device)
        name, amount = f"message of {words}", 4.0 * data.numel()
        speed: SpeedMeasurement | None = None
        for pairs in _turns(world_size):
            pair = next((p for p in pairs if dist.get_rank() in p), None)
            action = partial(there_and_back, data, pair) if pair is not None else lambda: None
            rounds = tuple(seconds / 2 for seconds in rounds_of(action, device))
            if pair is not None and dist.get_rank() == pair[0]:
                speed = SpeedMeasurement(name=name, kind="point-to-point", amount=amount, rounds_s=rounds, peer=pair[1])
        if speed is not None:
            yield speed


def _turns(world_size: int) -> list[list[tuple[int, int]]]:
    """Pairs of every rank and the next, last and first included, in turns in which no rank is in two pairs."""
    pairs = [(r, (r + 1) % world_size) for r in range(world_size if world_size > 2 else 1)]
    last = [[pairs[-1]]] if world_size > 2 and world_size % 2 else []
    rest = pairs[: len(pairs) - len(last)]
    return [turn for turn in (rest[0::2], rest[1::2], *last) if turn]


def rounds_of(action: Callable[[], object], device: torch.device) -> tuple[float, ...]:
    """Seconds of an action in each of several rounds, which all ranks begin together. Collective."""
    pace = Pace()
    once = torch.tensor(min(pace.timed(action, device, 1, waits=True)[0] for _ in range(3)), device=device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    repeats = min(MOST_REPEATS, max(1, round(ROUND_S / max(once.item(), 1e-9))))
    rounds = []
    for _ in range(ROUNDS):
        dist.barrier()
        rounds.append(pace.timed(action, device, repeats, waits=True)[0] / repeats)
    return tuple(rounds)
