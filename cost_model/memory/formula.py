"""Peak memory of one rank for many layouts at once: state, gathered weights, activations in flight, logits, reserve.

State is by Rajbhandari et al. 2020, "ZeRO", section 3.1. ZeRO 1 divides master weights and moments. ZeRO 2 divides the
gradients too. ZeRO 3 divides all state, and gathers one block for computing and one ahead of it. With stages, a rank's
weights and gradients stay whole for a step (torchtitan, FSDP under pipelines). Beside 16-bit weights of a `precision`,
autopar holds 16 bytes: master weights, gradients and moments in float32. Without it, all state has the model's dtype.

Under full recomputation, the saved tensors are the inputs of blocks, and the values of one recomputed block. Under
selective recomputation, they are the tensors of the other operators, and the recomputed values of one block. A block is
recomputed when the logits are gone (`gone_logits`), so only values count that need more than their room. The first
rank has min(n, p) micro-batches in flight under 1F1B, and p·(1 + (p-1)/(p·v)) interleaved (Narayanan et al. 2021,
section 2.2; Korthikanti et al. 2022, section 4.2.3). The fullest rank is the first or the last pipeline rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.step.context import Basis, repeated_roles
from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.cost_model.step.offload import fsdp_stage, is_on_host
from autopar.cost_model.step.rank_parameters import RankParameters, blocks_per_rank, first_and_last
from autopar.cost_model.step.saved_bytes import SavedBytes, activations, on_device
from autopar.cost_model.work.block_work import Family
from autopar.ir.arrays import Floats
from autopar.ir.offload import OPTIMIZER, PARAMETERS

FLOAT_BYTES = 4
ADAM_BYTES = 8  # of the state of one trained parameter in the engines' figures: two moments in float32
GATHERED_BLOCKS = 2
BESIDE_TENSORS = ("cache", "reserve")  # parts of a rank's memory
BLOCKS_WITH_GRADIENTS = 2  # on the device: gradients of one block are computed while another block's go to the host

_V = TypeVar("_V")
Ends: TypeAlias = tuple[RankParameters, RankParameters]  # of the first and of the last pipeline rank


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes of the fullest rank or of several ranks, by their parts."""

    parts: dict[str, Floats]

    @property
    def peak_bytes(self) -> Floats:
        return np.asarray(sum(self.parts.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Bytes that one mean block saves of one micro-batch, and bytes of the logits."""

    saved: SavedBytes
    logits: Floats


def rank_memory(
    state: Mapping[str, Floats],
    activations: Floats,
    working: Floats,
    logits: Floats,
    blocks: Floats | float,
    layouts: Layouts,
    basis: Basis,
) -> StepMemory:
    """What ranks hold: state, the activations in flight, the logits, and the `working` bytes of a block that runs.

    Gradients that the backward pass makes add to the peak only what needs more than the freed room. When this pass
    begins, all tensors are there that it will have freed at its end. At its end, all gradients are there. Both change
    steadily, so the peak is at one of the two (benchmarks/results/2026-11-26-one-h100.md).
    """
    workspace = np.maximum(working - logits * gone_logits(basis.shape, basis.engine), 0.0)
    parts = {**state, "activations": activations, "workspace": workspace, "logits": logits}
    freed = activations * (1 - 1 / np.maximum(blocks, 1)) + logits
    beside = np.maximum(parts["gradients"] - freed, 0.0)
    parts["gradients"] = np.where(makes_gradients(layouts, basis.engine), beside, parts["gradients"])
    at_update = parts.pop("at update", None)
    if at_update is not None:  # in place of what is gone then
        gone = sum(parts[name] for name in ("gradients", "gathered", "activations", "workspace", "logits"))
        parts["workspace"] = workspace + np.maximum(at_update - gone, 0.0)
    parts["cache"] = cache_bytes(parts, basis.machine.mechanisms.allocator_cache)
    return StepMemory(parts=parts | {"reserve": basis.machine.reserve_bytes + 0.0 * parts["cache"]})


def cache_bytes(parts: Mapping[str, _V], cache: float) -> _V:
    """Bytes that the allocator keeps beyond the tensors of a rank."""
    tensors: Any = sum(part for name, part in parts.items() if name not in BESIDE_TENSORS)
    held: _V = cache * tensors
    return held


def step_memory(family: Family[Any], layouts: Layouts, basis: Basis) -> StepMemory:
    """Peak of every layout."""
    return memory_of_ends(layouts, basis, block_bytes(family, layouts, basis), end_parameters(family, layouts, basis))


def memory_of_ends(layouts: Layouts, basis: Basis, blocks: BlockBytes, ends: Ends) -> StepMemory:
    """As `step_memory`, of what blocks keep, and of the parameters of the first and of the last rank."""
    n, p, v, has_stages = layouts.micro_batches, layouts.pp, np.maximum(layouts.virtual, 1), layouts.pp > 1
    flight = np.where(v > 1, np.minimum(n, p * (1 + (p - 1) / (p * v))), np.minimum(n, p))
    flight = np.where(has_stages, flight, 1)
    at_last = np.where(has_stages, np.minimum(n, np.maximum(flight - p + 1, 1)), 1)
    per_rank = blocks_per_rank(basis.shape.blocks, layouts, basis.engine)[0]
    kept, working = blocks.saved.kept(layouts.recompute), blocks.saved.working(layouts.recompute)
    first, last = (
        rank_memory(
            state_bytes(parameters, layouts, basis, per_rank, has_stages=has_stages),
            live * per_rank * kept,
            working,
            logits,
            per_rank,
            layouts,
            basis,
        )
        for parameters, live, logits in (
            (ends[0], flight, np.where(has_stages, 0.0, blocks.logits)),
            (ends[1], at_last, blocks.logits),
        )
    )
    is_last = last.peak_bytes > first.peak_bytes
    return StepMemory(parts={name: np.where(is_last, last.parts[name], part) for name, part in first.parts.items()})


def block_bytes(family: Family[Any], layouts: Layouts, basis: Basis) -> BlockBytes:
    """What blocks and head keep of one micro-batch; of no field but tp, sp, cp, dp and micro-batch."""
    saved = on_device(activations(family, basis.shape, layouts, basis.engine), basis.engine)
    return BlockBytes(saved=saved, logits=logit_bytes(family, basis.shape, layouts, basis.engine))


def saved_of_roles(family: Family[Any], layouts: Layouts, basis: Basis) -> dict[str, SavedBytes]:
    """The bytes that one block of every repeated role saves of one micro-batch."""
    alone = {role: replace(basis.shape, counts=((role, np.ones(1)),)) for role in repeated_roles(basis.shape)}
    return {
        role: on_device(activations(family, shape, layouts, basis.engine), basis.engine)
        for role, shape in alone.items()
    }


def end_parameters(family: Family[Any], layouts: Layouts, basis: Basis) -> Ends:
    """Parameters of the first and of the last pipeline rank; of no field but tp, pp, ep and dp."""
    per_rank = blocks_per_rank(basis.shape.blocks, layouts, basis.engine)[0]
    return first_and_last(family, basis.shape, layouts, per_rank)


def makes_gradients(layouts: Layouts, engine: Engine) -> Any:
    """Whether no gradient exists when the last backward pass of a step begins."""
    return (engine.gradients == "made") & (layouts.pp == 1) & (layouts.micro_batches == 1)


def state_bytes(
    parameters: RankParameters, layouts: Layouts, basis: Basis, blocks: Floats | float, *, has_stages: Any
) -> dict[str, Floats]:
    """Bytes of the parameters of a rank with so many blocks, of their gradients and of the optimizer's state."""
    shape, engine, stage = basis.shape, basis.engine, fsdp_stage(layouts, basis.engine)
    trained, frozen = parameters.trained, parameters.frozen
    gathered: Floats = np.zeros(1)
    if np.any(stage >= 3):
        some = shape.element_bytes * GATHERED_BLOCKS * parameters.whole / np.maximum(blocks, 1)
        all_step = shape.element_bytes * parameters.whole + shape.stored_bytes * trained.whole
        whole = np.where(has_stages, all_step, some)
        gathered = np.where(stage >= 3, whole, 0.0)
    weights, gradients, master = shape.element_bytes, shape.stored_bytes, 0.0
    if shape.has_master_weights:
        divided: float = engine.sharded_state_bytes if engine.sharded_state_bytes < engine.state_bytes else 12
        gradients, master = engine.state_bytes - divided - weights, divided - ADAM_BYTES
        gradients += weights if engine.low_gradients == "beside" else 0.0
    bucket = engine.gradient_bytes * np.minimum(engine.bucket_elements, trained.whole) * (layouts.dp > 1)
    is_copied = engine.zero_weights == "copied"
    of_blocks, stored = weights * parameters.sharded(layouts, 3), master * trained.sharded(layouts, 1)
    if is_copied:
        is_copy = (stage >= 1) | shape.has_master_weights
        stored = np.where(is_copy, shape.stored_bytes * trained.sharded(layouts, 1), 0.0)
        stored = stored + np.where(stage >= 1, weights * frozen.sharded(layouts, 1), 0.0)
        of_blocks = np.where(stage >= 3, 0.0, of_blocks)  # counted as gathered
    moments = shape.moment_bytes * trained.sharded(layouts, 1)
    of_gradients = gradients * trained.sharded(layouts, 2) + bucket
    if engine.accumulated == "whole":
        of_gradients = np.where(
            (layouts.zero >= 2) & (layouts.micro_batches > 1), weights * trained.whole, of_gradients
        )
    if engine.gradients == "stepped":  # the optimizer updates a block and frees its gradients during the backward pass
        of_gradients = of_gradients / np.maximum(blocks, 1)
    if is_on_host(engine, OPTIMIZER):  # a copy of the stored weights stays, unless blocks compute with other weights
        stored, moments = stored if is_copied else 0.0 * stored, 0.0 * moments
    elif is_on_host(engine, PARAMETERS):  # gathered ones stay whole from the first forward pass to the last backward
        of_blocks = np.where(stage >= 3, 0.0, shape.element_bytes * parameters.whole)
        running = np.minimum(1.0, BLOCKS_WITH_GRADIENTS * layouts.pp / shape.blocks)
        of_gradients = np.where(stage >= 2, shape.element_bytes * running * trained.whole, of_gradients)
        stored, moments = 0.0 * stored, 0.0 * moments
    at_rank, others = (of_blocks + stored, 0.0) if is_copied else (of_blocks, stored)
    of_update = {}
    if engine.update == "at_once":  # gradients, and a value of each in the kernels that update all parameters
        of_update["at update"] = 2 * shape.stored_bytes * trained.sharded(layouts, 1)
    return of_update | {
        "parameters": np.asarray(at_rank),
        "gradients": np.asarray(of_gradients),
        "optimizer state": np.asarray(others + moments),
        "gathered": gathered,
    }


def logit_bytes(family: Family[Any], shape: Shape, layouts: Layouts, engine: Engine) -> Floats:
    """Bytes of the logits on one rank that exist at once: of all, or of one of the chunks of the loss.

    An eager loss computes on values of at least 32 bits. torch's cross-entropy holds three of them: logarithms of
    probabilities, their gradient and that of the logits. Over a split vocabulary torch's loss_parallel holds four, for
    it multiplies the gradient out of place. autopar's loss holds two: probabilities and the gradient. In chunks it
    holds one, in place, and first the logits that it is cast from. A compiled loss computes all of them in registers.
    A loss that is computed with the product of the head, a piece at a time, holds no logits.
    DeepSpeed's pipeline holds the float32 logits of two micro-batches.
    """
    every, width = family.block("last", "tp").products, shape.element_bytes
    chunked, exact = {p.name for p in every if p.kind == "again"}, max(width, FLOAT_BYTES)
    products = [p for p in every if p.kind == "matmul"]
    if not products:
        return np.zeros(1)
    whole, of_chunk = np.full(1, width + 2 * FLOAT_BYTES + _of_others(engine)), width + 2 * FLOAT_BYTES
    if engine.loss in ("eager", "in_place"):
        split = 2 if engine.loss == "in_place" else 4
        whole, of_chunk = np.where(layouts.tp > 1, split, 3) * exact, exact + (width if width < exact else 0)
    elif engine.loss == "compiled":
        whole = np.full(1, 2 * width)
    elif engine.loss == "linear":
        whole, of_chunk = np.zeros(1), 0
    held = [of_chunk * p.m * p.n if p.name in chunked else whole * p.count * p.m * p.n for p in products]
    return np.asarray(sum(held))


def gone_logits(shape: Shape, engine: Engine) -> float:
    """The part of the logits' bytes that is gone when the backward pass recomputes a block."""
    if engine.outputs == "freed":
        return 1.0
    others = _of_others(engine)
    return 1 - (FLOAT_BYTES + others) / (shape.element_bytes + 2 * FLOAT_BYTES + others)


def _of_others(engine: Engine) -> int:
    """Bytes that an element of the logits holds of another micro-batch."""
    return FLOAT_BYTES if engine.outputs == "held" else 0
