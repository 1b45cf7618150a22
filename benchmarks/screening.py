"""How many layouts a core prices in a second: `python benchmarks/screening.py [DEVICES] [SEQUENCES]`.

The whole uniform space of a step of so many sequences on so many H100s: tensor, pipeline, context, expert and
data-parallel degrees, ranks that ZeRO divides state over, its stage, micro-batches, virtual stages, recomputation.
Of two rows (GPT-3 175B, Mixtral 8x7B) by their families of blocks, and of Llama 3 8B, captured and labelled for each
tensor degree. Prints the median of rounds in process time (one core; capturing, labelling and compiling expressions
come before), and over the rate of `step_seconds` and `step_memory` on a sample of the same layouts in the same rounds.
The two must agree.
"""

import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.memory.formula import step_memory
from autopar.cost_model.published.config import row_of_config
from autopar.cost_model.published.row import Row
from autopar.cost_model.screened_model import ScreenedModel, model_of_program, model_of_row
from autopar.cost_model.screening import PIECE, Screened, Target, screen, target_of
from autopar.cost_model.step.experts import with_experts
from autopar.cost_model.step.layouts import RECOMPUTE, Layouts, strides
from autopar.cost_model.step.step import step_seconds
from autopar.ir.cluster import ClusterSpec
from autopar.models.load import resolve_model
from autopar.planning.degrees import resolve_degrees
from autopar.planning.estimate import priceable_of
from autopar.planning.fixed import capture_for
from autopar.presets.models import model_preset

ROUNDS = 7
TENSOR = (1, 2, 4, 8)
SAME = 1e-12


