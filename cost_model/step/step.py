"""Seconds of one training step of many layouts at once, in closed form.

    step = (pipeline + data-parallel sums that wait + optimizer + fixed) · (1 + σ·sqrt(2 ln devices))

    pipeline  n·slowest rank + idle of filling and emptying, over ranks whose blocks, embedding and head differ
    block     computing (`autopar.cost_model.step.block_time`) + exposed tensor collectives
    ZeRO      stages 2 and 3 without pipeline stages: the longer of a block and its ZeRO collectives, and a part of the
              shorter, because they share the device

The last factor is the expected largest of n normal variables: every rank waits for the slowest rank. (Fisher, Tippett
1928; the form for large n.)

`autopar.cost_model.step.assembly` puts a step together from two kinds of prices: one micro-batch in each block
(`autopar.cost_model.step.block_prices`), and data-parallel collectives (`autopar.cost_model.step.data_parallel`).
`step_seconds` prices both for every layout. A search prices them once for all layouts that share them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost_model.step.assembly import (
    Pipeline,
    StepPrices,
    StepTimes,
    assembled,
    moving_sums,
    recomputing,
    sums_beside_blocks,
)
from autopar.cost_model.step.block_prices import block_prices, end_passes
from autopar.cost_model.step.context import Basis, repeated_roles, weighted
from autopar.cost_model.step.data_parallel import data_prices, end_gathers, gather_prices, gathering, gathers_blocks
from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.cost_model.work.block_work import Family
from autopar.ir.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of a step and of its parts."""

    seconds: Floats
    parts: dict[str, Floats]  # they add up to `seconds`
    hidden: dict[str, Floats]  # collectives that run beside computing, by the part that they would lengthen


def step_seconds(family: Family[Any], basis: Basis, layouts: Layouts, pipeline: Pipeline | None = None) -> StepSeconds:
    """Price every layout. `family` holds the numbers of its blocks for one micro-batch of each layout."""
    prices = step_prices(basis, family, layouts)
    return step_of(basis, layouts, prices, assembled(basis, layouts, prices, pipeline))


def step_prices(basis: Basis, family: Family[Any], layouts: Layouts) -> StepPrices:
    """The prices of every layout's blocks and data-parallel collectives."""
    roles = repeated_roles(basis.shape)
    has_gathers, has_end_gathers = np.any(gathers_blocks(layouts)), np.any(layouts.zero >= 3)
    return StepPrices(
        blocks={role: block_prices(basis, family, layouts, role) for role in roles},
        first=end_passes(basis, family, layouts, "first"),
        last=end_passes(basis, family, layouts, "last"),
        gathers={role: gather_prices(basis, family, layouts, role) for role in roles if has_gathers},
        end_gathers=end_gathers(basis, family, layouts) if has_end_gathers else np.zeros(1),
        data=lambda per_rank: data_prices(basis, family, layouts, per_rank),
    )


def step_of(basis: Basis, layouts: Layouts, prices: StepPrices, step: StepTimes) -> StepSeconds:
    """A step that was assembled from `prices`, by its parts."""
    return StepSeconds(
        seconds=step.seconds,
        parts=_parts(basis, layouts, prices, step),
        hidden=_hidden(basis, layouts, prices, step),
    )


# ---- the parts of a step ----


def _parts(basis: Basis, layouts: Layouts, prices: StepPrices, step: StepTimes) -> dict[str, Floats]:
    n, pipe, before = layouts.micro_batches, step.pipelined, step.before
    of_blocks = {
        role: {
            **price.parts,
            "recomputation": recomputing(layouts, price),
            "shard collectives": step.passes[role].both - step.computing[role].both,
        }
        for role, price in prices.blocks.items()
    }
    parts = {name: n * pipe.blocks * seconds for name, seconds in _mean(basis.shape, of_blocks).items()}
    parts["recomputation"] = parts["recomputation"] + n * pipe.again
    parts["embedding, head, loss"] = n * (pipe.busy - pipe.blocks * step.mean.both - pipe.again)
    parts |= {"bubble": pipe.idle, "messages": pipe.messages, "data collectives": step.sums + step.end_gathers}
    parts |= {"optimizer": step.optimizer, "gradient accumulation": step.accumulation}
    parts["host copies"] = step.host_copies + 0.0 * before
    return parts | {"fixed": basis.machine.mechanisms.step_s + 0.0 * before, "stragglers": step.straggling * before}


def _hidden(basis: Basis, layouts: Layouts, prices: StepPrices, step: StepTimes) -> dict[str, Floats]:
    n, pipe = layouts.micro_batches, step.pipelined
    of_blocks = {}
    for role, price in prices.blocks.items():
        gathers = prices.gathers.get(role)
        moving = np.zeros(1) if gathers is None else gathering(layouts, gathers)
        waited = step.passes[role].both - step.computing[role].both
        of_blocks[role] = {**price.hidden, "shard collectives": np.maximum(moving - waited, 0.0)}
    hidden = {name: n * pipe.blocks * seconds for name, seconds in _mean(basis.shape, of_blocks).items()}
    waits = basis.machine.mechanisms.message_exposed if basis.machine.engine.messages == "overlapped" else 1.0
    sums = np.where(sums_beside_blocks(layouts), 0.0, np.maximum(moving_sums(layouts, step.data) - step.sums, 0.0))
    return hidden | {"messages": pipe.messages * (1 / waits - 1), "data collectives": sums}


def _mean(shape: Shape, blocks: Mapping[str, Mapping[str, Floats]]) -> dict[str, Floats]:
    """The mean of all blocks' values by name."""
    shares = repeated_roles(shape)
    names = next(iter(blocks.values()))
    return {name: weighted([(share, blocks[role][name]) for role, share in shares.items()]) for name in names}
