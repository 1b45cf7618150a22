"""The price of one plan on one machine: the time and memory models applied to a captured model's blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.machine.fitted_constants import Mechanisms
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.memory.formula import StepMemory, cache_bytes, step_memory
from autopar.cost_model.memory.per_stage import fullest, memory_of_ranks
from autopar.cost_model.pipeline.stages import Stages, is_by_stage, pipelines_of, stages_at
from autopar.cost_model.step.assembly import assembled, message_seconds
from autopar.cost_model.step.context import Basis, Passes
from autopar.cost_model.step.experts import with_experts
from autopar.cost_model.step.layouts import Layouts, Shape, layouts_from
from autopar.cost_model.step.offload import host_bytes, is_on_host
from autopar.cost_model.step.saved_bytes import activations
from autopar.cost_model.step.step import StepSeconds, step_prices, step_seconds
from autopar.cost_model.work.block_work import VARIANTS, Family, evaluate, free_symbols
from autopar.ir.arrays import Floats
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.offload import ACTIVATIONS
from autopar.ir.rank_order import ORDERS
from autopar.ir.sharding import Mesh
from autopar.ir.stages import How

if TYPE_CHECKING:
    from autopar.cost_model.machine.profile import DeviceProfile
    from autopar.cost_model.work.program_costs import ProgramWorks

_V = TypeVar("_V", float, Floats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """The utilisation of the devices in a step. MFU and HFU are fractions of the dense peak."""

    flops_per_s: float  # of the model, on each device
    mfu: float
    hfu: float  # recomputed FLOP count too


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that a price depends on beside the captured model, without the tokens of a run."""

    cluster: ClusterSpec
    degrees: Degrees
    engine: Engine
    precision: str | None = None
    profile: DeviceProfile | None = None
    cuts: tuple[int, ...] = ()  # calls before which stages begin; none: equal stages and the closed form of 1F1B


def layout_of(works: ProgramWorks, degrees: Degrees) -> Layouts:
    """The layout of a plan, without recomputation."""
    return layouts_from(
        **{name: [getattr(degrees, name)] for name in ("tp", "pp", "cp", "ep", "dp", "zero")},
        virtual=[degrees.virtual_stages],
        shard=[degrees.shard_ranks],
        micro_batch=[degrees.micro_batch or 1],
        micro_batches=[degrees.num_micro_batches],
        sequence_parallel=works.sequence_parallel,
        recompute=0,
        order=[ORDERS.index(degrees.order)],
    )


