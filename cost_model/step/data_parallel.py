"""Data-parallel collectives: gathers of ZeRO 2 and 3 beside blocks, sums of gradients at the end of a step.

The bytes follow from a rank's parameters. The prices depend only on `RANK_FIELDS`. Layouts that differ in
micro-batches, virtual stages or recomputation share prices.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.cost_model.step.context import Basis, Passes
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.rank_parameters import RankParameters, block_parameters, first_and_last
from autopar.cost_model.work.block_work import Family
from autopar.ir.arrays import Floats
from autopar.lowering.conversions import Collective

RANK_FIELDS = ("tp", "pp", "cp", "ep", "etp", "dp", "shard", "data_stride")  # of layouts
_ENDS = ("first", "last")
HALF_BYTES = 2  # an engine's `parameter_bytes` holds for 16-bit training; wider training gathers more in proportion
BLOCKING_BESIDE = 0.5  # exposed part of the shorter of computing and blocking gathers: assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathers:
    """Seconds of one block's collectives under ZeRO."""

    gather: Floats  # weights, once
    scatter: Floats  # gradients
    copies: Floats  # sums of gradients over the copies of the shards


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPrices:
    """A rank's parameters, and the seconds of their gradient sums."""

    parameters: RankParameters
    whole: Floats  # without ZeRO: every rank keeps the whole state
    sharded: Floats  # ZeRO 1: gradients are scattered and updated parameters gathered


# ---- ZeRO 2 and 3 ----


def gathers_blocks(layouts: Layouts) -> Floats:
    """Whether the collectives of ZeRO 2 or 3 run beside blocks. With pipeline stages they do not: weights stay gathered
    for a step (torchtitan)."""
    is_gathered: Floats = (layouts.zero >= 2) & (layouts.pp == 1)
    return is_gathered


def gather_prices(basis: Basis, family: Family[Any], layouts: Layouts, role: str) -> Gathers:
    """The ZeRO collectives of a repeated block."""
    parameters = block_parameters(family, layouts, role)
    gather, scatter = _gather_and_scatter(basis, layouts, parameters)
    copies = 2 * basis.machine.links.seconds(
        "all_gather",
        basis.machine.engine.shard_gradient_bytes * parameters.trained.whole / layouts.shard,
        layouts.data_ranks / layouts.shard,
        layouts.data_stride * layouts.shard,
    )
    return Gathers(gather=gather, scatter=scatter, copies=copies)


def _gather_and_scatter(basis: Basis, layouts: Layouts, parameters: RankParameters) -> tuple[Floats, Floats]:
    engine, links, element_bytes = basis.machine.engine, basis.machine.links, basis.shape.element_bytes

    def seconds(kind: Collective, whole: Any) -> Floats:
        usual = links.seconds(kind, whole, layouts.shard, layouts.data_stride)
        if engine.shard_gather != "blocking":
            return usual
        spans = layouts.shard * layouts.data_stride > links.devices_per_host
        return np.where(spans, whole / links.inter_host_bytes_per_s, usual)  # through one port of a host

    return (
        seconds("all_gather", element_bytes * parameters.whole),
        seconds("reduce_scatter", engine.shard_gradient_bytes * parameters.trained.whole),
    )


def with_gathers(basis: Basis, layouts: Layouts, computing: Passes, gathers: Gathers) -> Passes:
    """Passes of a block beside the collectives of ZeRO 2 and 3."""
    gather_s = _gathered_again(layouts, gathers)
    forward = _beside(basis, computing.forward, gather_s)
    backward = _beside(basis, computing.backward, gather_s + gathers.scatter + gathers.copies)
    sums = gathers_blocks(layouts)
    return replace(
        computing,
        forward=np.where(sums, forward, computing.forward),
        backward=np.where(sums, backward, computing.backward),
    )


def gathering(layouts: Layouts, gathers: Gathers) -> Floats:
    """Seconds of all of a block's collectives under ZeRO 2 and 3 in one micro-batch."""
    moving = 2 * _gathered_again(layouts, gathers) + gathers.scatter + gathers.copies
    return np.where(gathers_blocks(layouts), moving, 0.0)


def _gathered_again(layouts: Layouts, gathers: Gathers) -> Floats:
    return np.where((layouts.zero >= 3) & (layouts.pp == 1), gathers.gather, 0.0)  # ZeRO 2 keeps gathered weights


def _beside(basis: Basis, computing: Floats, moving: Floats) -> Floats:
    slow = BLOCKING_BESIDE if basis.machine.engine.shard_gather == "blocking" else basis.machine.overlap_slowdown - 1
    return np.maximum(computing, moving) + slow * np.minimum(computing, moving)


def end_gathers(basis: Basis, family: Family[Any], layouts: Layouts) -> Floats:
    """Exposed seconds of embedding and head under ZeRO 3 without stages, one micro-batch."""
    total = np.zeros(1)
    for role in _ENDS:
        gather, scatter = _gather_and_scatter(basis, layouts, block_parameters(family, layouts, role))
        total = total + (2 * gather + scatter) / (1 if basis.machine.speeds.in_one_thread else 2)
    return total


# ---- sums at the end of a step ----


def data_prices(basis: Basis, family: Family[Any], layouts: Layouts, per_rank: Floats) -> DataPrices:
    """The gradient sums of a rank with `per_rank` blocks, without ZeRO and under ZeRO 1."""
    engine, links = basis.machine.engine, basis.machine.links
    first, last = first_and_last(family, basis.shape, layouts, per_rank)
    parameters = RankParameters(
        **{name: np.maximum(getattr(first, name), getattr(last, name)) for name in RankParameters.__slots__}
    )
    num_calls = basis.shape.blocks / layouts.pp + len(_ENDS)  # ZeRO 1 calls for every block by itself
    # row 0: dense parameters, over all data-parallel ranks; row 1: experts, over fewer ranks
    summed = parameters.trained
    elements = np.array(np.broadcast_arrays(summed.dense, summed.expert))
    held = parameters if engine.zero_weights == "copied" else summed  # FSDP2 gathers frozen parameters too
    gathered_elements = np.array(np.broadcast_arrays(held.dense, held.expert))
    others = layouts.ep / layouts.expert_replicas  # data-parallel ranks that hold other experts
    ranks = np.maximum(np.array(np.broadcast_arrays(layouts.data_ranks, layouts.data_ranks / others)), 1)
    shard = np.minimum(layouts.shard, ranks)
    stride = layouts.data_stride * np.where(ranks < layouts.data_ranks, np.maximum(others, 1), 1)
    grads = engine.gradient_bytes * elements
    weights = engine.parameter_bytes * basis.shape.element_bytes / HALF_BYTES * gathered_elements
    in_calls = scattered = links.seconds("reduce_scatter", grads, shard, stride)
    if links.calls is not None:
        in_calls = links.seconds("reduce_scatter", grads, shard, stride, num_calls=num_calls)
    gathered = links.seconds("all_gather", weights, shard, stride, num_calls=num_calls)
    gather_s = links.seconds("all_gather", grads, shard, stride)
    copies = 2 * links.seconds("all_gather", grads / shard, ranks / shard, stride * shard)
    whole, sharded = np.zeros(1), np.zeros(1)
    for k in range(len(elements)):
        whole = whole + scattered[k] + gather_s[k] + copies[k]
        sharded = sharded + in_calls[k] + gathered[k] + copies[k]
    return DataPrices(parameters=parameters, whole=whole, sharded=sharded)
