"""The plans that people choose by hand, which every search prices for comparison.

FSDP              ZeRO 3 over all devices (Zhao et al. 2023, "PyTorch FSDP")
tensor + FSDP     tensor parallelism over the devices of a host, FSDP over hosts (torchtitan's two dimensions)
Megatron 3-D      the least tensor × pipeline parallelism that fits, tensor first and inside hosts, the rest data
                  parallel with a sharded optimizer (Narayanan et al. 2021, section 3, takeaways 1-3)
"""

import numpy as np
from numpy.typing import NDArray

from autopar.ir.cluster import ClusterSpec
from autopar.ir.schedules.registry import DEFAULT_SCHEDULE, SCHEDULE_NAMES
from autopar.search.space.candidates import Candidates


def baselines(space: Candidates, cluster: ClusterSpec) -> dict[int, str]:
    """The names of the baselines that the space has, by candidate, each with its smallest micro-batch."""
    whole = (space.num_devices == cluster.num_devices) & (space.order == 0) & (space.cp == 1) & (space.ep == 1)
    per_host = min(group.devices_per_host for group in cluster.groups)
    sharded = (space.dp_replicate == 1) & (space.pp == 1) & (space.zero == 3)
    in_host = _largest_up_to(space.tp[whole], per_host)
    is_default = space.schedule == SCHEDULE_NAMES.index(DEFAULT_SCHEDULE)
    staged = (space.pp > 1) & is_default & (space.zero == 1) & (space.dp_replicate == 1)
    wanted = {
        "FSDP": sharded & (space.tp == 1),
        "tensor parallelism in hosts + FSDP": sharded & (space.tp == in_host) & (space.tp > 1),
        "Megatron 3-D": staged & (space.tp == in_host),
    }
    names = {}
    for name, mask in wanted.items():
        index = np.flatnonzero(mask & whole)
        if len(index):
            order = np.lexsort((space.micro_batch[index], space.pp[index]))
            names[int(index[order[0]])] = name
    return names


def _largest_up_to(degrees: NDArray[np.int64], most: int) -> int:
    legal = degrees[degrees <= most]
    return int(legal.max()) if len(legal) else 1