def space(devices: int, sequences: int, blocks: int, experts: int, *, splits_sequence: bool) -> Layouts:
    """Every legal layout; `splits_sequence`: with tensor parallelism always sequence parallelism, else both."""
    placements = [
        (tp, pp, cp, ep, devices // (tp * pp * cp), shard)
        for tp, pp, cp in product(TENSOR, _divisors(devices), (1, 2, 4, 8))
        if pp <= blocks and devices % (tp * pp * cp) == 0
        for ep in _divisors(max(experts, 1))
        for shard in _divisors(devices // (tp * pp))
        if devices // (tp * pp) % ep == 0
    ]
    inner = list(product((1, 2, 3, 4, 5, 6, 8), (1, 2, 4, 8), range(4), range(len(RECOMPUTE)), (0, 1)))
    outer = np.repeat(np.array(placements, dtype=np.int32), len(inner), axis=0)
    tp, pp, cp, ep, dp, shard = outer.T
    virtual, micro_batch, zero, recompute, split = np.tile(np.array(inner, dtype=np.int32), (len(placements), 1)).T
    legal = (sequences % (dp * micro_batch) == 0) & ((virtual == 1) | (pp > 1) & (pp * virtual <= blocks))
    legal &= (zero > 0) | (shard == dp * cp)
    legal &= (split == (tp > 1)) if splits_sequence else (split <= (tp > 1))
    columns = {"tp": tp, "sequence_parallel": split, "pp": pp, "virtual": virtual, "cp": cp, "ep": ep, "dp": dp}
    columns |= {"shard": shard, "zero": zero, "micro_batch": micro_batch, "recompute": recompute}
    columns["micro_batches"] = sequences // np.maximum(dp * micro_batch, 1)
    columns |= strides(0, tp=tp, pp=pp, data_ranks=dp * cp)
    return Layouts(**{name: np.ascontiguousarray(column[legal]) for name, column in columns.items()})


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def of_preset(name: str) -> ScreenedModel:
    """A preset's architecture by its family of blocks."""
    row = row_of_config(dict(model_preset(name).config), name, seq_len=2048)
    assert isinstance(row, Row)
    return model_of_row(row)


def captured(name: str, cluster: ClusterSpec, sequence: int) -> list[ScreenedModel]:
    """A preset captured once, and labelled for every tensor degree."""
    engine = engine_named("autopar")
    wishes = [{"tp": tp, "zero": 1, "micro_batch": 1, "micro_batches": 1, "sequence_parallel": tp > 1} for tp in TENSOR]
    degrees = [resolve_degrees(wish, cluster.num_devices) for wish in wishes]
    found = resolve_model(name, seq_len=sequence, batch=1, dtype="bfloat16")
    program = capture_for(found.model, found.example_inputs, degrees[0])
    return [model_of_program(priceable_of(program, cluster, one, engine).works) for one in degrees]


def direct(models: Sequence[ScreenedModel], layouts: Layouts, target: Target) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes of layouts of one model, by the functions that price every field of every layout."""
    tp = int(layouts.tp[0])
    model = next(one for one in models if one.tp in (None, tp))
    family = with_experts(model.blocks(layouts), layouts, target.mechanisms)
    shape, engine, fused = model.shape, target.engine, target.fused
    step = step_seconds(
        family, shape, layouts, target.machine, engine, target.mechanisms, in_float8=target.in_float8, fused=fused
    )
    cache = target.mechanisms.allocator_cache
    memory = step_memory(family, shape, layouts, engine, reserve_bytes=target.reserve_bytes, cache=cache, fused=fused)
    return step.seconds, memory.peak_bytes


def measure(name: str, models: Sequence[ScreenedModel], layouts: Layouts, target: Target) -> None:
    """One line of the table."""
    size = len(layouts.tp)
    own = np.flatnonzero(layouts.tp == TENSOR[-1])
    rows = np.sort(np.random.default_rng(0).permutation(own)[:PIECE])
    sample = Layouts(**{field: np.asarray(getattr(layouts, field)[rows], float) for field in Layouts.__slots__})
    found, expected = screen(models, layouts, target), direct(models, sample, target)  # prepares expressions
    for one, other in zip((found.seconds, found.peak_bytes), expected, strict=True):
        np.testing.assert_allclose(one[rows], other, rtol=SAME)
    rates, ratios = [], []
    for _ in range(ROUNDS):
        rates.append(size / _seconds(lambda: screen(models, layouts, target)))
        ratios.append(rates[-1] / (len(rows) / _seconds(lambda: direct(models, sample, target))))
    best = fastest(layouts, found)
    rate, ratio = statistics.median(rates) / 1e6, statistics.median(ratios)
    print(f"{name:40}{size / 1e6:8.2f} M{rate:8.2f} M/s{ratio:8.1f} x  best {best}", flush=True)


def fastest(layouts: Layouts, found: Screened) -> str:
    """The fastest layout that fits."""
    seconds = np.where(found.fits, found.seconds, np.inf)
    i = int(np.argmin(seconds))
    fields = ("tp", "pp", "virtual", "cp", "ep", "dp", "zero", "shard", "micro_batch")
    return f"{seconds[i]:.3f} s: " + " ".join(f"{field} {getattr(layouts, field)[i]}" for field in fields)


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main(devices: str = "1536", sequences: str = "3072") -> None:
    logging.disable(logging.WARNING)
    cluster = ClusterSpec.parse(f"{devices}xh100")
    megatron, own = (target_of(cluster, engine_named(name), precision="bf16") for name in ("megatron", "autopar"))
    print(f"{cluster.name}, {sequences} sequences: layouts, screened per second and core, over direct pricing")
    for name, experts in (("gpt3-175b", 0), ("mixtral-8x7b", 8)):
        model = of_preset(name)
        layouts = space(int(devices), int(sequences), int(model.shape.blocks[0]), experts, splits_sequence=False)
        measure(f"{name}, a row", [model], layouts, megatron)
    models = captured("llama3-8b", cluster, 8192)
    layouts = space(int(devices), int(sequences), int(models[0].shape.blocks[0]), 0, splits_sequence=True)
    measure(f"llama3-8b, captured at tp {', '.join(map(str, TENSOR))}", models, layouts, own)


if __name__ == "__main__":
    main(*sys.argv[1:3])
