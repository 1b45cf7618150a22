"""ZeRO as FSDP2 settings over segments (design section 5).

| stage | mechanism                                                  | volume per step, P parameters, n micro-batches |
|-------|------------------------------------------------------------|--------------------------------------|
| 0     | replicated, one bucketed all-reduce                        | 2P                                   |
| 1     | keep gathered, gradient sync only on the last micro-batch  | 2P                                   |
| 2     | keep gathered, sync every micro-batch                      | (n+1)P                               |
| 3     | reshard after forward, regather in backward                | 3nP                                  |

Parameters that several segments share (tied weights) belong to the root, which is gathered once per micro-batch: of S
such elements stage 3 sends 2nS instead of 3nS.
"""

import warnings
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from autopar.ir.plan import Degrees
from autopar.runtime.mesh import RankMesh

Dims = Mapping[nn.Parameter, int | None]  # the dimension of a parameter to shard, None to leave it whole


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether ZeRO holds a parameter; the gradients of the others are summed once a step."""
    return isinstance(parameter, DTensor) and "dp_shard" in (parameter.device_mesh.mesh_dim_names or ())


def shard(module: nn.Module, dims: Dims, degrees: Degrees, mesh: RankMesh, *, root: bool = False) -> None:
    """Shard a segment's parameters over the data-parallel ranks; the root holds what several segments share."""
    if degrees.zero == 0 or degrees.dp == 1:
        return
    whole = {p for p in module.parameters() if dims.get(p, 0) is None}
    if not root and all(p in whole for p in module.parameters()):
        return
    names = ("dp_replicate", "dp_shard") if degrees.dp_replicate > 1 else ("dp_shard",)
    # generated code writes nothing in place, which is what FSDP2 warns of where a segment's output is a view
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    fully_shard(
        module,
        mesh=mesh.device_mesh[names],
        reshard_after_forward=degrees.zero == 3 and not root,
        shard_placement_fn=lambda p: Shard(dims[p] or 0),
        ignored_params=whole,
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)  # the loss is divided by the global denominator already
    module.set_force_sum_reduction_for_comms(True)  # else float32 and bfloat16 use an operator that gloo lacks


def before_micro_batch(model: nn.Module, degrees: Degrees, *, last: bool) -> None:
    """Set what FSDP2 does after this micro-batch's backward.

    `set_is_last_backward` stays at its default: with False for earlier micro-batches FSDP2 keeps the order of their
    forward passes, and at the end of the next backward prefetches a segment that nobody needs.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_reshard_after_backward(degrees.zero == 3 or last)
    model.set_requires_gradient_sync(degrees.zero >= 2 or last)
