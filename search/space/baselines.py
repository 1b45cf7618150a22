"""The plans that people choose by hand, which every search prices for comparison.

FSDP              ZeRO 3 over all devices (Zhao et al. 2023, "PyTorch FSDP")
tensor + FSDP     tensor parallelism over the devices of a host, FSDP over hosts (torchtitan's two dimensions)
Megatron 3-D      the least tensor × pipeline parallelism that fits, tensor first and inside hosts, the rest data
                  parallel with a sharded optimizer (Narayanan et al. 2021, section 3, takeaways 1-3)
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.cluster import ClusterSpec
from autopar.ir.schedules.registry import DEFAULT_SCHEDULE, SCHEDULE_NAMES
from autopar.search.space.candidates import Candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A named candidate."""

    name: str
    index: int


def baselines(found: Candidates, cluster: ClusterSpec) -> tuple[Baseline, ...]:
    """The baselines that the space has, each with its smallest micro-batch."""
    whole = (found.num_devices == cluster.num_devices) & (found.order == 0) & (found.cp == 1) & (found.ep == 1)
    per_host = min(group.devices_per_host for group in cluster.groups)
    sharded = (found.dp_replicate == 1) & (found.pp == 1) & (found.zero == 3)
    in_host = _largest_up_to(found.tp[whole], per_host)
    is_default = found.schedule == SCHEDULE_NAMES.index(DEFAULT_SCHEDULE)
    staged = (found.pp > 1) & is_default & (found.zero == 1) & (found.dp_replicate == 1)
    wanted = {
        "FSDP": sharded & (found.tp == 1),
        "tensor parallelism in hosts + FSDP": sharded & (found.tp == in_host) & (found.tp > 1),
        "Megatron 3-D": staged & (found.tp == in_host),
    }
    rows = []
    for name, mask in wanted.items():
        index = np.flatnonzero(mask & whole)
        if len(index):
            order = np.lexsort((found.micro_batch[index], found.pp[index]))
            rows.append(Baseline(name=name, index=int(index[order[0]])))
    return tuple(rows)


def _largest_up_to(degrees: NDArray[np.int64], most: int) -> int:
    legal = degrees[degrees <= most]
    return int(legal.max()) if len(legal) else 1
