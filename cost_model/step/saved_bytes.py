"""The bytes that repeated blocks save for the backward pass of one micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.cost_model.step.offload import is_on_host
from autopar.cost_model.step.recomputed_modules import module_savings
from autopar.cost_model.work.block_work import BlockWork, Family
from autopar.ir.arrays import Floats
from autopar.ir.offload import ACTIVATIONS

# softmax output 2, dropout mask 1, dropped output 2, an element of the scores (Korthikanti et al. 2022, equation 1)
SAVED_SCORE_BYTES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Bytes that a block saves of one micro-batch, by the level of recomputation."""

    none: Floats
    selective: Floats
    full: Floats
    again: Floats  # what selective recomputation makes again at once
    whole: Floats  # what the block saves without recomputation; full recomputation makes it again
    always: Floats  # on the device under every level while the block runs

    def kept(self, recompute: Floats) -> Floats:
        """The saved bytes of layouts."""
        return np.where(recompute == 2, self.full, np.where(recompute == 1, self.selective, self.none))

    def mixed(self, selective: Floats | float, full: Floats | float) -> Floats:
        """The saved bytes of the mean block, if these parts of the blocks are recomputed selectively and fully."""
        mean: Floats = (1 - selective - full) * self.none + selective * self.selective + full * self.full
        return mean

    def working(self, recompute: Floats) -> Floats:
        """The bytes that exist besides while the block runs."""
        made_again = np.where(recompute == 2, self.whole, np.where(recompute == 1, self.again, 0.0))
        return np.maximum(made_again, self.always)


def least_of(every: Sequence[SavedBytes]) -> SavedBytes:
    """The least bytes of several blocks."""
    return SavedBytes(
        **{
            name: np.minimum.reduce(np.broadcast_arrays(*(getattr(s, name) for s in every)))
            for name in SavedBytes.__slots__
        }
    )


def on_device(saved: SavedBytes, engine: Engine) -> SavedBytes:
    """The part of the bytes on the device. With activations on the host it is one block's tensors before they move."""
    if not is_on_host(engine, ACTIVATIONS):
        return saved
    nothing = 0.0 * saved.whole
    return replace(saved, none=nothing, selective=nothing, full=nothing, always=saved.whole)


def activations(family: Family[Any], shape: Shape, layouts: Layouts, engine: Engine) -> SavedBytes:
    """Bytes that one mean block saves of one micro-batch, on the device or on the host."""
    saved, inputs, selective, again = (np.zeros(1) for _ in range(4))
    for role, count in shape.counts:
        if not np.any(count > 0):
            continue
        share = count / shape.blocks
        for variant, is_chosen in (("tp", 1 - layouts.sequence_parallel), ("sp", layouts.sequence_parallel)):
            work = family.block(role, variant)
            whole = work.saved_fused_bytes if engine.pointwise == "fused" else work.saved_eager_bytes
            scores = np.zeros(1) if engine.attention == "fused" else _scores(work)
            narrow = 0.5 if engine.saved_operands == "narrow" else 0.0
            whole = whole + scores - narrow * work.saved_operand_bytes
            weight = share * is_chosen
            saved, inputs = saved + weight * whole, inputs + weight * work.input_bytes
            if work.selected is not None:
                selective = selective + weight * work.selected.saved_bytes
                again = again + weight * (whole - work.selected.saved_bytes)
            elif engine.selective == "half":
                selective = selective + weight * (whole + work.input_bytes) / 2
            else:
                if engine.selective == "products":
                    kept = work.input_bytes + _results(work)
                else:
                    modules = module_savings(work, role, shape.hidden, engine.selective)
                    freed = modules.results_bytes + (1 - narrow) * modules.operands_bytes
                    kept = whole - freed - (scores if "core_attn" in engine.selective else 0.0)
                kept = np.minimum(whole, np.maximum(kept, work.input_bytes))
                selective, again = selective + weight * kept, again + weight * (whole - kept)
    return SavedBytes(none=saved, selective=selective, full=inputs, again=again, whole=saved, always=np.zeros(1))


def _results(work: BlockWork[Any]) -> Floats:
    """Bytes of the results of attention and of every second product, in 16 bits, with a float32 of each query."""
    total: Any = np.zeros(1)
    for op in work.products:
        if op.kind == "attention":
            total = total + op.count * op.m * (2 * op.k + 4)
        elif op.kind == "matmul":
            total = total + op.count * op.m * op.n  # half of two bytes
    return np.asarray(total)


def _scores(work: BlockWork[Any]) -> Floats:
    return np.asarray(sum(SAVED_SCORE_BYTES * op.count * op.m * op.n for op in work.products if op.kind == "attention"))
