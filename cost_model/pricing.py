"""One plan on one machine, priced: what the time and memory models make of a captured model's blocks.

A layout is evaluated once for its step and its memory; other layouts of the same question, such as the plan without
data parallelism, come from the same expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.cluster_machine import ClusterMachine
from autopar.cost_model.engine import Engine
from autopar.cost_model.expert_parallel import with_experts
from autopar.cost_model.expressions import VARIANTS, Family, evaluate
from autopar.cost_model.layout import Layouts, Shape
from autopar.cost_model.mechanisms import Mechanisms, mechanisms
from autopar.cost_model.staged import Stages, pipeline_of, staged_memory, stages_at
from autopar.cost_model.step import StepSeconds, step_seconds
from autopar.cost_model.step_assembly import Pipeline, Pipelined
from autopar.cost_model.step_basis import Passes
from autopar.cost_model.step_memory import StepMemory, step_memory
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Degrees

if TYPE_CHECKING:
    from autopar.cost_model.device_profile import DeviceProfile
    from autopar.cost_model.program_works import ProgramWorks

Floats = NDArray[Any]
PASSES = 3  # a product forward, for its input's gradient, for its weight's


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a captured model beside the model: everything but the tokens of a run.

    `cuts` are the calls before which pipeline stages begin (none: equal stages and the closed form of 1F1B); `cp` and
    `ep` the degrees of context and expert parallelism, which no plan runs yet.
    """

    cluster: ClusterSpec
    degrees: Degrees
    engine: Engine
    precision: str | None = None
    profile: DeviceProfile | None = None
    cuts: tuple[int, ...] = ()
    cp: int = 1
    ep: int = 1


def layouts_of(works: ProgramWorks, question: Question) -> Layouts:
    """The one layout of a question."""
    degrees = question.degrees
    values = {
        "tp": degrees.tp,
        "sequence_parallel": works.sequence_parallel,
        "pp": degrees.pp,
        "virtual": degrees.virtual_stages,
        "cp": question.cp,
        "ep": question.ep,
        "dp": degrees.dp,
        "shard": degrees.dp_shard * question.cp,
        "zero": degrees.zero,
        "micro_batch": degrees.micro_batch or 1,
        "micro_batches": degrees.num_micro_batches,
        "recompute": 2 if degrees.recompute == "full" else 0,
    }
    return Layouts(**{name: np.array([float(value)]) for name, value in values.items()})


def family_of_layout(works: ProgramWorks, question: Question) -> Family[Any]:
    """The numbers of a captured model's blocks for one micro-batch of a question's layout."""
    return family_at(works, layouts_of(works, question), mechanisms())


class Pricing:
    """One question on one machine; holds what several layouts of it share."""

    def __init__(
        self,
        works: ProgramWorks,
        question: Question,
        machine: ClusterMachine,
        constants: Mechanisms,
        precision: str,
    ) -> None:
        self.works, self.question, self.machine = works, question, machine
        self.constants, self.precision = constants, precision
        self.fused = question.engine.attention == "fused"
        self.families: dict[float, Family[Any]] = {}
        self.shape = shape_of(works)

    def family(self, layouts: Layouts) -> Family[Any]:
        """The numbers of a layout of the question, which has its own data-parallel degree or none."""
        degree = float(layouts.dp[0])
        if degree not in self.families:
            self.families[degree] = family_at(self.works, layouts, self.constants)
        return self.families[degree]

    def of(self, question: Question) -> Pricing:
        """Another question of the same sizes, with other cuts or recomputation: the blocks' numbers are shared."""
        found = Pricing(self.works, question, self.machine, self.constants, self.precision)
        found.families = self.families
        return found

    def stages(self) -> Stages | None:
        degrees, cuts = self.question.degrees, self.question.cuts
        if not cuts:
            return None
        return stages_at(
            self.works.calls,
            cuts,
            schedule=degrees.schedule,
            pp=degrees.pp,
            virtual=degrees.virtual_stages,
            micro_batches=degrees.micro_batches,
            runs=degrees.accumulate,
        )

    def step(self, layouts: Layouts) -> StepSeconds:
        """With recomputation in some blocks only, as much between none and all of it."""
        share = self._recomputed_share()
        found = [self._step(one) for one in self._with_and_without(layouts)]
        return StepSeconds(
            seconds=_between(share, [one.seconds for one in found]),
            parts={name: _between(share, [one.parts[name] for one in found]) for name in found[0].parts},
            hidden={name: _between(share, [one.hidden[name] for one in found]) for name in found[0].hidden},
        )

    def passes(self, layouts: Layouts) -> dict[str, Passes]:
        """Seconds of one micro-batch in every role, by which stages are cut."""
        found: dict[str, Passes] = {}

        def look(passes: Mapping[str, Passes], message: Floats) -> Pipelined:
            found.update(passes)
            return Pipelined(busy=np.zeros(1), blocks=np.zeros(1), idle=np.zeros(1), messages=np.zeros(1))

        self._step(layouts, look)
        return found

    def memory(self, layouts: Layouts) -> StepMemory:
        share = self._recomputed_share()
        found = [self._memory(one) for one in self._with_and_without(layouts)]
        parts = {name: _between(share, [one.parts[name] for one in found]) for name in found[0].parts}
        parts["workspace"] = found[-1].parts["workspace"]
        return StepMemory(peak_bytes=np.asarray(sum(parts.values())), parts=parts)

    def flops(self, sequences: float) -> tuple[float, float]:
        """FLOP of a step over all devices: the model's, and what is computed again."""
        ones = dict.fromkeys((*self.works.mesh.names, "b", "t", "d"), 1.0)
        tokens = float(self.works.sequence)
        roles = self.works.family.roles
        products = tuple(tuple(one.flops for one in self.works.family.block(role, "tp").products) for role in roles)
        found = evaluate(products, {**ones, "s": tokens, "S": tokens})
        forward = {role: sum(flops) for role, flops in zip(roles, found, strict=True)}
        repeated = sum(count * forward[role] for role, count in self.works.counts)
        whole = repeated + forward["first"] + forward["last"]
        again = repeated * self._recomputed_share() if self.question.degrees.recompute == "full" else 0.0
        return PASSES * float(whole) * sequences, float(again) * sequences

    def _step(self, layouts: Layouts, pipeline: Pipeline | None = None) -> StepSeconds:
        engine, stages = self.question.engine, self.stages()
        if stages is not None and pipeline is None:
            pipeline = self._pipeline(stages)
        return step_seconds(
            self.family(layouts),
            self.shape,
            layouts,
            self.machine.machine,
            engine,
            self.constants,
            in_float8=self.precision == "fp8",
            fused=self.fused,
            pipeline=pipeline,
        )

    def _pipeline(self, stages: Stages) -> Pipeline:
        sharing = ranks_per_core(self.machine, self.question.cluster)
        return pipeline_of(stages, self.question.engine, self.constants.message_exposed, sharing)

    def _memory(self, layouts: Layouts) -> StepMemory:
        family, stages, reserve = self.family(layouts), self.stages(), self.machine.profile.reserve_bytes
        shape, engine = self.shape, self.question.engine
        given: dict[str, Any] = {"reserve_bytes": reserve, "cache": self.constants.allocator_cache, "fused": self.fused}
        if stages is None:
            return step_memory(family, shape, layouts, engine, **given)
        return staged_memory(stages, family, shape, layouts, engine, **given)

    def _recomputed_share(self) -> float:
        """The part of the repeated blocks that computes again, where anything does."""
        degrees = self.question.degrees
        if degrees.recompute_blocks is None:
            return 1.0
        blocks = sum(count for _, count in self.works.counts)
        return min(1.0, degrees.recompute_blocks * degrees.num_stages / blocks)

    def _with_and_without(self, layouts: Layouts) -> list[Layouts]:
        if self._recomputed_share() == 1.0:
            return [layouts]
        return [replace(layouts, recompute=np.zeros(1)), layouts]


