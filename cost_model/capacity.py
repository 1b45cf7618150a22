"""The largest model that fits, per number of devices and way of splitting, by the memory model of `step_memory`.

Models are drawn like Llama 3: L blocks of width 128·L (4096 for 32 blocks, as the 8B; the 405B has 130·L), heads of
128, 8 key heads, feed-forward width 3.5 times the width, its vocabulary. Every rank has micro-batches of one sequence
and recomputes every block, because such plans need the least memory. The ways are those of Rajbhandari et al. 2020,
"ZeRO", figure 1 and table 2: data parallelism with everything replicated, and with ZeRO stages 1, 2 and 3; and the best
plan of all tensor, pipeline and data-parallel degrees with any stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost_model.interval import usable_bytes
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.memory.formula import step_memory
from autopar.cost_model.step.context import Basis
from autopar.cost_model.step.layouts import RECOMPUTE_MODES, Shape, layouts_from
from autopar.cost_model.work.block_work import Family, evaluate, family
from autopar.errors import InputError

WAYS = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "best plan")
ASPECT, HEAD, KEY_HEADS, FEED_FORWARD, VOCABULARY = 128, 128, 8, 3.5, 128256
MAX_BLOCKS = 4096
_MAX_DEVICES = 1_000_000
MAX_TENSOR = 64
_SIZES = np.unique(
    np.round(np.geomspace(1, MAX_BLOCKS, 700))
)  # blocks; within 1.2 % of each other, 2.4 % of parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest model of one way on so many devices; `parameters` is 0 where not even one block fits."""

    way: str
    devices: int
    parameters: float
    blocks: int
    hidden: int
    peak_bytes: float
    tp: int
    pp: int
    dp: int
    zero: int


def capacity(devices: Sequence[int], machine: Machine, sequence: int = 4096) -> list[Largest]:
    """For every number of devices and every way of `WAYS`, the largest model that fits the devices of a machine."""
    for what, value in (*(("number of devices", n) for n in devices), ("sequence", sequence)):
        if not 1 <= value <= _MAX_DEVICES:
            raise InputError(f"{what} {value:,} must be from 1 to {_MAX_DEVICES:,}")
    return [_largest(way, count, machine, sequence) for count in devices for way in WAYS]


def _plans(way: str, devices: int, devices_per_host: float) -> list[tuple[int, int, int, int]]:
    """(tp, pp, dp, ZeRO stage) of a way."""
    if way != "best plan":
        return [(1, 1, devices, WAYS.index(way))]
    widest = min(devices_per_host, MAX_TENSOR)
    return [
        (tp, pp, devices // tp // pp, zero)
        for tp in _divisors(devices)
        if tp <= widest
        for pp in _divisors(devices // tp)
        for zero in range(4)
    ]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, MAX_BLOCKS) + 1) if number % n == 0]


def _largest(way: str, devices: int, machine: Machine, sequence: int) -> Largest:
    """Every size under every plan at once: sizes are rows, plans columns."""
    blocks, plans = _SIZES[:, None], _plans(way, devices, machine.links.devices_per_host)
    tp, pp, dp, zero = (np.array(column, dtype=float)[None, :] for column in zip(*plans, strict=True))
    layouts = layouts_from(
        tp=tp,
        sequence_parallel=tp > 1,
        pp=pp,
        dp=dp,
        shard=dp,
        zero=zero,
        micro_batch=1,
        micro_batches=pp,
        recompute=RECOMPUTE_MODES.index("full"),
    )
    shape = Shape(
        counts=(("layer", blocks),),
        hidden=ASPECT * blocks,
        sequence=np.asarray(float(sequence)),
        experts_per_token=np.ones(1),
        is_tied=np.zeros(1, dtype=bool),
    )
    peaks = step_memory(_blocks(blocks, tp, sequence), layouts, Basis(shape=shape, machine=machine)).peak_bytes
    heads = ASPECT * blocks / HEAD
    fits = (peaks <= usable_bytes(machine.memory_bytes)) & (pp <= blocks) & (tp <= heads)
    size, column, peak = 0, 0, 0.0
    if fits.any():
        row = int(np.flatnonzero(fits.any(axis=1))[-1])
        columns = np.flatnonzero(fits[row])
        column = int(columns[np.argmin(peaks[row, columns])])
        size, peak = int(_SIZES[row]), float(peaks[row, column])
    return Largest(
        way=way,
        devices=devices,
        parameters=parameters(size) if size else 0.0,
        blocks=size,
        hidden=ASPECT * size,
        peak_bytes=peak,
        **dict(zip(("tp", "pp", "dp", "zero"), plans[column], strict=True)),
    )


def _blocks(blocks: Any, tp: Any, sequence: int) -> Family[Any]:
    """The blocks of models with so many blocks, on one of `tp` ranks."""
    width = ASPECT * np.asarray(blocks, dtype=float)
    heads = width / HEAD
    sizes = {
        "b": 1.0,
        "s": float(sequence),
        "S": float(sequence),
        "h": width,
        "a": heads,
        "g": np.maximum(np.minimum(heads, KEY_HEADS), tp),  # fewer key heads than ranks are held several times
        "e": float(HEAD),
        "f": FEED_FORWARD * width,
        "v": float(VOCABULARY),
        "l": float(sequence),
        "t": tp,
    }
    blocks_at: Family[Any] = evaluate(family("llama"), sizes)
    return blocks_at


def parameters(blocks: int) -> float:
    """Elements of the model with so many blocks."""
    works = {role: _blocks(blocks, 1.0, 1).block(role, "tp") for role in ("layer", "first", "last")}
    of = {role: float(work.parameters_split + work.parameters_whole) for role, work in works.items()}
    return blocks * of["layer"] + of["first"] + of["last"]
