"""How parameters are stored: local shards, as DTensors with global shapes over the tensor mesh dimensions.

If the split axis is not outermost in its dimension (GPT-2's packed ``(3 h e)``), the parameter is stored in *factored*
shape. ``(3, h·e, in)`` has a plain `Shard` on its own dimension. Exports restore names and flat shapes.

If the degree does not divide the axis, the parts are uneven, as in torch.distributed, and the axis has a dimension of
its own: 30 heads over 4 ranks are 8, 8, 8 and 6. A block pads its part with zeros. The padding's gradient is dropped,
so no optimizer, norm or checkpoint sees the padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar.ir.sharding import Dims, Mesh, Type, chunk
from autopar.ir.storage import Storage, storage_of
from autopar.runtime.parameters.shards import local_shard, pad_axis


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlacement:
    """How one parameter is stored.

    `shape` is the factored global shape. `placements` and `degrees` have one entry for each tensor mesh dimension.
    `local_shape` is the flat shape of a block's part, with padding. `deferred` names the mesh dimensions that sum the
    gradient once a step.
    """

    name: str
    dims: Dims
    types: tuple[Type, ...]
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    degrees: tuple[int, ...]
    local_shape: tuple[int, ...]
    deferred: tuple[str, ...]
    storage: Storage

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


def placement_of(name: str, dims: Dims, types: Sequence[Type], mesh: Mesh) -> ParameterPlacement:
    """How a parameter of the given storage types is held."""
    storage = storage_of(dims, types, mesh)
    return ParameterPlacement(
        name=name,
        dims=dims,
        types=tuple(types),
        shape=storage.shape,
        placements=tuple(Replicate() if split is None else Shard(split) for split in storage.splits),
        degrees=storage.degrees,
        local_shape=storage.local_shape,
        deferred=storage.deferred,
        storage=storage,
    )


def make_parameter(
    how: ParameterPlacement,
    whole: torch.Tensor,
    mesh: Mesh,
    coordinates: Sequence[int],
    tensor_mesh: DeviceMesh | None,
    device: torch.device,
    *,
    requires_grad: bool,
) -> nn.Parameter:
    """This rank's shard of a whole tensor as a parameter: a DTensor over `tensor_mesh`, or plain without one."""
    local = local_shard(whole.detach(), how.dims, how.types, mesh, coordinates)
    local = local.to(device=device, copy=True).contiguous()
    if tensor_mesh is None:
        return nn.Parameter(local, requires_grad=requires_grad)
    local = local.reshape(how.padded_shape)
    at = tensor_mesh.get_coordinate()
    assert at is not None
    for index, dim, size in how.uneven():
        own = how.shape[dim] - size * at[index]
        local = local.narrow(dim, 0, max(0, min(size, own)))
    if not local.is_contiguous() or how.uneven():  # else the padding would be held too
        local = local.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(how.shape, device="meta").stride()
    tensor = DTensor.from_local(
        local, tensor_mesh, how.placements, run_check=False, shape=torch.Size(how.shape), stride=stride
    )
    return nn.Parameter(tensor, requires_grad=requires_grad)


def local_value(parameter: torch.Tensor, how: ParameterPlacement) -> torch.Tensor:
    """The flat local tensor of a parameter inside a block.

    The cotangent of a replicated parameter is declared replicated even where it is partial: its sum is deferred to
    once a step (`autopar.runtime.model.gradients`), on the shards that ZeRO leaves.
    """
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local(grad_placements=how.placements)
        for _, dim, size in how.uneven():
            parameter = pad_axis(parameter, dim, size)
    return parameter if parameter.shape == how.local_shape else parameter.reshape(how.local_shape)
