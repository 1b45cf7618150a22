"""A program under its plan as one rank sees it: its place on the mesh, its stages, its parts of values."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.capture.analysis import Analysis
from autopar.ir.plan import Plan
from autopar.ir.precision import stored_dtype, summed_dtype
from autopar.ir.program import Program
from autopar.ir.sharding import Type
from autopar.ir.stages import How, Stage, offloaded_calls, recomputed_calls, separates, stages_of
from autopar.ir.storage import Storage, boundary_types, storage_of


@dataclass(frozen=True, eq=False)
class RankView:
    """A program under its plan, on one rank in the order of the plan, with dp as dp_replicate and dp_shard."""

    program: Program
    analysis: Analysis
    plan: Plan
    rank: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.plan.degrees.world_size, (self.rank, self.plan.degrees)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.program, self.plan.cuts, self.plan.recomputed)

    @property
    def own_stages(self) -> list[Stage]:
        return [stage for stage in self.stages if self.pipeline_rank_of(stage.index) == self.coordinates["pp"]]

    def pipeline_rank_of(self, stage: int) -> int:
        return self.plan.degrees.rank_of_stage(stage)

    @cached_property
    def coordinates(self) -> Mapping[str, int]:
        """This rank's place on every mesh dimension; `dp_shard` is among ranks of the same parameters."""
        degrees, mesh = self.plan.degrees, self.plan.mesh
        found = {name: degrees.coordinate(name, self.rank) for name in ("pp", "dp", "cp")}
        found["dp_replicate"], place = divmod(found["dp"], degrees.dp_shard)
        found["dp_shard"] = place * degrees.cp + found["cp"]
        if degrees.ep > 1:
            found["dp"], found["ep"] = divmod(found["dp"], degrees.ep)
        found["dp_experts"] = place // degrees.ep * degrees.cp + found["cp"]
        for name, dims in (("cp", mesh.owning("sequence")), ("tp", mesh.owning("parameters"))):
            rest = degrees.coordinate(name, self.rank)
            for i in reversed(dims):
                rest, found[mesh.names[i]] = divmod(rest, mesh.degrees[i])
        return found

    @cached_property
    def types(self) -> Mapping[str, tuple[Type, ...]]:
        return boundary_types(self.program, self.plan.blocks)

    @cached_property
    def storages(self) -> Mapping[str, Storage]:
        """How every parameter is stored. Parameters that no block takes are whole."""
        mesh, found = self.plan.mesh, {}
        for name in self.program.parameters:
            found[name] = storage_of(self.analysis.outer[name], self.types[name], mesh)
        return found

    def own_shape(self, name: str) -> tuple[int, ...]:
        """The factored shape of this rank's part of a parameter, before ZeRO."""
        mesh, storage = self.plan.mesh, self.storages[name]
        own = [self.coordinates[mesh.names[i]] for i in mesh.splitting(storage.types)]
        return storage.own_shape(own)

    def stored_itemsize(self, name: str) -> int:
        """Bytes of an element of a parameter between steps, of its gradient and of a moment of the optimizer."""
        return stored_dtype(self.program.every_parameter[name].dtype, self.plan.degrees).itemsize

    def summed_itemsize(self, name: str) -> int:
        """Bytes of an element of a parameter's gradient while ranks sum it."""
        return summed_dtype(self.program.every_parameter[name].dtype, self.plan.degrees).itemsize

    def local_shape(self, value: str) -> tuple[int, ...]:
        return self.analysis.outer[value].local_shape(self.types[value], self.plan.mesh.degrees)

    @cached_property
    def recomputed(self) -> Mapping[int, How]:
        return recomputed_calls(self.program, self.plan.degrees, self.stages)

    @cached_property
    def offloaded(self) -> frozenset[int]:
        """The calls whose saved tensors wait on the host."""
        return offloaded_calls(self.program, self.plan.degrees, self.stages)

    def splits_backward(self, stage: Stage) -> bool:
        """Whether a stage runs backward passes in two parts: for its received values and for its weights."""
        return self.plan.degrees.splits_backward and stage.index > 0 and separates(self.program, stage, self.recomputed)
