"""How parameters are stored: local shards, as DTensors with global shapes over the tensor mesh dimensions.

If the split axis is not outermost in its dimension (GPT-2's packed ``(3 h e)``), the parameter is stored in *factored*
shape. ``(3, h·e, in)`` has a plain `Shard` on its own dimension. Exports restore names and flat shapes.

If the degree does not divide the axis, the parts are uneven, as in torch.distributed, and the axis has a dimension of
its own: 30 heads over 4 ranks are 8, 8, 8 and 6. A block pads its part with zeros. The padding's gradient is dropped,
so no optimizer, norm or checkpoint sees the padding.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar.ir.storage import Storage
from autopar.runtime.parameters.shards import pad_axis


def placements(storage: Storage, num_dims: int) -> tuple[Placement, ...]:
    """The placement on each of `num_dims` mesh dimensions. The last ones are the tensor mesh dimensions."""
    split = [Replicate() if split is None else Shard(split) for split in storage.splits]
    return (*[Replicate()] * (num_dims - len(split)), *split)


def make_parameter(
    storage: Storage,
    part: torch.Tensor,
    device_mesh: DeviceMesh | None,
    device: torch.device,
    *,
    requires_grad: bool,
) -> nn.Parameter:
    """A copy of this rank's flat part as a parameter: a DTensor over `device_mesh`, or plain without one."""
    local = part.to(device=device, copy=True).contiguous()
    if device_mesh is None:
        return nn.Parameter(local, requires_grad=requires_grad)
    local = local.reshape(storage.padded_shape)
    at = device_mesh.get_coordinate()
    assert at is not None
    at = at[device_mesh.ndim - len(storage.splits) :]
    for index, dim, size in storage.uneven():
        count = storage.shape[dim] - size * at[index]
        local = local.narrow(dim, 0, max(0, min(size, count)))
    if not local.is_contiguous() or storage.uneven():  # else the padding would be held too
        local = local.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(storage.shape, device="meta").stride()
    tensor = DTensor.from_local(
        local,
        device_mesh,
        placements(storage, device_mesh.ndim),
        run_check=False,
        shape=torch.Size(storage.shape),
        stride=stride,
    )
    return nn.Parameter(tensor, requires_grad=requires_grad)


def local_value(parameter: torch.Tensor, storage: Storage) -> torch.Tensor:
    """A parameter's flat local tensor in a block. The sum of a replicated parameter's gradient waits."""
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local(grad_placements=placements(storage, parameter.device_mesh.ndim))
        for _, dim, size in storage.uneven():
            parameter = pad_axis(parameter, dim, size)
    return parameter if parameter.shape == storage.local_shape else parameter.reshape(storage.local_shape)
