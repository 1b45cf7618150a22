"""Parameters as they are held: local shards of one tensor dimension, DTensors with global shapes.

A parameter whose split axis is not outermost in its dimension (GPT-2's packed ``(3 h e)``) is held in *factored*
shape, ``(3, h·e, in)`` with a plain `Shard` on its own dimension; names and flat shapes are restored at export.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar.ir.sharding import Dims, Mesh, Type
from autopar.runtime.layout import part


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """How one parameter is held: its types, factored global shape, placement on `tp`, and flat local shape."""

    name: str
    dims: Dims
    types: tuple[Type, ...]
    shape: tuple[int, ...]
    placement: Placement
    local_shape: tuple[int, ...]
    deferred: tuple[str, ...]

    @property
    def is_factored(self) -> bool:
        return self.shape != self.dims.shape


def held(name: str, dims: Dims, types: Sequence[Type], mesh: Mesh) -> Held:
    """How a parameter of the given storage types is held; `deferred` names mesh dimensions that sum its gradient."""
    kind = types[mesh.names.index("tp")]
    shape = list(dims.shape)
    placement: Placement = Replicate()
    if kind.kind == "S":
        placement = Shard(kind.dim)
        if kind.position:
            sizes = dims.sizes[kind.dim]
            shape[kind.dim : kind.dim + 1] = [prod(sizes[: kind.position]), prod(sizes[kind.position :])]
            placement = Shard(kind.dim + 1)
    local = dims.local_shape(types, mesh.degrees)
    degrees = zip(mesh.names, types, mesh.degrees, strict=True)
    deferred = tuple(n for n, t, degree in degrees if t.kind == "R" and degree > 1)
    return Held(
        name=name,
        dims=dims,
        types=tuple(types),
        shape=tuple(shape),
        placement=placement,
        local_shape=local,
        deferred=deferred,
    )


def make_parameter(
    how: Held,
    whole: torch.Tensor,
    mesh: Mesh,
    coordinates: Sequence[int],
    tp_mesh: DeviceMesh | None,
    device: torch.device,
    *,
    requires_grad: bool,
) -> nn.Parameter:
    """This rank's shard of a whole tensor as a parameter: a DTensor over `tp_mesh`, or plain without one."""
    local = part(whole.detach(), how.dims, how.types, mesh, coordinates)
    local = local.to(device=device, copy=True).contiguous()
    if tp_mesh is None:
        return nn.Parameter(local, requires_grad=requires_grad)
    shape = list(how.shape)
    if isinstance(how.placement, Shard):
        shape[how.placement.dim] //= tp_mesh.size()
    stride = torch.empty(how.shape, device="meta").stride()
    tensor = DTensor.from_local(
        local.reshape(shape), tp_mesh, [how.placement], run_check=False, shape=torch.Size(how.shape), stride=stride
    )
    return nn.Parameter(tensor, requires_grad=requires_grad)


def local_value(parameter: torch.Tensor, how: Held) -> torch.Tensor:
    """The flat local tensor of a parameter inside a block.

    The cotangent of a replicated parameter is declared replicated even where it is partial: its sum is deferred to
    once a step (`autopar.runtime.gradients`), on the shards that ZeRO leaves.
    """
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local(grad_placements=[how.placement])
    return parameter if parameter.shape == how.local_shape else parameter.reshape(how.local_shape)


def zero_dim(parameter: nn.Parameter, num_ranks: int) -> int:
    """The dimension ZeRO shards: 0 where its ranks divide it, else another that they divide, else 0, padded.

    Another dimension than 0 must not be the one `tp` shards: FSDP2's strided shards are right on dimension 0 only.
    """
    taken: set[int] = set()
    shape = parameter.shape
    if isinstance(parameter, DTensor):
        shape = parameter.to_local().shape
        taken = {p.dim for p in parameter.placements if isinstance(p, Shard)}
    free = [d for d, size in enumerate(shape) if size % num_ranks == 0 and size and (d == 0 or d not in taken)]
    return free[0] if free else 0