class Pricing:
    """One question on one machine; holds what several layouts of it share."""

    def __init__(
        self,
        works: ProgramWorks,
        question: Question,
        machine: Machine,
    ) -> None:
        self.works, self.question, self.machine = works, question, machine
        self.families: dict[float, Family[Any]] = {}
        self.basis = Basis(shape=shape_of_works(works), machine=machine)

    def family(self, layouts: Layouts) -> Family[Any]:
        """The numbers of a layout of the question, which has its own data-parallel degree or none."""
        degree = float(layouts.dp[0])
        if degree not in self.families:
            self.families[degree] = family_at(self.works, layouts, self.machine.mechanisms)
        return self.families[degree]

    def stages(self) -> Stages | None:
        question = self.question
        return stages_at(self.works.calls, question.cuts, question.degrees) if question.cuts else None

    def step(self, layouts: Layouts, *, every_rank: bool = False) -> StepSeconds:
        """With recomputation in some blocks only, as much between none and all of it. With `every_rank`, and stages of
        their own, arrays of all pipeline ranks instead of the slowest one's."""
        stages, pipeline = self.stages(), None
        if stages is not None:
            exposed, sharing = self.machine.mechanisms.message_exposed, self.machine.ranks_per_core
            pipeline = pipelines_of([stages], self.question.engine, exposed, sharing, every_rank=every_rank)
        steps = [step_seconds(self.family(at), self.basis, at, pipeline) for at in self.at_levels(layouts)]
        return step_between(self._shares(), steps)

    def mean_passes_and_message(self) -> tuple[dict[str, Passes], float]:
        """Seconds of one micro-batch of the question's layout in every role, with recomputation in some blocks those of
        the mean block, without what stages recompute by themselves; and of a whole message between stages."""
        passes = list[Mapping[str, Passes]]()
        for layouts in self.at_levels(layout_of(self.works, self.question.degrees)):
            prices = step_prices(self.basis, self.family(layouts), layouts)
            of_blocks = assembled(self.basis, layouts, prices).passes
            passes.append({**of_blocks, "first": prices.first, "last": prices.last})
        means = {
            role: replace(
                each,
                **{
                    name: _between(self._shares(), [np.asarray(getattr(of[role], name)) for of in passes])
                    for name in ("forward", "backward", "weight")
                },
            )
            for role, each in passes[0].items()
        }
        is_overlapped = self.question.engine.messages == "overlapped"  # then messages count their exposed part
        part = self.machine.mechanisms.message_exposed if is_overlapped else 1.0
        return means, float(np.max(message_seconds(self.basis, layouts))) / part

    def memory(self, layouts: Layouts, *, every_rank: bool = False) -> StepMemory:
        """Bytes of the fullest rank at every level of recomputation, as much between them as blocks have it.

        With `every_rank` they are arrays of all pipeline ranks.
        """
        levels = [self._memory(at) for at in self.at_levels(layouts)]
        rows = [(each if every_rank else fullest(each)).parts for each in levels]
        return StepMemory(parts=parts_between(self._shares(), rows, self.machine.mechanisms.allocator_cache))

    def host_bytes(self, layouts: Layouts) -> float:
        """Bytes of host memory for one device."""
        shares = block_shares(self.works, self.question.degrees)
        return float(bytes_on_host(self.works, layouts, self.machine, shares["selective"], shares["full"])[0])

    def flops(self, sequences: float) -> tuple[float, float]:
        """FLOP of a step over all devices: the model's own, and the recomputed ones."""
        ones = dict.fromkeys((*self.works.mesh.names, "b", "t", "d"), 1.0)
        tokens = float(self.works.sequence)
        roles = self.works.family.roles
        kinds = [self.works.family.block(role, "tp").products for role in roles]
        products = tuple(tuple((op.passes, op.flops) for op in block if op.kind != "again") for block in kinds)
        repeats = tuple(op.flops for block in kinds for op in block if op.kind == "again")
        of_roles, in_chunks = evaluate((products, repeats), {**ones, "s": tokens, "S": tokens})
        forward = {role: sum(flops for _, flops in ops) for role, ops in zip(roles, of_roles, strict=True)}
        of_passes = {role: sum(n * flops for n, flops in ops) for role, ops in zip(roles, of_roles, strict=True)}
        whole = sum(count * of_passes[role] for role, count in (*self.works.counts, ("first", 1), ("last", 1)))
        shares = block_shares(self.works, self.question.degrees)
        extra = shares["full"] * sum(count * forward[role] for role, count in self.works.counts)
        extra += shares["selective"] * self._selected_flops(ones, tokens) + sum(in_chunks)
        return float(whole) * sequences, float(extra) * sequences

    def _selected_flops(self, ones: Mapping[str, float], tokens: float) -> float:
        """FLOP of selective recomputation in all blocks, of one sequence over all devices."""
        kinds = {role: self.works.family.block(role, "tp").selected for role, _ in self.works.counts}
        flops = tuple(tuple(op.flops for op in block.operators) if block else () for block in kinds.values())
        sums = evaluate(flops, {**ones, "s": tokens, "S": tokens})
        return float(sum(n * sum(block) for (_, n), block in zip(self.works.counts, sums, strict=True)))

    def utilisation(self, sequences: float, step_s: float, num_devices: int) -> Utilisation:
        """Of a step of `step_s` over so many sequences in all."""
        model, extra = self.flops(sequences)
        reached = model / (step_s * num_devices)
        mfu = reached / self.machine.peak_flops_per_s
        return Utilisation(flops_per_s=reached, mfu=mfu, hfu=mfu * (1 + extra / model if model else 1.0))

    def _memory(self, layouts: Layouts) -> StepMemory:
        if (stages := self.stages()) is None:
            return step_memory(self.family(layouts), layouts, self.basis)
        return memory_of_ranks(stages, self.family(layouts), layouts, self.basis)

    def recomputed_share(self) -> float:
        """The part of the repeated blocks that is recomputed, fully or selectively."""
        shares = block_shares(self.works, self.question.degrees)
        return shares["full"] + shares["selective"]

    def _shares(self) -> list[float]:
        return [*level_shares(self.works, self.question.degrees, self.question.cuts).values()]

    def at_levels(self, layouts: Layouts) -> list[Layouts]:
        """The question's layout at every level of recomputation that some of its blocks have."""
        levels = level_shares(self.works, self.question.degrees, self.question.cuts)
        return [replace(layouts, recompute=np.full(1, float(level))) for level in levels]


def bytes_on_host(
    works: ProgramWorks, layouts: Layouts, machine: Machine, selective: Floats | float, full: Floats | float
) -> Floats:
    """Bytes of host memory for one device, if these parts of the blocks are recomputed selectively and fully."""
    engine, shape, saved = machine.engine, shape_of_works(works), np.zeros(1)
    if is_on_host(engine, ACTIVATIONS):
        family = family_at(works, layouts, machine.mechanisms)
        saved = activations(family, shape, layouts, engine).mixed(selective, full)
    return host_bytes(engine, shape, works.num_parameters - works.num_frozen, works.num_frozen, saved, layouts)


