"""A program under its plan as one rank sees it: its place on the mesh, its stages, its parts of values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.precision import stored_dtype, summed_dtype
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.ir.stages import Stage, separates
from autopar.ir.storage import zero_dim_of, zero_ranks
from autopar.runtime.codegen.randomness import Streams
from autopar.runtime.distributed.mesh import MeshDim, RankMesh
from autopar.runtime.model.compiled import CompiledProgram

_NOTHING: Any = None  # in place of torch's meshes and groups


@dataclass(frozen=True, eq=False)
class SilentDim(MeshDim):
    """A mesh dimension without other ranks: under fake tensors, torch's collectives give tensors of the right shape."""

    @property
    def group_name(self) -> str:
        return self.name

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        return x

    # What depends on the choices of a router has its expected size.

    def all_to_all_rows(self, x: torch.Tensor, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def to_host(self, counts: torch.Tensor) -> torch.Tensor:
        return counts

    def rows_of_part(self, x: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return x[0, : x.shape[1] // self.degree]


def rank_view(program: Program, plan: Plan, rank: int) -> "RankView":
    """The view of one rank in the order of the plan."""
    assert 0 <= rank < plan.degrees.world_size, (rank, plan.degrees)
    mesh, places, dims = plan.mesh, coordinates_of(plan.degrees, plan.mesh, rank), dict[str, MeshDim]()
    for name in (*mesh.names, *filter(None, map(mesh.joined, range(len(mesh.names))))):
        at = 0
        for i in mesh.indices(name):
            at = at * mesh.degrees[i] + places[mesh.names[i]]
        dims[name] = SilentDim(name, mesh.degree_of(name), _NOTHING, at, stride=1)
    cpu = torch.device("cpu")
    return RankView(
        program=program,
        plan=plan,
        buffers=_NOTHING,
        mesh=RankMesh(_NOTHING, dims, mesh, _NOTHING),
        streams=Streams(dims, 0, cpu),
        device=cpu,
        coordinates=places,
    )


def coordinates_of(degrees: Degrees, mesh: Mesh, rank: int) -> Mapping[str, int]:
    """A rank's place on every mesh dimension; `dp_shard` is among ranks of the same parameters."""
    found = {name: degrees.coordinate(name, rank) for name in ("pp", "dp", "cp")}
    found["dp_replicate"], place = divmod(found["dp"], degrees.dp_shard)
    found["dp_shard"] = place * degrees.cp + found["cp"]
    if degrees.ep > 1:
        found["dp"], found["ep"] = divmod(found["dp"], degrees.ep)
    found["dp_experts"] = place // degrees.ep * degrees.cp + found["cp"]
    for name, dims in (("cp", mesh.owning("sequence")), ("tp", mesh.owning("parameters"))):
        rest = degrees.coordinate(name, rank)
        for i in reversed(dims):
            rest, found[mesh.names[i]] = divmod(rest, mesh.degrees[i])
    return found


@dataclass(frozen=True, eq=False, kw_only=True)
class RankView(CompiledProgram):
    """A program compiled for one rank, without other ranks and without values, with dp as dp_replicate and dp_shard."""

    coordinates: Mapping[str, int]

    def constants(self) -> dict[str, torch.Tensor]:
        """Nothing: the code that runs a stage gives it constants without values."""
        return {}

    @property
    def own_stages(self) -> list[Stage]:
        rank_of = self.plan.degrees.rank_of_stage
        return [stage for stage in self.stages if rank_of(stage.index) == self.coordinates["pp"]]

    @property
    def held(self) -> list[str]:
        """The parameters of this rank's stages, each once for every stage that takes it."""
        return [name for stage in self.own_stages for name in stage.parameters]

    def own_shape(self, name: str) -> tuple[int, ...]:
        """The factored shape of this rank's part of a parameter, before ZeRO."""
        mesh, storage = self.plan.mesh, self.placements[name]
        own = [self.coordinates[mesh.names[i]] for i in mesh.splitting(storage.types)]
        return storage.own_shape(own)

    def stored_itemsize(self, name: str) -> int:
        """Bytes of an element of a parameter between steps, of its gradient and of a moment of the optimizer."""
        return stored_dtype(self.program.every_parameter[name], self.plan.degrees).itemsize

    def summed_itemsize(self, name: str) -> int:
        """Bytes of an element of a parameter's gradient while ranks sum it."""
        return summed_dtype(self.program.every_parameter[name].dtype, self.plan.degrees).itemsize

    def is_sharded(self, name: str) -> bool:
        """Whether FSDP2 holds a parameter in shards between steps. Unused ones are whole everywhere."""
        degrees = self.plan.degrees
        is_used = name in self.program.parameters
        return degrees.fsdp_stage > 0 and is_used and zero_dim_of(degrees, self.placements[name]) is not None

    def shard_elements(self, name: str, *, padded: bool = False) -> int:
        """Elements of this rank's shard in the parts of `torch.chunk`, perhaps padded to the size of the first."""
        storage = self.placements[name]
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

    def splits_backward(self, stage: Stage) -> bool:
        """Whether a stage runs backward passes in two parts: for its received values and for its weights."""
        return self.plan.degrees.splits_backward and stage.index > 0 and separates(self.program, stage, self.recomputed)
