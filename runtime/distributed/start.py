"""Before a rank captures: its device, its process group, and the models that are refused."""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from autopar._torch import private
from autopar.errors import ClusterError, InputError, PlanError
from autopar.ir.cluster import ClusterSpec

TIMEOUT_S = 300


def check_world(cluster: ClusterSpec) -> None:
    """Raise for a job of another number of ranks than the cluster's, or without its GPUs."""
    _refuse_missing_gpus(cluster)
    if difference := size_difference(cluster):
        raise PlanError(difference)


def size_difference(cluster: ClusterSpec) -> str:
    """How the number of this job's ranks differs from the cluster's devices. Empty if it does not."""
    size, wanted = int(os.environ.get("WORLD_SIZE", "1")), cluster.num_devices
    if dist.is_initialized():
        size = dist.get_world_size()
    start = f"start it with torchrun --nproc-per-node {wanted}, or describe a cluster of {size}"
    return "" if size == wanted else f"the cluster has {wanted} devices, this job {size} ranks; {start}"


def _refuse_missing_gpus(cluster: ClusterSpec) -> None:
    """Raise `ClusterError` for a cluster of GPUs on a machine that has none for this rank."""
    here, wanted = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0")) + 1
    if cluster.device_type == "cuda" and here < wanted:
        why = f"torch {torch.__version__} was built without CUDA" if torch.version.cuda is None else "see nvidia-smi"
        raise ClusterError(
            f"cluster {cluster.name} is of GPUs, and torch sees {here or 'none'} on this machine ({why}); train on the "
            "devices that are here, such as '2xcpu', or only plan for the cluster by autopar.plan"
        )


def start_process_group(cluster: ClusterSpec, *, timeout_s: float = TIMEOUT_S) -> torch.device:
    """Join the process group of this job if it has not been joined, and pick this rank's device."""
    _refuse_missing_gpus(cluster)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(cluster.device_type if cluster.device_type == "cpu" else f"cuda:{local_rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        if "RANK" in os.environ:
            dist.init_process_group(cluster.backend, timeout=timeout)
        else:
            dist.init_process_group(cluster.backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    return device


def refuse_hooks(model: nn.Module) -> None:
    """Raise `InputError` for hooks on gradients, which the generated code would never call."""
    hooks = private.backward_hooked(model)
    if hooks["module"]:
        raise InputError(
            f"backward hooks of module {_listed(hooks['module'])} would never be called: the generated code has no "
            "modules; remove them, and register hooks on the parameters of the ParallelModel"
        )
    if hooks["parameter"]:
        raise InputError(
            f"gradient hooks of parameter {_listed(hooks['parameter'])} would never be called; register them on "
            "parallel.named_parameters() after parallelize"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name or "the model itself") for name in names[:3]) + more
