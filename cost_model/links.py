"""Links as ranks meet them: what of a tier's bandwidth collectives reach, and how a group's ranks lie over hosts."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Effective bytes/s and direction of one device, and seconds per hop, inside a host and between hosts.

    Without a switch (`is_switched` False) a host's devices are linked pair by pair, so that k of its n devices have
    (k-1)/(n-1) of the bandwidth among themselves.
    """

    in_host_bytes_per_s: Floats
    in_host_latency_s: float
    inter_host_bytes_per_s: Floats
    inter_host_latency_s: float
    devices_per_host: Floats
    is_switched: bool = True

    def in_host(self, ranks: Floats) -> Floats:
        """Bytes/s among `ranks` devices of one host."""
        if self.is_switched:
            return np.asarray(self.in_host_bytes_per_s) + 0.0 * ranks
        others = np.maximum(self.devices_per_host - 1, 1)
        return np.asarray(self.in_host_bytes_per_s * np.clip((ranks - 1) / others, 1 / others, 1.0))


def gather_s(links: Links, whole_bytes: Floats, ranks: Floats, stride: Floats) -> Floats:
    """Seconds of an all-gather or reduce-scatter of `whole_bytes` over `ranks` ranks that lie `stride` apart.

    Ranks of one host first, over its links, then every rank with its likes on other hosts, each over its own port:
    the two run as a pipeline, so that the slower decides (hierarchical rings; NCCL numbers rings that way).
    """
    near = np.clip(links.devices_per_host / stride, 1, ranks)
    hosts = np.maximum(ranks / near, 1)
    inside = (near - 1) / near * whole_bytes / links.in_host(near) + (near - 1) * links.in_host_latency_s
    between = (hosts - 1) / hosts * whole_bytes / near / links.inter_host_bytes_per_s
    between = between + (hosts - 1) * links.inter_host_latency_s
    found: Floats = np.where(ranks > 1, np.maximum(inside, np.where(hosts > 1, between, 0.0)), 0.0)
    return found


def message_s(links: Links, message_bytes: Floats, is_inside: Floats) -> Floats:
    """Seconds of one message between two ranks."""
    rate = np.where(is_inside, links.in_host(np.asarray(2.0)), links.inter_host_bytes_per_s)
    latency = np.where(is_inside, links.in_host_latency_s, links.inter_host_latency_s)
    found: Floats = message_bytes / rate + latency
    return found
