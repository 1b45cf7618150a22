"""Peak memory of one rank for many layouts at once: state, gathered weights, activations in flight, logits, reserve.

    state        16 to 28 bytes of a trained parameter (Rajbhandari et al. 2020, "ZeRO", section 3.1); ZeRO 1 divides
                 master weights and moments, 2 the gradients too, 3 all of it
    gathered     under ZeRO 3 two blocks' weights in 16 bits at once, one computing and one prefetched; with stages all
                 of a rank's weights and gradients, which stay whole for a step (torchtitan, FSDP under pipelines)
    activations  what the backward pass needs of every block of every micro-batch in flight; under full recomputation
                 the blocks' inputs, and one block's values while it is computed again
    in flight    min(n, p) under 1F1B on the first rank, p·(1 + (p-1)/(p·v)) interleaved (Narayanan et al. 2021,
                 section 2.2; Korthikanti et al. 2022, section 4.2.3)
    logits       of the last rank: 16 bits, and their float32 copy and its gradient
    reserve      the framework's own memory on the device

The fullest is the first or the last pipeline rank.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.cost_model.step.offload import device_state_bytes
from autopar.cost_model.step.unique_rows import spread
from autopar.cost_model.work.block_work import BlockWork, Family
from autopar.ir.arrays import Floats

FLOAT_BYTES = 4
GRADIENT_BYTES = 4  # of whole gradients, summed over micro-batches in float32
GATHERED_BLOCKS = 2
# softmax output 2, dropout mask 1, dropped output 2, an element of the scores (Korthikanti et al. 2022, equation 1)
SAVED_SCORE_BYTES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes of the fullest rank, and what makes them up."""

    peak_bytes: Floats
    parts: dict[str, Floats]

    @property
    def needed_bytes(self) -> Floats:
        """The peak without the cache, which the allocator gives back before it fails."""
        found: Floats = self.peak_bytes - self.parts["cache"]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Bytes that one mean block keeps of one micro-batch, bytes of its input, and those of the logits."""

    saved: Floats
    inputs: Floats
    logits: Floats

    def at(self, index: Any) -> "BlockBytes":
        """The bytes of an index."""
        return BlockBytes(
            saved=spread(self.saved, index), inputs=spread(self.inputs, index), logits=spread(self.logits, index)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankElements:
    """Parameters of the first and of the last pipeline rank, without those of experts, of which both have as many."""

    first: Floats
    last: Floats
    expert: Floats

    def at(self, index: Any) -> "RankElements":
        """The elements of an index."""
        return RankElements(
            first=spread(self.first, index), last=spread(self.last, index), expert=spread(self.expert, index)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What one rank holds: `parts` without the allocator's `cache`, and all together."""

    parts: dict[str, Floats]
    cache: Floats
    total: Floats


def step_memory(
    family: Family[Any],
    shape: Shape,
    layouts: Layouts,
    engine: Engine,
    *,
    reserve_bytes: float,
    cache: float,
    fused: bool,
) -> StepMemory:
    """Peak of every layout."""
    blocks = block_bytes(family, shape, layouts, engine, fused=fused)
    elements = rank_elements(family, shape, layouts)
    return memory_of_ends(shape, layouts, engine, blocks, elements, reserve_bytes=reserve_bytes, cache=cache)


def memory_of_ends(
    shape: Shape,
    layouts: Layouts,
    engine: Engine,
    blocks: BlockBytes,
    elements: RankElements,
    *,
    reserve_bytes: float,
    cache: float,
) -> StepMemory:
    """As `step_memory`, of what blocks keep and ranks have of parameters."""
    first, last = ends_bytes(shape, layouts, engine, blocks, elements, reserve_bytes=reserve_bytes, cache=cache)
    parts = {name: fuller(first, last, part, last.parts[name]) for name, part in first.parts.items()}
    parts |= {"cache": fuller(first, last, first.cache, last.cache), "reserve": reserve_bytes + 0.0 * first.total}
    return StepMemory(peak_bytes=np.maximum(first.total, last.total), parts=parts)


def fuller(first: RankBytes, last: RankBytes, of_first: Floats, of_last: Floats) -> Floats:
    """Of the rank that holds more."""
    return np.where(last.total > first.total, of_last, of_first)


def block_bytes(family: Family[Any], shape: Shape, layouts: Layouts, engine: Engine, *, fused: bool) -> BlockBytes:
    """What blocks and head keep of one micro-batch; of no field but tp, sp, cp, dp and micro-batch."""
    saved, inputs = activations(family, shape, layouts, engine, fused=fused)
    return BlockBytes(saved=saved, inputs=inputs, logits=logit_bytes(family, shape))


def rank_elements(family: Family[Any], shape: Shape, layouts: Layouts) -> RankElements:
    """Parameters of a rank; of no field but tp, pp, ep and dp."""
    dense, expert = _parameters(family, shape, _blocks_per_rank(shape, layouts))
    ends = {role: _role(family, role) for role in ("first", "last")}
    both = np.where(shape.is_tied, np.maximum(ends["first"], ends["last"]), ends["first"] + ends["last"])
    first, last = (dense + np.where(layouts.pp > 1, one, both) for one in ends.values())
    return RankElements(first=first, last=last, expert=expert / layouts.ep)


