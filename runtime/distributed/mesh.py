"""Mesh dimensions as generated code sees them: a name, a degree, a process group, and this rank's coordinate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar._torch import private
from autopar.errors import Problem
from autopar.ir.degrees import Degrees
from autopar.ir.sharding import Mesh
from autopar.rules.scaled_product import CAPABILITIES

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, eq=False)
class MeshDim:
    """One dimension of a running mesh, whose collectives really send. `stride` tells coordinates of other ranks."""

    name: str
    degree: int
    group: dist.ProcessGroup
    coordinate: int
    stride: int

    def __repr__(self) -> str:
        return f"<{self.name}: {self.degree} ranks>"

    @property
    def group_name(self) -> str:
        return str(self.group.group_name)

    def of(self, rank: int) -> int:
        """The coordinate of a global rank on this dimension."""
        return (rank // self.stride) % self.degree

    def index(self) -> torch.Tensor | int:
        """This rank's coordinate, or a tensor of every rank's when all ranks live in this process."""
        if private.in_one_process():
            return private.rank_tensor(dist.get_world_size(), lambda rank: torch.tensor(self.of(rank)))
        return self.coordinate

    def apply(self, x: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`function(coordinate, x)`, on every rank when all ranks live in this process."""
        if private.is_rank_tensor(x):
            return private.map_ranks(x, lambda rank, part: function(self.of(rank), part))
        return function(self.coordinate, x)

    # collectives, torch's functional ones; documented in `autopar.lowering.communicator`

    def all_reduce(self, x: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        return self.wait(_c10d.all_reduce(x.contiguous(), operation, self.group_name))

    def start_all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _c10d.all_gather_into_tensor(x.contiguous(), self.degree, self.group_name)
        return out

    def start_reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _c10d.reduce_scatter_tensor(x, "sum", self.degree, self.group_name)
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [x.shape[0] // self.degree] * self.degree
        return self.wait(self._start_all_to_all(x, sizes, sizes))

    def exchange(self, x: torch.Tensor, to: int) -> torch.Tensor:
        rows = [x.shape[0] if rank == to else 0 for rank in range(self.degree)]
        return self.wait(self._start_all_to_all(x, rows, rows))

    def start_shift(self, x: torch.Tensor) -> torch.Tensor:
        before, after = ((self.coordinate + step) % self.degree for step in (-1, 1))
        received, sent = ([x.shape[0] * (rank == at) for rank in range(self.degree)] for at in (before, after))
        return self._start_all_to_all(x, received, sent)

    def _start_all_to_all(self, x: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        parts = torch.view_as_real(x) if x.is_complex() else x  # gloo sends no complex numbers
        out: torch.Tensor = _c10d.all_to_all_single(parts, received, sent, self.group_name)
        return torch.view_as_complex(out) if x.is_complex() else out

    def all_to_all_rows(self, x: torch.Tensor, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        if private.is_rank_tensor(x) or private.is_rank_tensor(sent):
            return self._rows_in_one_process(x, sent)
        return self.wait(self._start_all_to_all(x, received.tolist(), sent.tolist()))

    def _rows_in_one_process(self, x: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        world = dist.get_world_size()
        with private.without_ranks():
            rows, counts = private.to_ranks(x, world), private.to_ranks(sent, world)
            chunks = [x.split(count.tolist()) for x, count in zip(rows, counts, strict=True)]
            first = [rank - self.of(rank) * self.stride for rank in range(world)]
            parts = [
                torch.cat([chunks[first[rank] + k * self.stride][self.of(rank)] for k in range(self.degree)])
                for rank in range(world)
            ]
        return private.from_ranks(parts)

    def to_host(self, counts: torch.Tensor) -> torch.Tensor:
        return counts.cpu()

    def rows_of_part(self, x: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return self.apply(x, function)

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _c10d.wait_tensor(x)
        return out


@dataclass(frozen=True, eq=False)
class ExpertMesh:
    """The meshes of parameters that ``ep`` splits; `data` are the ranks that hold the same experts."""

    zero_mesh: DeviceMesh
    tensor_mesh: DeviceMesh
    data: MeshDim


@dataclass(frozen=True, eq=False)
class RankMesh:
    """The running mesh: torch's meshes, a `MeshDim` for each named dimension, and one for each pair that is joined."""

    device_mesh: DeviceMesh  # of a stage's parameters: dp_replicate, dp_shard (all ranks of ZeRO), tensor dimensions
    dims: Mapping[str, MeshDim]
    spec: Mesh
    value_mesh: DeviceMesh  # of values: with ep or cp it has dp_samples, ep and cp in place of dp_shard
    data: MeshDim | None = None  # the ranks that hold the same parameters
    samples: MeshDim | None = None  # the ranks of dp and ep, if there is ep
    experts: "ExpertMesh | None" = None  # of parameters that ep splits
    tensor_mesh: DeviceMesh | None = None  # the tensor dimensions, which split parameters
    pipeline: MeshDim | None = None  # the ranks that hold the stages of one pipeline

    @property
    def sample_ranks(self) -> MeshDim:
        """The ranks that have other samples: the ranks of ``dp`` and ``ep`` together."""
        return self.dims["dp"] if self.samples is None else self.samples

    @property
    def stage_rank(self) -> int:
        """This rank's coordinate in its pipeline."""
        return 0 if self.pipeline is None else self.pipeline.coordinate

    @property
    def device_type(self) -> str:
        return self.device_mesh.device_type


def make_mesh(spec: Mesh, device_type: str = "cpu") -> RankMesh:
    """Build process groups for a mesh over all ranks of the initialised world. Collective."""
    assert dist.get_world_size() == spec.size, (dist.get_world_size(), spec)
    device_mesh = init_device_mesh(device_type, spec.degrees, mesh_dim_names=spec.names)
    dims = {name: _dim(name, device_mesh.get_group(name)) for name in spec.names}
    return RankMesh(device_mesh, dims | _joined(device_mesh, spec), spec, device_mesh)


def _dim(name: str, group: dist.ProcessGroup) -> MeshDim:
    ranks = dist.get_process_group_ranks(group)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return MeshDim(name, len(ranks), group, ranks.index(dist.get_rank()), stride)


def _bounded() -> Any:
    """The world's backend with its timeout, for groups of its ranks; None for a world that sends nothing."""
    backend = dist.get_backend()
    return private.with_timeout(backend, private.group_timeout()) if backend in ("gloo", "nccl") else None


def _joined(device_mesh: DeviceMesh, spec: Mesh, bounded: Any = None) -> dict[str, MeshDim]:
    """Neighbouring tensor dimensions taken as one."""
    dims = {}
    for i in range(len(spec.names)):
        name = spec.joined(i)
        if name is not None:
            dims[name] = _dim(name, device_mesh[spec.names[i : i + 2]]._flatten(name, bounded).get_group())
    return dims


def training_mesh(degrees: Degrees, device_type: str) -> RankMesh:
    """The mesh of a training run, with the dimensions of generated code. Collective; equal meshes share groups."""
    shape = (degrees.pp, degrees.dp_replicate, degrees.dp_shard, degrees.ep, degrees.cp)
    return _training_mesh(shape, degrees.mesh, degrees.order, device_type, dist.group.WORLD)


_DATA = ("dp_replicate", "dp_shard")  # torch's names of the mesh dimensions whose ranks hold the same parameters


@cache
def _training_mesh(
    shape: tuple[int, int, int, int, int], spec: Mesh, order: str, device_type: str, world: object
) -> RankMesh:
    """The mesh of one world; `world` is the group of all its ranks. `shape` is pp, dp_replicate, dp_shard, ep, cp."""
    tensor, context = (tuple(spec.names[i] for i in spec.owning(owned)) for owned in ("parameters", "sequence"))
    pp, replicate, shard, ep, cp = shape
    parts = {"pp": ("pp",), "dp": _DATA, "tp": tensor}
    names = tuple(name for part in order.split("-") for name in parts[part])
    sizes = {
        "pp": pp,
        "dp_replicate": replicate,
        "dp_shard": shard * cp,
        **{name: spec.degree_of(name) for name in tensor},
    }
    bounded = _bounded()  # a rank that hangs ends the others in time
    override: Any = dict.fromkeys(names, bounded) if bounded else None
    in_order = tuple(sizes[name] for name in names)
    every = init_device_mesh(device_type, in_order, mesh_dim_names=names, backend_override=override)
    device_mesh = value_mesh = every[(*_DATA, *tensor)]
    samples: tuple[str, ...] = _DATA
    if ep * cp > 1:
        inner = {"dp_samples": shard // ep} | ({"ep": ep} if ep > 1 else {}) | {n: spec.degree_of(n) for n in context}
        override = dict.fromkeys(inner, bounded) if bounded else None
        parts_of_data = every._unflatten("dp_shard", tuple(inner.values()), tuple(inner), override)
        value_mesh = parts_of_data["dp_replicate", *inner, *tensor]
        samples = ("dp_replicate", "dp_samples")

    def flat(mesh: DeviceMesh, dims: tuple[str, ...], name: str) -> MeshDim:
        return _dim(name, mesh[dims]._flatten(name, bounded).get_group())

    dims = {n: flat(value_mesh, samples, n) if n == "dp" else _dim(n, value_mesh.get_group(n)) for n in spec.names}
    dims |= _joined(value_mesh, spec, bounded)
    pipeline = _dim("pp", every.get_group("pp")) if pp > 1 else None
    experts = None
    if ep > 1:
        zero = value_mesh["dp_replicate", "dp_samples"]
        if cp > 1:
            over = value_mesh["dp_samples", *context]._flatten("dp_experts", bounded)
            zero = DeviceMesh._concatenate([value_mesh["dp_replicate"], over])
        copies = ("dp_replicate", "dp_samples", *context)
        data = flat(value_mesh, copies, "dp_of_experts")
        experts = ExpertMesh(zero, value_mesh["ep", *tensor], data)
    return RankMesh(
        device_mesh,
        dims,
        spec,
        value_mesh,
        samples=flat(value_mesh, (*samples, "ep"), "dp_and_ep") if ep > 1 else None,
        experts=experts,
        data=dims["dp"] if ep * cp == 1 else flat(device_mesh, _DATA, "dp_cp" if cp > 1 else "dp_ep"),
        tensor_mesh=device_mesh[tensor] if prod(map(spec.degree_of, tensor)) > 1 else None,
        pipeline=pipeline,
    )


def group_of_stages(mesh: RankMesh, stage_ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The ranks of this rank's pipeline at some coordinates of it. Collective: every rank of the world asks for it."""
    assert mesh.pipeline is not None
    if len(stage_ranks) == mesh.pipeline.degree:
        return mesh.pipeline.group
    return _group_of_stages(stage_ranks, mesh.pipeline.stride, mesh.pipeline.degree, dist.group.WORLD)


def pipeline_messages(pipeline: MeshDim) -> dist.ProcessGroup:
    """The group of messages, of its own if collectives are checked: the check counts messages. Collective."""
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
        return pipeline.group
    return _group_of_stages(tuple(range(pipeline.degree)), pipeline.stride, pipeline.degree, dist.group.WORLD)


@cache
def _group_of_stages(stage_ranks: tuple[int, ...], stride: int, degree: int, world: object) -> dist.ProcessGroup:
    """All ranks make all groups in the same order, as torch requires. A rank keeps the group that contains it."""
    firsts = [rank for rank in range(dist.get_world_size()) if rank // stride % degree == 0]
    every = [[first + k * stride for k in stage_ranks] for first in firsts]
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks, timeout=private.group_timeout()) for ranks in every]
    rank = dist.get_rank()
    return next((group for ranks, group in zip(every, groups, strict=True) if rank in ranks), groups[0])


def precision_problems(precision: str | None, device: torch.device) -> list[Problem]:
    """Why a device cannot compute in a precision. A CPU emulates all of them."""
    needed = CAPABILITIES.get(precision or "")
    if needed is None or device.type != "cuda":
        return []
    capability = torch.cuda.get_device_capability(device)
    if capability >= needed:
        return []
    name, words = torch.cuda.get_device_name(device), [".".join(map(str, version)) for version in (needed, capability)]
    rule = f"needs compute capability {words[0]}, and {name} has {words[1]}"
    return [Problem(path="precision", value=precision, rule=rule, suggestion="use bf16")]


def named_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1``; of many, the first."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:16]]
    return f"ranks {', '.join(shown)}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def ranks_by(values: Sequence[Any]) -> dict[Any, list[int]]:
    """The ranks by their values, in order of the first."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks
