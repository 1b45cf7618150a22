"""The results that leave the model: outputs as DTensors with global shapes, and the loss of a step."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.errors import RuntimeInputError
from autopar.ir.precision import is_low
from autopar.ir.sharding import Dims, R, Type, splits_samples
from autopar.runtime.distributed.mesh import RankMesh
from autopar.runtime.parameters.relayout import gathered

_DATA = ("dp_replicate", "dp_shard", "dp_samples")  # torch's names for the mesh dimension `dp`


def as_dtensor(local: torch.Tensor, dims: Dims, types: Sequence[Type], mesh: RankMesh) -> torch.Tensor:
    """A rank's part of a value as a DTensor. Collective: shards that `Shard` cannot state are gathered first."""
    current = list(types)
    for i, t in enumerate(types):
        if t.kind != "S":
            continue
        sizes = dims.sizes[t.dim]
        is_first = t.position == 0 or (
            splits_samples(mesh.spec.names[i]) and dims.is_outermost(t, types, mesh.spec.degrees)
        )
        if not is_first or (sizes[0] % mesh.spec.degrees[i] and len(sizes) > 1 and t.position == 0):
            local = gathered(local, dims, current, i, R, mesh)
            current[i] = R
    by_name = dict(zip(mesh.spec.names, current, strict=True))
    names = mesh.value_mesh.mesh_dim_names or ()
    kinds = [by_name["dp" if name in _DATA else name] for name in names]
    for kind, coordinate, degree in zip(
        kinds, mesh.value_mesh.get_coordinate() or (), mesh.value_mesh.shape, strict=True
    ):
        if kind.kind == "S" and dims.shape[kind.dim] % degree:  # the last ranks hold padding
            size = local.shape[kind.dim]
            local = local.narrow(kind.dim, 0, max(0, min(size, dims.shape[kind.dim] - size * coordinate)))
    placements = [Shard(kind.dim) if kind.kind == "S" else Replicate() for kind in kinds]
    stride = torch.empty(dims.shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(),
        mesh.value_mesh,
        placements,
        run_check=False,
        shape=torch.Size(dims.shape),
        stride=stride,
    )


def wide(loss: torch.Tensor) -> torch.Tensor:
    """A loss in at least float32: losses of micro-batches add up, and a scale may make them large."""
    return loss.float() if is_low(loss.dtype) else loss


class StepLoss(torch.Tensor):
    """The loss of a step whose backward pass has run. Values that are computed from it are `StepLoss`es too."""

    def backward(self, *_: object, **__: object) -> None:
        """Raise: the gradients are there already."""
        raise RuntimeInputError(
            "forward_backward has run the backward pass, and the gradients are summed over all ranks; leave backward() "
            "out. For float16, pass scaler=... to forward_backward. With bfloat16 no GradScaler is needed"
        )


def step_loss(value: torch.Tensor) -> torch.Tensor:
    """The loss that `forward_backward` returns."""
    return value.detach().as_subclass(StepLoss)


def refuse_autocast(device_type: str) -> None:
    """Raise `RuntimeInputError` if autocast is on: the captured graph has the dtypes of its capture."""
    if torch.is_autocast_enabled(device_type):
        raise RuntimeInputError(
            f"torch.autocast is on for {device_type!r}, but the model was captured with fixed dtypes; leave it out. "
            "For lower precision pass plan={..., 'precision': 'bf16'}, or call parallelize under autocast: then the "
            "captured model has the casts of autocast"
        )
