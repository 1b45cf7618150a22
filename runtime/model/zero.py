"""ZeRO as FSDP2 settings over segments.

| stage | mechanism                                                  | volume per step, P parameters, n micro-batches |
|-------|------------------------------------------------------------|--------------------------------------|
| 0     | replicated, one bucketed all-reduce                        | 2P                                   |
| 1     | keep gathered, gradient sync only on the last micro-batch  | 2P                                   |
| 2     | keep gathered, sync every micro-batch                      | (n+1)P                               |
| 3     | reshard after forward, regather in backward                | 3nP                                  |

Parameters that several segments share (tied weights) belong to the root, which is gathered once per micro-batch: of S
such elements stage 3 sends 2nS instead of 3nS. Pipeline schedules that split the backward pass gather parameters and
sum gradients once a step, whatever the stage (`autopar.runtime.model.pipeline`): they hold both whole meanwhile.

If a plan keeps parameters on the host, FSDP2 holds them for one data-parallel rank too, as in stage 3 and on a mesh of
one rank. Then each gather is a copy to the device, and each sum a copy to the host.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from autopar._torch import private
from autopar.ir.degrees import Degrees
from autopar.ir.offload import PARAMETERS
from autopar.ir.precision import compute_dtype
from autopar.ir.storage import Storage
from autopar.runtime.distributed.mesh import RankMesh

_Dims = Mapping[nn.Parameter, int | None]  # the dimension of a parameter to shard, None to leave it whole


def is_zero_sharded(parameter: torch.Tensor) -> bool:
    """Whether ZeRO holds a parameter; the gradients of the others are summed once a step."""
    if not isinstance(parameter, DTensor):
        return False
    named = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
    return any(name in _ZERO_DIMS and not placement.is_replicate() for name, placement in named)


def mesh_of(degrees: Degrees, mesh: RankMesh, storage: Storage, zero_dim: int | None) -> DeviceMesh | None:
    """The mesh of a new parameter, None for a plain tensor. FSDP2 adds the data-parallel dimensions where it shards."""
    if storage.is_of_experts:
        assert mesh.experts is not None
        return mesh.experts.tensor_mesh
    if zero_dim is not None or degrees.fsdp_stage == 0:
        return mesh.tensor_mesh
    tensor_dims = mesh.tensor_mesh.mesh_dim_names if mesh.tensor_mesh is not None else ()
    return mesh.device_mesh[(*_names(degrees), *(tensor_dims or ()))]


def shard(
    module: nn.Module,
    dims: _Dims,
    degrees: Degrees,
    mesh: RankMesh,
    *,
    root: bool = False,
    of_experts: bool = False,
) -> None:
    """Shard a segment's parameters over the data-parallel ranks; the root holds what several segments share."""
    stage = degrees.fsdp_stage_of_experts if of_experts else degrees.fsdp_stage
    if stage == 0:
        return
    whole = {p for p in module.parameters() if dims.get(p, 0) is None}
    if not root and all(p in whole for p in module.parameters()):
        return
    on_host = degrees.offloads(PARAMETERS)
    # generated code writes nothing in place, which is what FSDP2 warns of where a segment's output is a view
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    fully_shard(
        module,
        mesh=_zero_mesh(degrees, mesh, of_experts),
        # backward passes in two parts both need the stage's parameters
        reshard_after_forward=stage == 3 and not root and not degrees.splits_backward,
        shard_placement_fn=lambda p: Shard(dims[p] or 0),
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if on_host else OffloadPolicy(),
        ignored_params=whole,
        mp_policy=_mixed_precision(degrees),
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)  # the loss is divided by the global denominator already
    module.set_force_sum_reduction_for_comms(True)  # else float32 and bfloat16 use an operator that gloo lacks


def _mixed_precision(degrees: Degrees) -> MixedPrecisionPolicy:
    """What FSDP2 gathers and sums in. The master weights are float32, and float32 is summed if nothing else is said."""
    precision, summed = degrees.precision, degrees.reduce_dtype or ("fp32" if degrees.precision else None)
    return MixedPrecisionPolicy(
        param_dtype=None if precision is None else compute_dtype(precision),
        reduce_dtype=None if summed is None else compute_dtype(summed),
        cast_forward_inputs=False,
    )


_ZERO_DIMS = ("dp_shard", "dp_samples", "dp_experts")  # the mesh dimensions that ZeRO shards parameters over


def _zero_mesh(degrees: Degrees, mesh: RankMesh, of_experts: bool) -> DeviceMesh:
    """The mesh of the data-parallel ranks that hold the same parameters."""
    if not of_experts:
        return mesh.device_mesh[_names(degrees)]
    assert mesh.experts is not None
    every = mesh.experts.zero_mesh
    names = every.mesh_dim_names or ()
    return every if degrees.dp_replicate > 1 else every[names[-1]]


def _names(degrees: Degrees) -> tuple[str, ...]:
    return ("dp_replicate", "dp_shard") if degrees.dp_replicate > 1 else ("dp_shard",)


def is_gathered(module: nn.Module) -> bool:
    """Whether a module's parameters are gathered for its forward pass only."""
    return isinstance(module, FSDPModule)


def own_memory(values: Sequence[torch.Tensor], gathered: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The values, with copies of views of gathered parameters. FSDP2 frees the memory of these parameters."""
    freed = {parameter.untyped_storage().data_ptr() for parameter in gathered.values()}
    return tuple(v.clone() if v.untyped_storage().data_ptr() in freed else v for v in values)


def before_backward(model: nn.Module, degrees: Degrees, *, last: bool) -> None:
    """Set what FSDP2 does after the next backward pass. `set_is_last_backward` stays: False would prefetch too much."""
    for module in _sharded(model):
        module.set_reshard_after_backward(degrees.fsdp_stage == 3 or last, recurse=False)
        module.set_requires_gradient_sync(degrees.fsdp_stage >= 2 or last, recurse=False)


def sum_held_gradients(model: nn.Module) -> None:
    """Sum and shard the gradients of several backward passes, as FSDP2 does after the last, and free the parameters."""
    set_last(model, True)
    private.finish_fsdp_backward(model)


def set_last(model: nn.Module, is_last: bool) -> None:
    """Before the last backward pass parameters stay gathered and gradients whole, until `sum_held_gradients`."""
    for module in _sharded(model):
        module.set_is_last_backward(is_last)
        module.set_reshard_after_backward(is_last, recurse=False)
        module.set_requires_gradient_sync(is_last, recurse=False)


def free_gathered(model: nn.Module) -> None:
    """Shard what a forward pass without a backward pass has gathered: an optimizer knows the shards only."""
    for module in _sharded(model):
        module.reshard()


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
