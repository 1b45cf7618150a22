"""Parameters as they are held: local shards, DTensors with global shapes over the tensor mesh dimensions.

A parameter whose split axis is not outermost in its dimension (GPT-2's packed ``(3 h e)``) is held in *factored*
shape, ``(3, h·e, in)`` with a plain `Shard` on its own dimension; names and flat shapes are restored at export.

Where the degree does not divide the axis, the parts are uneven, as torch.distributed has them, and the axis has a
dimension of its own: 30 heads over 4 ranks are 8, 8, 8 and 6. A block pads its part with zeros; what flows back to the
padding is dropped, so no optimizer, norm or checkpoint ever sees it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar.ir.sharding import DATA, Dims, Mesh, Type, chunk
from autopar.runtime.layout import padded, part


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """How one parameter is held.

    `shape` is its factored global shape, `placements` and `degrees` are those of the tensor mesh dimensions (all but
    `dp`), `local_shape` is the flat shape of a block's part, padding included. `deferred` names mesh dimensions that
    sum its gradient once a step.
    """

    name: str
    dims: Dims
    types: tuple[Type, ...]
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    degrees: tuple[int, ...]
    local_shape: tuple[int, ...]
    deferred: tuple[str, ...]

    @property
    def is_factored(self) -> bool:
        return self.shape != self.dims.shape

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The factored shape of one rank's part, padding included."""
        shape = list(self.shape)
        for placement, degree in zip(self.placements, self.degrees, strict=True):
            if isinstance(placement, Shard):
                shape[placement.dim] = chunk(shape[placement.dim], degree)
        return tuple(shape)

    def uneven(self) -> list[tuple[int, int, int]]:
        """Tensor mesh dimension, dimension and part size of every uneven shard."""
        return [
            (index, p.dim, chunk(self.shape[p.dim], degree))
            for index, (p, degree) in enumerate(zip(self.placements, self.degrees, strict=True))
            if isinstance(p, Shard) and self.shape[p.dim] % degree
        ]


def held(name: str, dims: Dims, types: Sequence[Type], mesh: Mesh) -> Held:
    """How a parameter of the given storage types is held."""
    tensor = [(t, d) for n, t, d in zip(mesh.names, types, mesh.degrees, strict=True) if n != DATA]
    cuts: list[set[int]] = [set() for _ in dims.sizes]
    for t, degree in tensor:
        if t.kind == "S":
            sizes = dims.sizes[t.dim]
            cuts[t.dim] |= {t.position, t.position + 1} if sizes[t.position] % degree else {t.position}
    shape: list[int] = []
    begins: list[dict[int, int]] = []  # per dimension: position of an axis -> the factored dimension it begins
    for sizes, positions in zip(dims.sizes, cuts, strict=True):
        edges = sorted({0, *(p for p in positions if p < len(sizes))})
        begins.append({edge: len(shape) + k for k, edge in enumerate(edges)})
        shape += [prod(sizes[a:b]) for a, b in pairwise([*edges, len(sizes)])]
    degrees = zip(mesh.names, types, mesh.degrees, strict=True)
    return Held(
        name=name,
        dims=dims,
        types=tuple(types),
        shape=tuple(shape),
        placements=tuple(Shard(begins[t.dim][t.position]) if t.kind == "S" else Replicate() for t, _ in tensor),
        degrees=tuple(degree for _, degree in tensor),
        local_shape=dims.local_shape(types, mesh.degrees),
        deferred=tuple(n for n, t, degree in degrees if t.kind == "R" and degree > 1),
    )


def make_parameter(
    how: Held,
    whole: torch.Tensor,
    mesh: Mesh,
    coordinates: Sequence[int],
    tensor_mesh: DeviceMesh | None,
    device: torch.device,
    *,
    requires_grad: bool,
) -> nn.Parameter:
    """This rank's shard of a whole tensor as a parameter: a DTensor over `tensor_mesh`, or plain without one."""
    local = part(whole.detach(), how.dims, how.types, mesh, coordinates)
    local = local.to(device=device, copy=True).contiguous()
    if tensor_mesh is None:
        return nn.Parameter(local, requires_grad=requires_grad)
    local = local.reshape(how.padded_shape)
    at = tensor_mesh.get_coordinate()
    assert at is not None
    for index, dim, size in how.uneven():
        own = how.shape[dim] - size * at[index]
        local = local.narrow(dim, 0, max(0, min(size, own))).contiguous()
    stride = torch.empty(how.shape, device="meta").stride()
    tensor = DTensor.from_local(
        local, tensor_mesh, how.placements, run_check=False, shape=torch.Size(how.shape), stride=stride
    )
    return nn.Parameter(tensor, requires_grad=requires_grad)


def local_value(parameter: torch.Tensor, how: Held) -> torch.Tensor:
    """The flat local tensor of a parameter inside a block.

    The cotangent of a replicated parameter is declared replicated even where it is partial: its sum is deferred to
    once a step (`autopar.runtime.gradients`), on the shards that ZeRO leaves.
    """
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local(grad_placements=how.placements)
        for _, dim, size in how.uneven():
            parameter = padded(parameter, dim, size)
    return parameter if parameter.shape == how.local_shape else parameter.reshape(how.local_shape)


def zero_dim(how: Held, num_ranks: int) -> int | None:
    """The dimension of the factored shape that ZeRO shards: the first that its ranks divide, else 0, padded.

    FSDP2 takes uneven parts of dimension 0 only, and combines with another shard of one dimension where that
    dimension is 0 and that shard even. None where nothing is left: such a parameter stays whole on data-parallel ranks.
    """
    sizes: list[int] = list(how.shape) if prod(how.shape) else []
    for placement, degree in zip(how.placements, how.degrees, strict=True):
        if sizes and isinstance(placement, Shard) and degree > 1:
            even_first = placement.dim == 0 and how.shape[0] % degree == 0
            sizes[placement.dim] = sizes[placement.dim] // degree if even_first else 0
    fitting = [d for d, size in enumerate(sizes) if size and size % num_ranks == 0]
    if fitting:
        return fitting[0]
    return 0 if sizes and sizes[0] else None
