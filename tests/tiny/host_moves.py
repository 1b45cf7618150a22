"""The bytes that one rank moves between its device and its host in one step. Exact, as the memory of a step is.

optimizer      gradients go to the host once a step; parameters come to the device once before a step
parameters     every gather brings a shard to the device, every sum takes a shard of gradients to the host
               (`autopar.cost_model.dry_run.zero`)
activations    the tensors that offloaded calls save go to the host and come back, in every micro-batch
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_model.dry_run.ledger import Ledger
from autopar.cost_model.dry_run.memory import gradient_elements_bytes, trainable_bytes, trained
from autopar.cost_model.dry_run.rank_view import RankView
from autopar.cost_model.dry_run.stage_run import StageRun
from autopar.cost_model.dry_run.zero import groups_of, zero_step
from autopar.ir.offload import OPTIMIZER, PARAMETERS


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMoves:
    """Bytes of one rank in one `forward_backward`: of the device's own copies, and of FSDP2's."""

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    fsdp_to_host_bytes: int = 0
    fsdp_to_device_bytes: int = 0


def host_moves(setting: RankView, runs: Mapping[int, StageRun]) -> HostMoves:
    """What a rank moves in one step, from one micro-batch of each of its stages."""
    degrees = setting.plan.degrees
    times = degrees.num_micro_batches
    up = sum(run.fetched_bytes for run in runs.values()) * times
    down = sum(run.moved_bytes for run in runs.values()) * times
    if degrees.offloads(OPTIMIZER):
        up += trainable_bytes(setting)
        down += gradient_elements_bytes(setting, trained(setting, runs))
    if not degrees.offloads(PARAMETERS):
        return HostMoves(to_host_bytes=down, to_device_bytes=up)
    steps = [zero_step(setting, s, groups_of(setting, s, runs[s.index]), Ledger()) for s in setting.own_stages]
    return HostMoves(
        to_host_bytes=down,
        to_device_bytes=up,
        fsdp_to_host_bytes=sum(step.to_host_bytes for step in steps),
        fsdp_to_device_bytes=sum(step.to_device_bytes for step in steps),
    )
