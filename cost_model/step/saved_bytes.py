"""The bytes that repeated blocks save for the backward pass of one micro-batch."""

from typing import Any

import numpy as np

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.cost_model.work.block_work import BlockWork, Family
from autopar.ir.arrays import Floats

# softmax output 2, dropout mask 1, dropped output 2, an element of the scores (Korthikanti et al. 2022, equation 1)
SAVED_SCORE_BYTES = 5


def activations(
    family: Family[Any], shape: Shape, layouts: Layouts, engine: Engine, *, fused: bool
) -> tuple[Floats, Floats]:
    """Bytes that one mean block keeps of one micro-batch, and bytes of its input."""
    saved, inputs = np.zeros(1), np.zeros(1)
    for role, count in shape.counts:
        if not np.any(count > 0):
            continue
        share = count / shape.blocks
        for variant, is_chosen in (("tp", 1 - layouts.sequence_parallel), ("sp", layouts.sequence_parallel)):
            work = family.block(role, variant)
            one = work.saved_fused_bytes if engine.pointwise == "fused" else work.saved_eager_bytes
            one = one + (0.0 if fused else _scores(work))
            saved = saved + share * is_chosen * one
            inputs = inputs + share * is_chosen * work.input_bytes
    return saved, inputs


def _scores(work: BlockWork[Any]) -> Floats:
    return np.asarray(
        sum(SAVED_SCORE_BYTES * one.count * one.m * one.n for one in work.products if one.kind == "attention")
    )
