"""The links between ranks on hosts of one kind, and seconds of transfers over them.

A bandwidth is the data sheet's figure times the part that the device profile states. Transfers are priced by NCCL's
rings (`autopar.cost_model.machine.collectives`). The fixed cost of a call is in the latency of a hop inside a host.
`autopar calibrate` measures some kinds of collectives inside a host. There these kinds are priced by their fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost_model.machine.collectives import RankGroup, Transfer, fastest_seconds, hops, sent_bytes
from autopar.cost_model.machine.kernel_times import collective_seconds
from autopar.cost_model.machine.profile import CallCost
from autopar.ir.arrays import Floats
from autopar.lowering.conversions import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCalls:
    """The fitted costs of calls inside a host by kind, over a link of `bytes_per_s` and `latency_s` a hop."""

    bytes_per_s: float
    latency_s: float
    kinds: Mapping[Transfer, CallCost]

    def seconds(self, kind: Transfer, whole_bytes: Floats, ranks: Any) -> Floats:
        """Seconds of one call over `ranks` ranks; a message crosses one hop."""
        sent = whole_bytes if kind == "send" else sent_bytes(kind, whole_bytes, ranks)  # type: ignore[arg-type]
        return collective_seconds(
            sent_bytes=sent,
            hops=1 if kind == "send" else hops(kind, ranks),
            bytes_per_s=self.bytes_per_s,
            latency_s=self.latency_s,
            call=self.kinds[kind],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Effective bytes/s of one device in one direction, and seconds per hop, inside a host and between hosts."""

    in_host_bytes_per_s: float
    in_host_latency_s: float
    inter_host_bytes_per_s: float
    inter_host_latency_s: float
    devices_per_host: float
    is_switched: bool = True  # else linked pair by pair: k of n devices have (k-1)/(n-1) of the bandwidth among them
    calls: MeasuredCalls | None = None

    def group(self, ranks: Floats, stride: Floats) -> RankGroup:
        """Groups of `ranks` ranks, neighbours `stride` ranks apart."""
        near = np.clip(self.devices_per_host / stride, 1.0, ranks)
        return RankGroup(
            ranks=ranks,
            ranks_in_host=near,
            in_host_bytes_per_s=self.in_host_bytes_per_s * self._linked(near),
            in_host_latency_s=self.in_host_latency_s,
            inter_host_bytes_per_s=self.inter_host_bytes_per_s,
            inter_host_latency_s=self.inter_host_latency_s,
        )

    def _linked(self, near: Floats) -> Floats:
        """The part of a device's bandwidth that reaches `near` devices of its host."""
        if self.is_switched:
            return np.asarray(1.0)
        others = max(self.devices_per_host - 1, 1)
        return np.asarray(np.clip((near - 1) / others, 1 / others, 1.0))

    def seconds(
        self, kind: Collective, whole_bytes: Floats, ranks: Floats, stride: Floats, *, num_calls: Any = 1.0
    ) -> Floats:
        """Seconds of one collective of `whole_bytes` in all, sent in `num_calls` parts; 0 for one rank."""
        ranks, stride = np.asarray(ranks), np.asarray(stride)
        usual = np.asarray(fastest_seconds(kind, whole_bytes, self.group(ranks, stride)))
        if self.calls is None or kind not in self.calls.kinds:
            return usual
        is_inside = ranks * stride <= self.devices_per_host
        measured = num_calls * self.calls.seconds(kind, whole_bytes / num_calls, ranks)
        return np.where(is_inside, np.where(ranks > 1, measured, 0.0), usual)

    def message_s(self, message_bytes: Floats, is_inside: Floats) -> Floats:
        """Seconds of one message between two ranks."""
        rate = np.where(
            is_inside, self.in_host_bytes_per_s * self._linked(np.asarray(2.0)), self.inter_host_bytes_per_s
        )
        latency = np.where(is_inside, self.in_host_latency_s, self.inter_host_latency_s)
        seconds: Floats = message_bytes / rate + latency
        if self.calls is not None and "send" in self.calls.kinds:
            seconds = np.where(is_inside, self.calls.seconds("send", message_bytes, 2), seconds)
        return seconds
