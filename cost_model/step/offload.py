"""Seconds and host memory of a plan that keeps values on the host (`autopar.ir.offload`), as the runtime moves them.

    optimizer      gradients go down once a step, behind the backward pass. The host updates. Values come up before the
                   next forward pass. Nothing runs beside these three
    parameters     FSDP2 copies a shard up ahead of its gather: beside computing. It copies the gradients of the first
                   micro-batch down beside computing, and waits for the copies and sums of the other micro-batches
    activations    saved tensors go down beside the forward pass. A backward pass waits for its own tensors

A copy takes its bytes over the link's rate in one direction. The update is bound by the host's memory: it reads the
gradient, and reads and writes weight and state (Ren et al. 2021, "ZeRO-Offload: Democratizing billion-scale model
training", section 4.1; their one-step delay is not assumed, because it changes the training). Figures of a host are
from data sheets.
"""

from typing import TYPE_CHECKING

import numpy as np

from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.ir.arrays import Floats
from autopar.ir.device import HostShare
from autopar.ir.offload import ACTIVATIONS, NO_OFFLOAD, OPTIMIZER, PARAMETERS, parts_of_offload

if TYPE_CHECKING:
    from autopar.cost_model.machine.engine import Engine
    from autopar.cost_model.machine.machine import Machine
    from autopar.cost_model.step.context import Basis, Passes
    from autopar.cost_model.step.rank_parameters import RankParameters

ASSUMED_LINK_BYTES_PER_S = 16e9  # of a host without figures: PCIe 3.0 x16 (PCI-SIG), and as much for its memory


def is_on_host(engine: "Engine", part: str) -> bool:
    """Whether a part of `autopar.ir.offload` is on the host."""
    return part in parts_of_offload(engine.offload)


def host_of(machine: "Machine") -> HostShare:
    """The host's figures, or assumed ones (`host_assumption`)."""
    if machine.host is not None:
        return machine.host
    rate = ASSUMED_LINK_BYTES_PER_S
    return HostShare(link_bytes_per_s=rate, memory_bytes=np.inf, memory_bytes_per_s=rate)


def host_assumption(machine: "Machine") -> str | None:
    """What is assumed of the host of an offloading plan; None if its figures are known or not needed."""
    if machine.engine.offload == NO_OFFLOAD or machine.host is not None:
        return None
    return (
        f"the host of {machine.device.name} is unknown: its link and memory are assumed to move "
        f"{ASSUMED_LINK_BYTES_PER_S / 1e9:.0f} GB/s, and to have room for everything"
    )


def can_offload(engine: "Engine", layouts: Layouts) -> Floats:
    """Whether layouts can run. FSDP2 holds the parameters of one data-parallel rank, or shards of ZeRO 1 to 3."""
    if is_on_host(engine, PARAMETERS):
        return np.asarray((layouts.data_ranks <= 1) | (layouts.zero >= 1))
    return np.asarray(layouts.pp >= 1)


def fsdp_stage(layouts: Layouts, engine: "Engine") -> Floats:
    """The ZeRO stage that FSDP2 runs. One data-parallel rank runs none, or stage 3 with its parameters on the host."""
    return np.where(layouts.data_ranks > 1, layouts.zero, 3 if is_on_host(engine, PARAMETERS) else 0)


def host_bytes(
    engine: "Engine", shape: Shape, trained: float, frozen: float, saved: Floats | float, layouts: Layouts
) -> Floats:
    """Bytes of host memory for one device, as the mean over ranks. A model has `trained` and `frozen` parameters."""
    total = np.zeros(1)
    if is_on_host(engine, OPTIMIZER) or is_on_host(engine, PARAMETERS):
        divided = np.where(layouts.zero >= 1, layouts.shard, 1.0)
        of_parameter = 2 * shape.stored_bytes + shape.moment_bytes  # stored value, gradient, and the optimizer's state
        of_all = of_parameter * trained + is_on_host(engine, PARAMETERS) * shape.element_bytes * frozen
        total = total + of_all / (layouts.tp * layouts.pp * divided)
    if is_on_host(engine, ACTIVATIONS):
        flight = np.where(layouts.pp > 1, layouts.micro_batches, 1)
        total = total + flight * shape.blocks / layouts.pp * saved
    return np.asarray(total)


def host_seconds(
    basis: "Basis", layouts: Layouts, parameters: "RankParameters", mean: "Passes", blocks: Floats, saved: Floats
) -> tuple[Floats, Floats | None]:
    """Seconds of a step in which the device waits for copies, and for the update on the host; None: it updates."""
    engine, host, n = basis.machine.engine, host_of(basis.machine), layouts.micro_batches
    if engine.offload == NO_OFFLOAD:
        return np.zeros(1), None
    size, elements = basis.shape.stored_bytes, parameters.trained.sharded(layouts, 1)
    one_way = size * elements / host.link_bytes_per_s
    frozen_up = basis.shape.element_bytes * parameters.frozen.sharded(layouts, 1) / host.link_bytes_per_s
    beside = 0.0 if basis.machine.speeds.in_one_thread else blocks  # on a CPU a copy takes the cores of the computation
    forward, backward = beside * mean.forward, beside * mean.backward
    copies, update = np.zeros(1), None
    if is_on_host(engine, OPTIMIZER) or is_on_host(engine, PARAMETERS):
        moved = (size + 2 * (size + basis.shape.moment_bytes)) * elements
        update = np.asarray(moved / host.memory_bytes_per_s)
    if is_on_host(engine, OPTIMIZER):
        copies = copies + 2 * one_way
    if is_on_host(engine, PARAMETERS):
        stage = fsdp_stage(layouts, engine)
        all_up, behind_backward = one_way + frozen_up, np.maximum(one_way - backward, 0.0)
        behind_forward = np.maximum(all_up - forward, 0.0)
        both = n * (behind_forward + np.maximum(all_up - backward, 0.0))
        up = np.where((stage >= 3) & (layouts.pp == 1), both, behind_forward)
        added = one_way + 3 * size * elements / host.memory_bytes_per_s  # reads gradient and sum, writes the sum
        down = behind_backward + np.where(stage >= 2, (n - 1) * added, 0.0)
        copies = copies + up + down
    if is_on_host(engine, ACTIVATIONS):
        moving = saved / host.link_bytes_per_s
        copies = copies + n * (np.maximum(moving - forward, 0.0) + moving)
    return np.asarray(copies), update
