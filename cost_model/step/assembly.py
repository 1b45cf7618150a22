"""The step time from its prices: blocks on stages, messages between stages, and the end of the step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from autopar.cost_model.step.block_prices import BlockPrices
from autopar.cost_model.step.context import Basis, Passes, repeated_roles, weighted
from autopar.cost_model.step.data_parallel import DataPrices, Gathers, with_gathers
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.offload import host_seconds
from autopar.cost_model.step.rank_parameters import RankParameters, blocks_per_rank
from autopar.ir.arrays import Floats
from autopar.ir.schedules.registry import DEFAULT_SCHEDULE, SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """The busiest rank of a pipeline with known stages."""

    busy: Floats  # seconds of one micro-batch
    blocks: Floats  # repeated blocks of the rank
    idle: Floats  # seconds of the step
    messages: Floats  # seconds of the step in which the rank waits for messages
    # seconds of `busy` in blocks that only some stages recompute, and how many blocks of the rank those are
    again: Floats = field(default_factory=lambda: np.zeros(1))
    selective: Floats = field(default_factory=lambda: np.zeros(1))
    full: Floats = field(default_factory=lambda: np.zeros(1))


# maps the passes of every role and the seconds of one message to the busiest rank of a plan's own stages
Pipeline: TypeAlias = Callable[[Mapping[str, Passes], Floats], PipelineTimes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices:
    """The prices of a step's parts, for every layout."""

    blocks: Mapping[str, BlockPrices]
    first: Passes
    last: Passes
    gathers: Mapping[str, Gathers]  # empty if no layout gathers blocks
    end_gathers: Floats  # seconds of one micro-batch
    data: Callable[[Floats], DataPrices]  # the gradient sums of a rank, by its number of blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The parts of a step. The first three are seconds of one micro-batch, the others seconds of the whole step."""

    computing: Mapping[str, Passes]  # of a block by role, without gathers
    passes: Mapping[str, Passes]  # of a block by role, with gathers
    mean: Passes  # of the mean block
    pipelined: PipelineTimes
    data: DataPrices
    sums: Floats
    end_gathers: Floats
    optimizer: Floats
    accumulation: Floats
    host_copies: Floats
    before: Floats  # the step without stragglers
    straggling: Floats
    pipeline_s: Floats  # passes, messages and waiting, with stragglers

    @property
    def seconds(self) -> Floats:
        total: Floats = self.before * (1 + self.straggling)
        return total


def assembled(basis: Basis, layouts: Layouts, prices: StepPrices, pipeline: Pipeline | None = None) -> StepTimes:
    """The step of every layout from its prices. A `pipeline` gets every role's passes."""
    mechanisms, n = basis.machine.mechanisms, layouts.micro_batches
    computing = {
        role: Passes(
            forward=price.forward,
            backward=price.backward + recomputing(layouts, price),
            weight=price.weight,
            selective=price.selective,
        )
        for role, price in prices.blocks.items()
    }
    passes = computing
    if prices.gathers:
        passes = {role: with_gathers(basis, layouts, one, prices.gathers[role]) for role, one in computing.items()}
    shares = repeated_roles(basis.shape)
    mean = Passes(
        forward=weighted([(share, passes[role].forward) for role, share in shares.items()]),
        backward=weighted([(share, passes[role].backward) for role, share in shares.items()]),
    )
    message = message_seconds(basis, layouts)
    if pipeline is None:
        pipe = _evenly_cut(basis, layouts, mean.both, prices, message)
    else:
        pipe = pipeline({**passes, "first": prices.first, "last": prices.last}, message)
    data = prices.data(pipe.blocks)
    sums = _waiting_sums(basis, layouts, data, pipe.blocks * mean.both + pipe.again)
    copies, update = _host_seconds(basis, layouts, prices, data, mean, pipe)
    optimizer = _optimizer(basis, layouts, data.parameters) if update is None else update
    adding = _accumulation(basis, layouts, data.parameters)
    ends = np.where((layouts.zero >= 3) & (layouts.pp == 1), prices.end_gathers, 0.0) * n
    straggling = mechanisms.straggler * np.sqrt(2 * np.log(np.maximum(layouts.num_devices, 1.0001)))
    busy = n * pipe.busy + pipe.idle + pipe.messages
    return StepTimes(
        computing=computing,
        passes=passes,
        mean=mean,
        pipelined=pipe,
        data=data,
        sums=sums,
        end_gathers=ends,
        optimizer=optimizer,
        accumulation=adding,
        host_copies=copies,
        before=busy + sums + optimizer + copies + adding + ends + mechanisms.step_s,
        straggling=straggling,
        pipeline_s=busy * (1 + straggling),
    )


# ---- blocks and stages ----


def recomputing(layouts: Layouts, prices: BlockPrices) -> Floats:
    """Seconds of recomputation in a block's backward pass."""
    full = np.where(layouts.recompute == 2, prices.forward, 0.0)
    return np.where(layouts.recompute == 1, prices.selective, full)


