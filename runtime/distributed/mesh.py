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
from autopar.ir.degrees import Degrees
from autopar.ir.rank_order import strides
from autopar.ir.sharding import Mesh

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, eq=False)
class MeshDim:
    """One dimension of a running mesh: the `Communicator` of generated code whose collectives really send.

    In one-process mode `stride` tells each rank's coordinate.
    """

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
            return private.rank_values(dist.get_world_size(), self.of)
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
        return self.wait(_c10d.all_to_all_single(x, sizes, sizes, self.group_name))

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _c10d.wait_tensor(x)
        return out


@dataclass(frozen=True, eq=False)
class RankMesh:
    """The running mesh: torch's `DeviceMesh`, one `MeshDim` per named dimension, and one per pair that can be joined.

    `tensor_mesh` has all dimensions but the data-parallel ones; it splits parameters. It is None if there are none.
    `pipeline` are the ranks that hold the stages of one pipeline. `device_mesh` is the mesh of this rank's stages.
    """

    device_mesh: DeviceMesh
    dims: Mapping[str, MeshDim]
    spec: Mesh
    tensor_mesh: DeviceMesh | None = None
    pipeline: MeshDim | None = None

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
    dims = {}
    rank = dist.get_rank()
    for index, (name, degree) in enumerate(zip(spec.names, spec.degrees, strict=True)):
        stride = prod(spec.degrees[index + 1 :])
        group = device_mesh.get_group(name)
        dims[name] = MeshDim(name, degree, group, (rank // stride) % degree, stride)
    return RankMesh(device_mesh, dims | _joined(device_mesh, spec, rank), spec)


def _bounded() -> Any:
    """The world's backend with its timeout, for groups of its ranks; None for a world that sends nothing."""
    backend = dist.get_backend()
    return private.with_timeout(backend, private.group_timeout()) if backend in ("gloo", "nccl") else None


def _joined(device_mesh: DeviceMesh, spec: Mesh, rank: int, bounded: Any = None) -> dict[str, MeshDim]:
    """Neighbouring tensor dimensions taken as one."""
    found = {}
    for i in range(len(spec.names)):
        name = spec.joined(i)
        if name is not None:
            group = device_mesh[spec.names[i : i + 2]]._flatten(name, bounded).get_group()
            degree, stride = spec.degree_of(name), prod(spec.degrees[i + 2 :])
            found[name] = MeshDim(name, degree, group, (rank // stride) % degree, stride)
    return found


def training_mesh(degrees: Degrees, device_type: str) -> RankMesh:
    """The mesh of a training run: torch's pp, dp_replicate, dp_shard and tensor dimensions in the plan's order.

    It also has the mesh dimensions of generated code. Collective. A process that asks for the same mesh again gets the
    same groups, because every group costs threads and sockets.
    """
    shape = (degrees.pp, degrees.dp_replicate, degrees.dp_shard)
    return _training_mesh(shape, degrees.mesh, degrees.order, device_type, dist.group.WORLD)


@cache
def _training_mesh(shape: tuple[int, int, int], spec: Mesh, order: str, device_type: str, world: object) -> RankMesh:
    """The mesh of one world; `world` is the group of all its ranks."""
    tensor = tuple(spec.names[i] for i in spec.owning("parameters"))
    parts = {"pp": ("pp",), "dp": ("dp_replicate", "dp_shard"), "tp": tensor}
    names = tuple(name for part in order.split("-") for name in parts[part])
    sizes = dict(zip(("pp", *parts["dp"], *tensor), (*shape, *spec.degrees[1:]), strict=True))
    bounded = _bounded()  # a rank that hangs ends the others in time
    override: Any = dict.fromkeys(names, bounded) if bounded else None
    in_order = tuple(sizes[name] for name in names)
    every = init_device_mesh(device_type, in_order, mesh_dim_names=names, backend_override=override)
    device_mesh = every[(*parts["dp"], *tensor)]
    rank, lie = dist.get_rank(), strides(order, {"pp": shape[0], "dp": spec.degrees[0], "tp": prod(spec.degrees[1:])})
    dims = {}
    for index, (name, degree) in enumerate(zip(spec.names, spec.degrees, strict=True)):
        stride = lie["dp"] if name == "dp" else prod(spec.degrees[index + 1 :])
        mesh = device_mesh["dp_replicate", "dp_shard"]._flatten("dp", bounded) if name == "dp" else device_mesh[name]
        dims[name] = MeshDim(name, degree, mesh.get_group(), (rank // stride) % degree, stride)
    dims |= _joined(device_mesh, spec, rank, bounded)
    pipeline = None
    if shape[0] > 1:
        pipeline = MeshDim("pp", shape[0], every.get_group("pp"), rank // lie["pp"] % shape[0], lie["pp"])
    tensor_mesh = device_mesh[tensor] if prod(spec.degrees[1:]) > 1 else None
    return RankMesh(device_mesh, dims, spec, tensor_mesh, pipeline)


def group_of_stages(mesh: RankMesh, stage_ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The ranks of this rank's pipeline at some coordinates of it. Collective: every rank of the world asks for it."""
    assert mesh.pipeline is not None
    if len(stage_ranks) == mesh.pipeline.degree:
        return mesh.pipeline.group
    return _group_of_stages(stage_ranks, mesh.pipeline.stride, mesh.pipeline.degree, dist.group.WORLD)


@cache
def _group_of_stages(stage_ranks: tuple[int, ...], stride: int, degree: int, world: object) -> dist.ProcessGroup:
    """All ranks make all groups in the same order, as torch requires. A rank keeps the group that contains it."""
    firsts = [rank for rank in range(dist.get_world_size()) if rank // stride % degree == 0]
    every = [[first + k * stride for k in stage_ranks] for first in firsts]
    found: list[dist.ProcessGroup] = [dist.new_group(ranks, timeout=private.group_timeout()) for ranks in every]
    rank = dist.get_rank()
    return next((group for ranks, group in zip(every, found, strict=True) if rank in ranks), found[0])


def named_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1``; of many, the first.

    >>> named_ranks(range(3))
    'ranks 0, 1, 2'
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:16]]
    return f"ranks {', '.join(shown)}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
