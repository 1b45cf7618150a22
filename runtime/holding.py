"""Parameters that one program takes in another way than they are held.

A parameter is held as the training plan says, or whole where no block of it takes the parameter. A program captured
for another shape or mode takes most parameters so, and the others by one conversion when its code asks for them.
"""

import torch
from torch.distributed.tensor import Shard

from autopar.ir.program import ParameterInfo
from autopar.ir.sharding import Dims, I, Mesh, R
from autopar.runtime import conversions
from autopar.runtime.mesh import MeshDim
from autopar.runtime.parameters import Held, held

TENSOR = "tp"


def held_whole(info: ParameterInfo, mesh: Mesh) -> Held:
    """How a parameter is held that no block takes: whole on every rank."""
    sizes = tuple((size,) if size != 1 else () for size in info.shape)
    types = tuple(
        R if name == "dp" and degree > 1 else I for name, degree in zip(mesh.names, mesh.degrees, strict=True)
    )
    return held(info.name, Dims(sizes, sizes), types, mesh)


def is_same(one: Held, other: Held) -> bool:
    """Whether two ways of holding a parameter are one, however its dimensions are cut into axes."""
    kinds = [[t.kind for t in how.types] for how in (one, other)]
    return kinds[0] == kinds[1] and (not isinstance(one.placement, Shard) or _layout(one) == _layout(other))


def _layout(how: Held) -> tuple[object, ...]:
    return how.shape, how.placement, how.local_shape


def converted(value: torch.Tensor, how: Held, used: Held, mesh: Mesh, tensor: MeshDim) -> torch.Tensor:
    """The flat local value of a parameter that is held as `how`, as code that takes it as `used` wants it."""
    index = mesh.names.index(TENSOR)
    source, target = how.types[index].kind, used.types[index].kind
    if source == "S":
        assert isinstance(how.placement, Shard)
        local = value.reshape(_local(how, tensor.degree))
        gather = conversions.all_gather_to_replicate if target == "R" else conversions.all_gather_to_invariant
        value = gather(local, tensor, how.placement.dim).reshape(how.dims.shape)
        source = "R" if target == "R" else "I"
    if target == "S":
        assert isinstance(used.placement, Shard)
        cut = conversions.shard_of_replicate if source == "R" else conversions.shard_of_invariant
        value = cut(value.reshape(used.shape), tensor, used.placement.dim)
    elif (source, target) == ("I", "R"):
        value = conversions.invariant_to_replicate(value, tensor)
    elif (source, target) == ("R", "I"):
        value = conversions.replicate_to_invariant(value, tensor)
    return value.reshape(used.local_shape)


def _local(how: Held, degree: int) -> list[int]:
    shape = list(how.shape)
    assert isinstance(how.placement, Shard)
    shape[how.placement.dim] //= degree
    return shape
