"""Which part of a value a rank holds, and how parts make the whole again."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch

from autopar.ir.sharding import Dims, Mesh, Type, chunk


def coordinates(mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """Coordinates of every rank, in rank order."""
    return product(*(range(degree) for degree in mesh.degrees))


def local_shard(value: torch.Tensor, dims: Dims, types: Sequence[Type], mesh: Mesh, at: Sequence[int]) -> torch.Tensor:
    """The part of a whole value that the rank at the given coordinates holds; partial values lie on coordinate 0."""
    out = value
    for kind, coordinate in zip(types, at, strict=True):
        if kind.kind == "P" and coordinate:
            out = torch.zeros_like(out)
    flat = [size for dim in dims.sizes for size in dim]
    out = out.reshape(flat)
    for kind, degree, coordinate in zip(types, mesh.degrees, at, strict=True):
        if kind.kind == "S":
            index = dims.axis_index(kind)
            size = chunk(out.shape[index], degree)
            start = min(coordinate * size, out.shape[index])
            count = min(size, out.shape[index] - start)
            out = pad_axis(out.narrow(index, start, count), index, size)
    return out.reshape(dims.local_shape(types, mesh.degrees))


def pad_axis(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The value with zeros behind dimension `dim`, up to `size`."""
    missing = size - value.shape[dim]
    if not missing:
        return value
    pads = [0, 0] * (value.dim() - 1 - dim) + [0, missing]
    out: torch.Tensor = torch.ops.aten.constant_pad_nd.default(value, pads)
    return out


def all_shards(value: torch.Tensor, dims: Dims, types: Sequence[Type], mesh: Mesh) -> list[torch.Tensor]:
    """The part of every rank, in rank order."""
    return [local_shard(value, dims, types, mesh, at) for at in coordinates(mesh)]


def assemble(
    held: Sequence[torch.Tensor],
    dims: Dims,
    types: Sequence[Type],
    mesh: Mesh,
    *,
    cotangent: bool = False,
    difference_of: Callable[[torch.Tensor, torch.Tensor], float] | None = None,
) -> tuple[torch.Tensor, float]:
    """The whole value of all ranks' shards, and the largest difference among copies that must be equal."""
    sums = {"R"} if cotangent else {"P"}
    compare = difference_of or largest_difference
    sizes = dims.local_sizes(types, mesh.degrees)
    grid = [p.reshape([s for dim in sizes for s in dim]) for p in held]
    difference = 0.0
    for kind, degree in reversed(list(zip(types, mesh.degrees, strict=True))):
        merged = []
        for start in range(0, len(grid), degree):
            group = grid[start : start + degree]
            if kind.kind == "S":
                index = dims.axis_index(kind)
                merged.append(torch.cat(group, index).narrow(index, 0, dims.sizes[kind.dim][kind.position]))
            elif kind.kind in sums:
                merged.append(torch.stack(group).sum(0, dtype=group[0].dtype))
            else:
                difference = max([difference, *(compare(other, group[0]) for other in group[1:])])
                merged.append(group[0])
        grid = merged
    return grid[0].reshape(dims.shape), difference


def largest_difference(value: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference of two floating tensors; of other tensors infinite, unless they are equal."""
    if value.dtype.is_floating_point:
        return float((value - other).abs().max()) if value.numel() else 0.0
    return 0.0 if torch.equal(value, other) else float("inf")
