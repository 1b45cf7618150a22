"""What a script meets: outputs as DTensors with global shapes, the loss of a step, refused autocast and moves.

torch's autograd runs the backward pass of a call's loss as one function, `_Backward`: it ends with the sums over ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.errors import RuntimeInputError
from autopar.ir.precision import is_low
from autopar.ir.sharding import Dims, R, Type, splits_samples
from autopar.runtime.distributed.mesh import RankMesh
from autopar.runtime.parameters.placement import converted, of_local

_DATA = ("dp_replicate", "dp_shard", "dp_samples")  # torch's names for the mesh dimension `dp`
_PLACED = "its device follows from the cluster: leave the move out, or call parallelize with another cluster"


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
            current[i] = R
    local = converted(local, dims, types, current, mesh)
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
    return of_local(local.contiguous(), mesh.value_mesh, placements, dims.shape)


def at_least_float32(loss: torch.Tensor) -> torch.Tensor:
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


def refuse_autocast(device_type: str) -> None:
    """Raise `RuntimeInputError` if autocast is on: the captured graph has the dtypes of its capture."""
    if torch.is_autocast_enabled(device_type):
        raise RuntimeInputError(
            f"torch.autocast is on for {device_type!r}, but the model was captured with fixed dtypes; leave it out. "
            "For lower precision pass plan={..., 'precision': 'bf16'}, or call parallelize under autocast: then the "
            "captured model has the casts of autocast"
        )


def refuse_move(
    device: torch.device, dtypes: Iterable[torch.dtype], move: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Raise `RuntimeInputError` if `move` would change the device or the dtype of a rank's parameters."""
    for dtype in dtypes:
        try:
            moved = move(torch.empty(0, device=device, dtype=dtype))
        except (AssertionError, RuntimeError) as error:  # such as a torch without CUDA
            raise RuntimeInputError(f"this rank's model stays on {device}: {error}; {_PLACED}") from None
        if moved.device != device:
            raise RuntimeInputError(f"this rank's model is on {device} and cannot move to {moved.device}; {_PLACED}")
        if moved.dtype != dtype:
            raise RuntimeInputError(
                f"this model has parameters of {dtype} and cannot change to {moved.dtype}; convert the model before "
                "parallelize, or name a precision in its plan"
            )


class _Backward(torch.autograd.Function):
    """The loss of a call, cut from its graph. Only gradients of that graph are summed, between `begin` and `end`."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, run: Callable[[torch.Tensor], None]) -> Any:
        ctx.run = run
        return loss.detach().view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.run(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
        return None, None, None


def with_backward(loss: torch.Tensor, begin: Callable[[], None], end: Callable[[], None]) -> torch.Tensor:
    """The loss with a backward pass that runs `begin` first, and `end` after all gradients of this rank."""

    def run(gradient: torch.Tensor) -> None:
        begin()
        with torch.enable_grad():
            loss.backward(gradient)
        end()

    anchor = torch.zeros((), requires_grad=True)
    out: torch.Tensor = _Backward.apply(anchor, loss.detach(), run)
    return out
