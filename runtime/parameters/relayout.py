"""The conversion of parameters for a program that takes them in another placement than they are stored in.

A parameter is stored as the training plan says, or whole if no block takes it. A program captured for another shape or
mode takes most parameters in this placement. The others are converted once, when its code needs them.
"""

from collections.abc import Sequence

import torch

from autopar.ir.program import StateInfo
from autopar.ir.sharding import Dims, I, Mesh, R, Type, chunk, owned_by
from autopar.ir.storage import Storage, storage_of
from autopar.lowering.functions import CONVERT
from autopar.runtime.distributed.mesh import RankMesh
from autopar.runtime.parameters.shards import pad_axis


def whole_placement(info: StateInfo, mesh: Mesh) -> Storage:
    """How a parameter is held that no block takes: whole on every rank."""
    sizes = tuple((size,) if size != 1 else () for size in info.shape)
    data = [i for i, name in enumerate(mesh.names) if owned_by(name) != "parameters" and mesh.degrees[i] > 1]
    types = tuple(R if i in data else I for i in range(len(mesh.names)))
    return storage_of(Dims(sizes, sizes), types, mesh)


def same_layout(first: Storage, other: Storage) -> bool:
    """Whether two ways of holding a parameter are one, however its dimensions are cut into axes."""
    kinds = [[t.kind for t in storage.types] for storage in (first, other)]
    return kinds[0] == kinds[1] and ("S" not in kinds[0] or _layout(first) == _layout(other))


def _layout(storage: Storage) -> tuple[object, ...]:
    return storage.shape, storage.splits, storage.local_shape


def relayout(value: torch.Tensor, storage: Storage, used: Storage, mesh: RankMesh) -> torch.Tensor:
    """Convert the flat local value of a parameter from the placement `storage` to the placement `used`."""
    current = list(storage.types)
    tensor = [*mesh.spec.owning("experts"), *mesh.spec.owning("parameters")]
    is_same = _layout(storage) == _layout(used)
    for i in tensor:
        if current[i].kind == "S" and not (is_same and used.types[i].kind == "S"):
            kind = I if used.types[i].kind == "I" else R
            value = gathered(value, storage.dims, current, i, kind, mesh)
            current[i] = kind
    for i in tensor:
        dim, pair = mesh.dims[mesh.spec.names[i]], (current[i].kind, used.types[i].kind)
        if pair in (("I", "R"), ("R", "I")):
            value = CONVERT[pair](value, dim)
    for i in tensor:
        if used.types[i].kind == "S" and current[i].kind != "S":
            value = _cut(value, used.dims, used.types, current, i, mesh)
            current[i] = used.types[i]
    return value.reshape(used.local_shape)


def gathered(
    value: torch.Tensor, dims: Dims, types: Sequence[Type], i: int, kind: Type, mesh: RankMesh
) -> torch.Tensor:
    """A local value with the shard on mesh dimension `i` gathered."""
    t, dim = types[i], mesh.dims[mesh.spec.names[i]]
    axis, flat = dims.axis_index(t), _by_axes(value, dims, types, mesh)
    whole = CONVERT["S", kind.kind](flat, dim, axis).narrow(axis, 0, dims.sizes[t.dim][t.position])
    after = [kind if j == i else other for j, other in enumerate(types)]
    return whole.reshape(dims.local_shape(after, mesh.spec.degrees))


def _cut(
    value: torch.Tensor, dims: Dims, wanted: Sequence[Type], types: Sequence[Type], i: int, mesh: RankMesh
) -> torch.Tensor:
    """A local value cut on mesh dimension `i` as `wanted`; shards of `types` are those of `wanted` already."""
    t, dim = wanted[i], mesh.dims[mesh.spec.names[i]]
    axis, flat = dims.axis_index(t), _by_axes(value, dims, types, mesh)
    part = chunk(dims.sizes[t.dim][t.position], dim.degree)
    out = CONVERT[types[i].kind, "S"](pad_axis(flat, axis, part * dim.degree), dim, axis)
    after = [t if j == i else other for j, other in enumerate(types)]
    return out.reshape(dims.local_shape(after, mesh.spec.degrees))


def _by_axes(value: torch.Tensor, dims: Dims, types: Sequence[Type], mesh: RankMesh) -> torch.Tensor:
    """A local value with a dimension for each axis."""
    return value.reshape([size for sizes in dims.local_sizes(types, mesh.spec.degrees) for size in sizes])
