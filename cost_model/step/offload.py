"""The optimizer on the host (Ren et al. 2021, "ZeRO-Offload: Democratizing billion-scale model training").

    device    weights, and gradients of the blocks whose backward pass runs
    host      float32 weights and Adam's moments, and a float32 sum of gradients: 16 bytes of a parameter
    link      every micro-batch's gradients down; updated weights up
    overlap   gradients go down, and are added up there, beside the backward pass of the next blocks;
              weights go up beside the update of the next weights (section 4.1): the longer of both counts

The update waits for the last gradient. The paper's one-step delay is not assumed, because it changes the training.

Every rank offloads its ZeRO part of the state. Offloading needs ZeRO 2 or 3, or a single rank, and no pipeline stages.
Figures are from data sheets. The runtime of autopar keeps the optimizer on the device.
"""

from typing import TYPE_CHECKING

import numpy as np

from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.ir.arrays import Floats

if TYPE_CHECKING:
    from autopar.cost_model.step.context import Basis
    from autopar.cost_model.step.rank_parameters import RankParameters

HOST_STATE_BYTES = 16  # of a parameter: weight, two moments and the sum of gradients in float32
BLOCKS_WITH_GRADIENTS = 2  # on the device: gradients of one block are computed while another block's go down
ADDED_BYTES = 8  # of the sum, read and written; reading the gradient counts extra
# float32 gradient read; weight and both moments read and written
UPDATE_BYTES = 4 + 3 * 8


def can_offload(layouts: Layouts) -> Floats:
    """Whether a layout can offload: its gradients leave the device during the backward pass."""
    alone = layouts.data_ranks <= 1
    return np.asarray((layouts.pp == 1) & (layouts.virtual <= 1) & (alone | (layouts.zero >= 2)))


def host_bytes(parameters: float, layouts: Layouts) -> Floats:
    """Bytes of host memory for one device's part of the state, as the mean over ranks."""
    divided = np.where(layouts.zero >= 1, layouts.shard, 1.0)
    return np.asarray(HOST_STATE_BYTES * parameters / (layouts.tp * layouts.pp * divided))


def device_state_bytes(parameters: "RankParameters", shape: Shape, layouts: Layouts) -> dict[str, Floats]:
    """The part of `autopar.cost_model.memory.formula.state_bytes` that stays on the device."""
    held = np.minimum(1.0, BLOCKS_WITH_GRADIENTS * layouts.pp / shape.blocks)
    return {
        "parameters": np.asarray(shape.element_bytes * parameters.sharded(layouts, 3)),
        "gradients": np.asarray(shape.element_bytes * held * parameters.whole),
        "optimizer state": np.zeros(1) * parameters.whole,
    }


def offloaded(basis: "Basis", layouts: Layouts, parameters: "RankParameters", backward: Floats) -> Floats:
    """Seconds of a step in which the device waits for the host.

    `backward` is the seconds of one micro-batch's backward pass.
    """
    host = basis.machine.host
    assert host is not None, "no figures of the host; `autopar.search.driver.priced_only` asks for them"
    elements = parameters.sharded(layouts, 1)
    size = basis.shape.element_bytes
    down, added = size * elements / host.link_bytes_per_s, (size + ADDED_BYTES) * elements / host.memory_bytes_per_s
    waiting = layouts.micro_batches * np.maximum(np.maximum(down, added) - backward, 0.0)
    update = (UPDATE_BYTES + size) * elements / host.memory_bytes_per_s
    return np.asarray(waiting + np.maximum(update, size * elements / host.link_bytes_per_s))
