"""A program under its plan as one rank sees it: its place on the mesh, its stages, its parts of values."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from autopar.capture.analysis import Analysis
from autopar.ir.plan import Plan
from autopar.ir.precision import stored_dtype, summed_dtype
from autopar.ir.program import Program
from autopar.ir.sharding import Type
from autopar.ir.stages import How, Stage, offloaded_calls, recomputed_calls, separates, stages_of
from autopar.ir.storage import Storage, boundary_types, storage_of, zero_dim_of, zero_ranks


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
        rank_of = self.plan.degrees.rank_of_stage
        return [stage for stage in self.stages if rank_of(stage.index) == self.coordinates["pp"]]

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
        """How every parameter is stored that a block takes."""
        outer, mesh = self.analysis.outer, self.plan.mesh
        return {name: storage_of(outer[name], self.types[name], mesh) for name in self.program.parameters}

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

    def is_sharded(self, name: str) -> bool:
        """Whether FSDP2 holds a parameter in shards between steps. Unused ones are whole everywhere."""
        degrees, storage = self.plan.degrees, self.storages.get(name)
        return degrees.fsdp_stage > 0 and storage is not None and zero_dim_of(degrees, storage) is not None

    def shard_elements(self, name: str, *, padded: bool = False) -> int:
        """Elements of this rank's shard in the parts of `torch.chunk`, perhaps padded to the size of the first."""
        storage = self.storages[name]
        shape, ranks = list(self.own_shape(name)), zero_ranks(self.plan.degrees, storage)
        dim = storage.zero_dim(ranks)
        assert dim is not None
        size, place = -(-shape[dim] // ranks), self.coordinates["dp_experts" if storage.is_of_experts else "dp_shard"]
        shape[dim] = size if padded else max(0, min(size, shape[dim] - size * place))
        return prod(shape)

    def stored_bytes(self, name: str) -> int:
        """Bytes of this rank's part of a parameter between steps, with ZeRO's padding."""
        whole = not self.is_sharded(name)
        elements = prod(self.own_shape(name)) if whole else self.shard_elements(name, padded=True)
        return elements * self.stored_itemsize(name)

    def gradient_elements(self, name: str) -> int:
        """Elements of a parameter's gradient that a rank holds after the step."""
        return self.shard_elements(name) if self.is_sharded(name) else prod(self.own_shape(name))

    def gradient_bytes(self, name: str) -> int:
        """Bytes of a parameter's gradient, and of what an optimizer updates: without padding."""
        return self.gradient_elements(name) * self.stored_itemsize(name)

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
