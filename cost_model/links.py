"""Links as ranks meet them: groups of ranks at some distance from each other on hosts of a kind, and their transfers.

The bandwidths are what collectives reach, the data sheet's times the device profile's part; the transfers are those of
`autopar.cost_model.collectives`, by NCCL's rings. The fixed cost of a call is in the first hop's latency.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.collectives import Algorithm, Transfer, seconds
from autopar.cost_model.groups import Group

Floats = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Effective bytes/s and direction of one device, and seconds per hop, inside a host and between hosts.

    Without a switch (`is_switched` False) a host's devices are linked pair by pair, so that k of its n devices have
    (k-1)/(n-1) of the bandwidth among themselves.
    """

    in_host_bytes_per_s: float
    in_host_latency_s: float
    inter_host_bytes_per_s: float
    inter_host_latency_s: float
    devices_per_host: float
    is_switched: bool = True

    def group(self, ranks: Floats, stride: Floats) -> Group:
        """Groups of `ranks` ranks, neighbours `stride` ranks apart."""
        near = np.clip(self.devices_per_host / stride, 1.0, ranks)
        return Group(
            ranks=ranks,
            ranks_in_host=near,
            in_host_bytes_per_s=self.in_host_bytes_per_s * self._linked(near),
            in_host_latency_s=self.in_host_latency_s,
            inter_host_bytes_per_s=self.inter_host_bytes_per_s,
            inter_host_latency_s=self.inter_host_latency_s,
            devices_per_host=self.devices_per_host,
            groups_in_host=self.devices_per_host / near,
        )

    def _linked(self, near: Floats) -> Floats:
        """The part of a device's bandwidth that reaches `near` devices of its host."""
        if self.is_switched:
            return np.asarray(1.0)
        others = max(self.devices_per_host - 1, 1)
        return np.asarray(np.clip((near - 1) / others, 1 / others, 1.0))

    def seconds(self, kind: Transfer, whole_bytes: Floats, ranks: Floats, stride: Floats) -> Floats:
        """Seconds of one collective of `whole_bytes` in all; 0 for one rank."""
        algorithm: Algorithm = "direct" if kind in ("all_to_all", "send") else "ring"
        return np.asarray(seconds(kind, whole_bytes, self.group(np.asarray(ranks), np.asarray(stride)), algorithm))

    def message_s(self, message_bytes: Floats, is_inside: Floats) -> Floats:
        """Seconds of one message between two ranks."""
        rate = np.where(
            is_inside, self.in_host_bytes_per_s * self._linked(np.asarray(2.0)), self.inter_host_bytes_per_s
        )
        latency = np.where(is_inside, self.in_host_latency_s, self.inter_host_latency_s)
        found: Floats = message_bytes / rate + latency
        return found
