"""How parameters are stored: local shards, as DTensors with global shapes over the tensor mesh dimensions.

If the split axis is not outermost in its dimension (GPT-2's packed ``(3 h e)``), the parameter is stored in *factored*
shape. ``(3, h·e, in)`` has a plain `Shard` on its own dimension. Exports restore names and flat shapes.

If the degree does not divide the axis, the parts are uneven, as in torch.distributed, and the axis has a dimension of
its own: 30 heads over 4 ranks are 8, 8, 8 and 6. A block pads its part with zeros. The padding's gradient is dropped,
so no optimizer, norm or checkpoint sees the padding.

FSDP2 gathers the parameters that ZeRO shards in the dtype of computing (`autopar.runtime.model.zero`). All others are
cast here. A copy of a master weight lasts for one step. Gradients are cast back, so they add up in float32.

A program that was captured for another shape or mode takes some parameters in another placement. They are converted
once, when its code needs them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar.ir.program import StateInfo
from autopar.ir.sharding import Dims, I, Mesh, R, Type, owned_by
from autopar.ir.storage import Storage, storage_of
from autopar.lowering.graph_writer import Converter
from autopar.runtime.distributed.mesh import RankMesh
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
    local = local[tuple(slice(size) for size in storage.own_shape(at[device_mesh.ndim - len(storage.splits) :]))]
    if not local.is_contiguous() or storage.uneven():  # else the padding would be held too
        local = local.clone(memory_format=torch.contiguous_format)
    tensor = of_local(local, device_mesh, placements(storage, device_mesh.ndim), storage.shape)
    return nn.Parameter(tensor, requires_grad=requires_grad)


def local_value(parameter: torch.Tensor, storage: Storage) -> torch.Tensor:
    """A parameter's flat local tensor in a block. The sum of a replicated parameter's gradient waits."""
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local(grad_placements=placements(storage, parameter.device_mesh.ndim))
    for _, dim, size in storage.uneven():
        parameter = pad_axis(parameter, dim, size)
    return parameter if parameter.shape == storage.local_shape else parameter.reshape(storage.local_shape)


def of_local(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """This rank's part of a value of a global shape, which the mesh need not divide."""
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


class _Cast(torch.autograd.Function):
    """The copy of a value that is cast already. Its gradient has the dtype of the value."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.dtype = value.dtype
        return copy.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None


class ComputeCopies:
    """The copies of one module's parameters. `dtypes` are the dtypes of computing by name."""

    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        self._dtypes = dtypes
        self.held: dict[str, torch.Tensor] = {}  # now, by name

    def of(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A parameter's local value in its dtype of computing."""
        dtype = self._dtypes[name]
        if value.dtype == dtype:
            return value
        if name not in self.held:
            self.held[name] = value.detach().to(dtype)
        cast: torch.Tensor = _Cast.apply(value, self.held[name])
        return cast

    def clear(self) -> None:
        """Forget the copies. Graphs of autograd keep what they need."""
        self.held.clear()


# Parameters that a program takes in another placement than they are stored in.


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
    splitting = {*mesh.spec.owning("experts"), *mesh.spec.owning("parameters")}
    is_same = _layout(storage) == _layout(used)
    whole, begun, ended = list[Type](), list[Type](), list[Type]()  # types after gathers, and before and after cuts
    for i, (now, then) in enumerate(zip(storage.types, used.types, strict=True)):
        stays = i not in splitting or (is_same and now.kind == then.kind == "S")
        gathered = I if then.kind == "I" else R
        whole.append(now if stays or now.kind != "S" else gathered)
        begun.append(then if stays and i in splitting else whole[-1])
        ended.append(then if i in splitting else now)
    value = converted(value, storage.dims, storage.types, whole, mesh)
    return converted(value, used.dims, begun, ended, mesh).reshape(used.local_shape)


def converted(
    value: torch.Tensor, dims: Dims, source: Sequence[Type], target: Sequence[Type], mesh: RankMesh
) -> torch.Tensor:
    """A local value of some types in other types. Collective."""
    converter = Converter(mesh.spec, mesh.dims.__getitem__, lambda function, arguments, *_: function(*arguments))
    out: torch.Tensor = converter.convert(value, dims, tuple(source), tuple(target))
    return out