def block_shares(works: ProgramWorks, degrees: Degrees) -> dict[How, float]:
    """The parts of the repeated blocks that are recomputed fully and selectively."""
    every = sum(count for _, count in works.counts)

    def share(of_stage: Callable[[int], int | None]) -> float:
        counts = [of_stage(stage) for stage in range(degrees.num_stages if is_by_stage(degrees) else 1)]
        each = degrees.num_stages // len(counts)  # stages that one count holds for
        return 1.0 if None in counts else min(1.0, each * sum(n for n in counts if n) / every)

    full = share(degrees.full_blocks_of)
    return {"full": full, "selective": min(share(degrees.selective_blocks_of), 1.0 - full)}


def level_shares(works: ProgramWorks, degrees: Degrees, cuts: tuple[int, ...] = ()) -> dict[int, float]:
    """The levels of recomputation (positions in `RECOMPUTE`) of a plan's blocks, with the part of each."""
    if cuts and is_by_stage(degrees):
        return {0: 1.0}
    shares = block_shares(works, degrees)
    levels = {0: 1.0 - shares["full"] - shares["selective"], 1: shares["selective"], 2: shares["full"]}
    return {level: share for level, share in levels.items() if share > 0} or {0: 1.0}


def family_at(works: ProgramWorks, layouts: Layouts, constants: Mechanisms) -> Family[Any]:
    """The numbers of a captured model's blocks for one micro-batch of each layout."""
    roles, tokens = works.family.roles, float(works.sequence)
    blocks = tuple(works.family.block(role, "tp") for role in roles)  # both variants are one
    sizes, names = works.mesh.as_dict(), free_symbols(blocks)
    of_layouts: dict[str, Callable[[], Floats]] = {  # layouts may lack what nothing depends on
        "b": lambda: layouts.micro_batch,
        "t": lambda: layouts.tp,
        "d": lambda: layouts.dp / layouts.ep if "ep" in sizes else layouts.dp,
        "s": lambda: tokens / layouts.cp,
        "S": lambda: np.array([tokens]),
        "tp": lambda: layouts.tp,
        "ep": lambda: layouts.ep,
        "cp": lambda: layouts.cp,
    }
    numbers = {name: np.array([float(n)]) for name, n in sizes.items()}
    valued = evaluate(blocks, numbers | {name: value() for name, value in of_layouts.items() if name in names})
    each = tuple((role, tuple((v, work) for v in VARIANTS)) for role, work in zip(roles, valued, strict=True))
    return with_experts(replace(works.family, blocks=each), layouts, constants)


def step_between(shares: Sequence[float | Floats], steps: Sequence[StepSeconds]) -> StepSeconds:
    """A step of blocks with several levels of recomputation, from the step of each level and its part of the blocks."""
    return StepSeconds(
        seconds=_between(shares, [step.seconds for step in steps]),
        parts={name: _between(shares, [step.parts[name] for step in steps]) for name in steps[0].parts},
        hidden={name: _between(shares, [step.hidden[name] for step in steps]) for name in steps[0].hidden},
    )


def parts_between(shares: Sequence[float], rows: Sequence[Mapping[str, _V]], cache: float) -> dict[str, _V]:
    """`step_between` for parts of memory. A recomputed block takes the same room, whatever the number of them."""
    parts = {name: _between(shares, [row[name] for row in rows]) for name in rows[0]}
    parts["workspace"] = rows[-1]["workspace"]
    return parts | {"cache": cache_bytes(parts, cache)}


def _between(shares: Sequence[float | Floats], values: Sequence[_V]) -> _V:
    if len(values) == 1:
        return values[0]
    total: Any = sum(share * value for share, value in zip(shares, values, strict=True))
    mean: _V = total
    return mean


def shape_of_works(works: ProgramWorks) -> Shape:
    """Facts of a captured model that its blocks do not hold."""
    mesh = works.mesh
    return Shape(
        counts=tuple((role, np.array([float(count)])) for role, count in works.counts),
        hidden=np.array([float(works.hidden)]),
        sequence=np.array([float(works.sequence)]),
        experts_per_token=np.array([works.experts_per_token]),
        is_tied=np.array([works.is_tied]),
        element_bytes=float(works.element_bytes),
        stored_bytes=float(works.stored_bytes),
        moment_bytes=works.moment_bytes,
        tensor_dims=_parts_of(mesh, mesh.owning("parameters"), "tp"),
        context_dims=_parts_of(mesh, mesh.owning("sequence"), "cp"),
    )


def _parts_of(mesh: Mesh, dims: Sequence[int], whole: str) -> tuple[tuple[str, int, int], ...]:
    """Name, ranks and stride of several mesh dimensions that multiply to one degree; () if there is only that one."""
    parts = [(mesh.names[i], mesh.degrees[i]) for i in dims if mesh.names[i] != whole]
    return tuple((name, n, prod(m for _, m in parts[i + 1 :])) for i, (name, n) in enumerate(parts))


def without_data_parallelism(layouts: Layouts) -> Layouts:
    stage_stride = layouts.tp * layouts.cp
    return replace(
        layouts, dp=np.ones(1), shard=layouts.cp, ep=np.minimum(layouts.ep, layouts.cp), stage_stride=stage_stride
    )