def family_at(works: ProgramWorks, layouts: Layouts, constants: Mechanisms) -> Family[Any]:
    """The numbers of a captured model's blocks for one micro-batch of each layout."""
    return with_experts(evaluated(works, works.family, layouts), layouts, constants)


def evaluated(
    works: ProgramWorks, family: Family[Any], layouts: Layouts, names: Collection[str] = ("b", "t", "tp", "d", "s", "S")
) -> Family[Any]:
    """The numbers of a family of a captured model's expressions, which have those `names` of layouts."""
    tokens = float(works.sequence)
    sizes = dict(zip(works.mesh.names, works.mesh.degrees, strict=True))
    numbers = {name: np.array([float(n)]) for name, n in sizes.items()}
    of_layouts: dict[str, Callable[[], Floats]] = {
        "b": lambda: layouts.micro_batch,
        "t": lambda: layouts.tp,
        "d": lambda: layouts.dp,
        "s": lambda: tokens / layouts.cp,
        "S": lambda: np.array([tokens]),
    }
    numbers |= {
        name: value() for name, value in of_layouts.items() if name in names and (name != "tp" or name in sizes)
    }
    roles = family.roles
    found = evaluate(tuple(family.block(role, "tp") for role in roles), numbers)  # both variants are one
    blocks = tuple((role, tuple((v, work) for v in VARIANTS)) for role, work in zip(roles, found, strict=True))
    return replace(family, blocks=blocks)


def _between(share: float, values: list[Floats]) -> Floats:
    return values[0] if len(values) == 1 else (1 - share) * values[0] + share * values[1]


def shape_of(works: ProgramWorks) -> Shape:
    """What of a captured model its blocks do not say."""
    mesh, dims = works.mesh, []
    tensor = [(name, n) for name, n in zip(mesh.names, mesh.degrees, strict=True) if name not in ("dp", "tp")]
    for i, (name, n) in enumerate(tensor):
        dims.append((name, n, int(np.prod([m for _, m in tensor[i + 1 :]], initial=1))))
    return Shape(
        counts=tuple((role, np.array([float(count)])) for role, count in works.counts),
        hidden=np.array([float(works.hidden)]),
        sequence=np.array([float(works.sequence)]),
        experts_per_token=np.array([works.experts_per_token]),
        is_tied=np.array([works.is_tied]),
        element_bytes=float(works.element_bytes),
        tensor_dims=tuple(dims),
    )


def ranks_per_core(machine: ClusterMachine, cluster: ClusterSpec) -> float:
    """How many ranks of one host share a core of it; 1 on devices that ranks have for themselves."""
    return machine.machine.ranks_per_core if cluster.num_hosts == 1 else 1.0


def without_data_parallelism(layouts: Layouts) -> Layouts:
    return replace(layouts, dp=np.ones(1), shard=layouts.cp, ep=np.minimum(layouts.ep, layouts.cp))