def _blocks_per_rank(shape: Shape, layouts: Layouts) -> Floats:
    return np.where(layouts.pp > 1, np.ceil(shape.blocks / layouts.pp), shape.blocks)


def ends_bytes(
    shape: Shape,
    layouts: Layouts,
    engine: Engine,
    blocks: BlockBytes,
    elements: RankElements,
    *,
    reserve_bytes: float,
    cache: float,
) -> tuple[RankBytes, RankBytes]:
    """What the first and the last pipeline rank hold."""
    n, p, v, has_stages = layouts.micro_batches, layouts.pp, np.maximum(layouts.virtual, 1), layouts.pp > 1
    flight = np.where(v > 1, np.minimum(n, p * (1 + (p - 1) / (p * v))), np.minimum(n, p))
    flight = np.where(has_stages, flight, 1)
    at_last = np.where(has_stages, np.minimum(n, np.maximum(flight - p + 1, 1)), 1)
    per_rank = _blocks_per_rank(shape, layouts)
    kept = kept_bytes(blocks.saved, blocks.inputs, layouts.recompute, engine)
    working = np.where(layouts.recompute == 2, blocks.saved, 0.0)

    def of_rank(dense: Floats, live: Floats, logits: Floats) -> RankBytes:
        parts = state_bytes(dense, elements.expert, shape, layouts, engine)
        gathered = _gathered(shape, layouts, dense + elements.expert, per_rank)
        parts |= {"gathered": gathered, "activations": live * per_rank * kept, "workspace": working, "logits": logits}
        held = np.asarray(sum(parts.values()))
        return RankBytes(parts=parts, cache=cache * held, total=held + cache * held + reserve_bytes)

    return (
        of_rank(elements.first, flight, np.where(has_stages, 0.0, blocks.logits)),
        of_rank(elements.last, at_last, blocks.logits),
    )


def _gathered(shape: Shape, layouts: Layouts, elements: Floats, per_rank: Floats) -> Floats:
    """Whole weights, and gradients with stages, that a rank holds under ZeRO 3."""
    if not np.any(layouts.zero >= 3):
        return np.zeros(1)
    some = shape.element_bytes * GATHERED_BLOCKS * elements / per_rank
    gathered = np.where(layouts.pp > 1, (shape.element_bytes + GRADIENT_BYTES) * elements, some)
    return np.where(layouts.zero >= 3, gathered, 0.0)


def state_bytes(elements: Floats, expert: Floats, shape: Shape, layouts: Layouts, engine: Engine) -> dict[str, Floats]:
    """Bytes of a rank's parameters, of their gradients and of the optimizer's state; `expert` elements have fewer ranks
    to be divided over."""
    if engine.optimizer_place == "host":
        return device_state_bytes(elements, expert, shape, layouts)
    divided: float = engine.sharded_state_bytes if engine.sharded_state_bytes < engine.state_bytes else 12
    if shape.element_bytes == FLOAT_BYTES:  # no master copy: the optimizer has Adam's moments alone
        divided = 2 * FLOAT_BYTES
    weights = shape.element_bytes
    each = {"parameters": (weights, 3), "gradients": (engine.state_bytes - divided - weights, 2)}
    each["optimizer state"] = (divided, 1)
    found, shards = {}, [layouts.shard, np.maximum(layouts.shard / layouts.ep, 1)]
    for name, (size, stage) in each.items():
        ways = [np.where(layouts.zero >= stage, shard, 1.0) for shard in shards]
        found[name] = np.asarray(size * (elements / ways[0] + expert / ways[1]))
    return found


def kept_bytes(saved: Floats, inputs: Floats, recompute: Floats, engine: Engine) -> Floats:
    """What a block keeps of a micro-batch, of `saved` without recomputation and its `inputs`."""
    selective = np.where(recompute == 1, _selective(engine, saved, inputs), saved)
    return np.where(recompute == 2, inputs, selective)


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


def _selective(engine: Engine, saved: Floats, inputs: Floats) -> Floats:
    return saved if engine.selective == "attention" else (saved + inputs) / 2


def logit_bytes(family: Family[Any], shape: Shape) -> Floats:
    """Logits in their own width, a float32 copy and its gradient."""
    return np.asarray((shape.element_bytes + 2 * FLOAT_BYTES) * _logits(family))


def _logits(family: Family[Any]) -> Floats:
    """Elements of the logits on one rank: the head's product with the largest result."""
    products = [one for one in family.block("last", "tp").products if one.kind == "matmul"]
    return np.asarray(sum(one.count * one.m * one.n for one in products)) if products else np.zeros(1)


def _parameters(family: Family[Any], shape: Shape, per_rank: Floats) -> tuple[Floats, Floats]:
    dense, expert = np.zeros(1), np.zeros(1)
    for role, count in shape.counts:
        if np.any(count > 0):
            work = family.block(role, "tp")
            share = count / shape.blocks * per_rank
            dense = dense + share * (work.parameters_split + work.parameters_whole)
            expert = expert + share * work.parameters_expert
    return dense, expert


def _role(family: Family[Any], role: str) -> Floats:
    if role not in family.roles:
        return np.zeros(1)
    work = family.block(role, "tp")
    return np.asarray(work.parameters_split + work.parameters_whole)