def _evenly_cut(basis: Basis, layouts: Layouts, block: Floats, prices: StepPrices, message: Floats) -> PipelineTimes:
    """The default schedule, 1F1B, over stages with equal numbers of blocks."""
    pp, n, v = layouts.pp, layouts.micro_batches, np.maximum(layouts.virtual, 1)
    first, last, has_stages = prices.first.both, prices.last.both, pp > 1
    per_rank, last_rank = blocks_per_rank(basis.shape.blocks, layouts, basis.machine.engine)
    middle = per_rank * block
    (path,) = SCHEDULES[DEFAULT_SCHEDULE].critical_paths(pp, 1, n)  # as many backward passes as forward
    ends = np.maximum(middle + np.where(has_stages, first, 0.0), last_rank * block + last)
    return PipelineTimes(
        busy=np.where(has_stages, ends, middle + last + first),
        blocks=per_rank,
        idle=np.where(has_stages, path.forward / v * (middle + 2 * message), 0.0),
        messages=np.where(has_stages, v * message * n, 0.0),  # one each way at once: links are full duplex
    )


def message_seconds(basis: Basis, layouts: Layouts) -> Floats:
    """Seconds that a rank waits for one message between stages, one way."""
    shape, engine, links = basis.shape, basis.machine.engine, basis.machine.links
    size = shape.element_bytes * layouts.micro_batch * shape.sequence / layouts.cp * shape.hidden
    split = layouts.tp if engine.splits_messages else np.where(layouts.sequence_parallel, layouts.tp, 1)
    span, devices, per_host = layouts.pp * layouts.stage_stride, layouts.num_devices, links.devices_per_host
    is_inside = (span <= per_host) & ((devices <= per_host) | (np.mod(per_host, span) == 0))
    waits = basis.machine.mechanisms.message_exposed if engine.messages == "overlapped" else 1.0
    return np.where(layouts.pp > 1, waits * links.message_s(size / split, is_inside), 0.0)


# ---- the end of a step ----


def sums_beside_blocks(layouts: Layouts) -> Floats:
    """Whether the end of a step has no gradient sums: ZeRO 2 and 3 sum beside blocks, and one rank has no sums."""
    is_beside: Floats = (layouts.zero >= 2) & (layouts.pp == 1) | (layouts.data_ranks <= 1)
    return is_beside


def moving_sums(layouts: Layouts, data: DataPrices) -> Floats:
    return np.where(layouts.zero >= 1, data.sharded, data.whole)


def _waiting_sums(basis: Basis, layouts: Layouts, data: DataPrices, window: Floats) -> Floats:
    """Exposed seconds of gradient sums and of gathering updated parameters; 0 if ZeRO sums beside blocks."""
    engine, mechanisms = basis.machine.engine, basis.machine.mechanisms
    total = moving_sums(layouts, data)
    if engine.gradient_sync == "during":
        left = np.maximum(total - mechanisms.gradient_window * window, 0.0)
        total = left + (basis.machine.overlap_slowdown - 1) * np.minimum(total, window)
    if engine.parameter_sync == "broadcasts":
        total = total + np.where(layouts.zero >= 1, layouts.shard * mechanisms.broadcast_s, 0.0)
    return np.where(sums_beside_blocks(layouts), 0.0, total)


def _accumulation(basis: Basis, layouts: Layouts, parameters: RankParameters) -> Floats:
    """Adding each micro-batch's weight gradients to their sum, by a kernel of its own."""
    if basis.machine.engine.accumulation == "fused":
        return np.zeros(1)
    moved = (basis.shape.element_bytes + 2 * basis.machine.engine.gradient_bytes) * parameters.trained.whole
    return np.asarray((layouts.micro_batches - 1) * moved / basis.machine.speeds.bytes_per_s)


def _host_seconds(
    basis: Basis, layouts: Layouts, prices: StepPrices, data: DataPrices, mean: Passes, pipe: PipelineTimes
) -> tuple[Floats, Floats | None]:
    """Waiting for the host. A rank moves what its blocks save, which depends on recomputation."""
    moved = np.zeros(1)
    for role, share in repeated_roles(basis.shape).items():
        saved = prices.blocks[role].saved
        freed = pipe.selective * (saved.none - saved.selective) + pipe.full * (saved.none - saved.full)
        moved = moved + share * (pipe.blocks * saved.kept(layouts.recompute) - freed)
    return host_seconds(basis, layouts, data.parameters, mean, pipe.blocks, moved)


def _optimizer(basis: Basis, layouts: Layouts, parameters: RankParameters) -> Floats:
    shape, engine = basis.shape, basis.machine.engine
    each: float = engine.optimizer_bytes
    if engine.zero_weights == "copied" and shape.has_master_weights:
        each += 2 * (shape.stored_bytes + shape.element_bytes)  # weights are cast for blocks, and gradients back
    moved = each * parameters.trained.sharded(layouts, 1)
    return np.asarray(moved / basis.machine.speeds.bytes_per_s)
