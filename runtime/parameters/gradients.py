"""The sums of one step: gradients of replicated parameters, in buckets, and the gradient norm."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar._torch import private
from autopar.errors import RuntimeInputError
from autopar.ir.precision import as_float64
from autopar.ir.storage import buckets
from autopar.runtime.distributed.broadcast import gather_objects
from autopar.runtime.distributed.mesh import named_ranks


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a parameter's gradient."""
    return None if parameter.grad is None else private.local_part(parameter.grad)


Unsummed = Sequence[tuple[torch.Tensor, torch.Tensor, int]]  # parameters, their gradients, and versions of these


def marked(parameters: Iterable[torch.Tensor]) -> Unsummed:
    """Parameters with gradients whose sums over ranks wait."""
    pairs = ((p, local_gradient(p)) for p in parameters)
    return [(p, grad, grad._version) for p, grad in pairs if grad is not None]


def are_waiting(unsummed: Unsummed | None) -> bool:
    """Whether gradients wait for their sums. Raises `RuntimeInputError` if others were added to them."""
    for parameter, grad, version in unsummed or ():
        if (now := local_gradient(parameter)) is not None and (now is not grad or now._version != version):
            raise RuntimeInputError(
                "a term on parameters was added to the loss while gradients of earlier calls wait for their sums over "
                "ranks; leave out parallel.no_sync() in such a step"
            )
    return unsummed is not None


def sum_over(
    tensors: Sequence[tuple[torch.Tensor, torch.dtype]], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Sum tensors over a group in place, in buckets of their dtypes, from `device`. Ranks pass the same shapes."""
    for indices in buckets((t.numel() * dtype.itemsize, dtype) for t, dtype in tensors):
        bucket = [tensors[i][0] for i in indices]
        flat = torch.cat([t.reshape(-1) for t in bucket]).to(device, tensors[indices[0]][1])
        dist.all_reduce(flat, group=group)
        for tensor, piece in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(piece.view_as(tensor))


def num_copies(parameter: torch.Tensor, stage_size: int) -> int:
    """How many of the `stage_size` ranks that hold a pipeline stage hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return stage_size
    shards = 1
    for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        shards *= 1 if placement.is_replicate() else size  # FSDP2 makes strided shards too
    return stage_size // shards


def gradient_norm(
    parameters: Mapping[str, torch.Tensor],
    num_stage_ranks: Callable[[str], int],
    stage_size: int,
    device: torch.device,
) -> torch.Tensor:
    """2-norm of all gradients together, on every rank, by one all-reduce of a scalar in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, parameter in parameters.items():
        grad = local_gradient(parameter)
        if grad is not None and grad.numel():
            copies = num_copies(parameter, stage_size) * num_stage_ranks(name)
            total += as_float64(grad).abs().square().sum() / copies
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


def nonfinite_error(parameters: Mapping[str, torch.Tensor], names: Sequence[str], norm: float) -> RuntimeInputError:
    """The error of a gradient norm that is not finite, equal on all ranks. Collective."""
    local = [
        name
        for name, parameter in parameters.items()
        if (grad := local_gradient(parameter)) is not None and not bool(grad.isfinite().all())
    ]
    every = gather_objects(local) if dist.is_initialized() else [local]
    bad = {name for held in every for name in held}
    first = next((name for name in names if name in bad), None)
    if first is None:
        return RuntimeInputError(f"the gradient norm is {norm} though all gradients are finite; lower the loss scale")
    ranks = named_ranks([rank for rank, held in enumerate(every) if first in held])
    module = first.rpartition(".")[0] or "the model itself"
    more = f", and of {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    return RuntimeInputError(
        f"the gradient norm is {norm}: the gradient of {first!r} (module {module}) has NaN or infinite elements on "
        f"{ranks}{more}; look at the batch and the learning rate, or scale the loss with a scaler in float16"
    )
