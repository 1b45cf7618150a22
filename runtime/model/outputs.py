"""Outputs of an evaluation as DTensors with global shapes."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.ir.sharding import Dims, R, Type
from autopar.runtime.distributed.mesh import RankMesh
from autopar.runtime.parameters.relayout import gathered

_DATA = ("dp_replicate", "dp_shard")  # torch's names for the mesh dimension `dp`


def as_dtensor(local: torch.Tensor, dims: Dims, types: Sequence[Type], mesh: RankMesh) -> torch.Tensor:
    """A rank's part of a value as a DTensor. Collective: shards that `Shard` cannot state are gathered first."""
    current = list(types)
    for i, t in enumerate(types):
        if t.kind != "S":
            continue
        sizes = dims.sizes[t.dim]
        if t.position or (sizes[0] % mesh.spec.degrees[i] and len(sizes) > 1):
            local = gathered(local, dims, current, i, R, mesh)
            current[i] = R
    by_name = dict(zip(mesh.spec.names, current, strict=True))
    names = mesh.device_mesh.mesh_dim_names or ()
    kinds = [by_name["dp" if name in _DATA else name] for name in names]
    for kind, coordinate, degree in zip(
        kinds, mesh.device_mesh.get_coordinate() or (), mesh.device_mesh.shape, strict=True
    ):
        if kind.kind == "S" and dims.shape[kind.dim] % degree:  # the last ranks hold padding
            size = local.shape[kind.dim]
            local = local.narrow(kind.dim, 0, max(0, min(size, dims.shape[kind.dim] - size * coordinate)))
    placements = [Shard(kind.dim) if kind.kind == "S" else Replicate() for kind in kinds]
    stride = torch.empty(dims.shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(),
        mesh.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(dims.shape),
        stride=stride,
    )
