"""Seconds of collectives: α-β models of NCCL's algorithms, over two tiers of links. Every input may be an array.

docs/cost_model_communication.md has the formulas and their sources. `ALGORITHMS` holds the algorithm of every
collective, and `fastest_seconds` takes the fastest wire protocol, as NCCL's tuner does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError, did_you_mean
from autopar.lowering.conversions import Collective

Number = float | NDArray[Any]
Transfer = Collective | Literal["send"]

# The shares of three figures: bandwidth, latency of a hop inside a host, latency of a hop between hosts.
# Source: NCCL 2.28, src/graph/tuning.cc, hwLatencies of NVLink and network. They are divided by the latencies of a ring
# with the simple protocol, because a profile's links hold the simple protocol's latencies.
# ll128 carries 0.92 of the bytes on rings. ll carries half of the bytes.
PROTOCOLS: Mapping[str, tuple[float, float, float]] = {
    "simple": (1.0, 1.0, 1.0),
    "ll128": (0.92, 1.9 / 3.4, 4.0 / 14.0),
    "ll": (0.5, 0.6 / 3.4, 2.7 / 14.0),
}
_SHARES = np.array(list(PROTOCOLS.values())).T


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks of one collective and the links between them. Every field may be an array over candidates.

    A bandwidth counts one device in one direction. All groups of a mesh dimension communicate at once. A host of D
    devices sends D·b bytes/s and holds D/g groups. So each group gets g·b: one device's share for every member.
    """

    ranks: Number
    ranks_in_host: Number
    in_host_bytes_per_s: Number
    in_host_latency_s: Number  # of a hop
    inter_host_bytes_per_s: Number
    inter_host_latency_s: Number  # of a hop

    @property
    def hosts(self) -> Number:
        """The number of hosts."""
        return self.ranks / self.ranks_in_host

    @property
    def host_bytes_per_s(self) -> Number:
        """Bytes/s that leave a host for this group: its share of the network, at most its links inside the host."""
        network = self.inter_host_bytes_per_s * self.ranks_in_host
        inside = self.ranks_in_host * np.asarray(self.in_host_bytes_per_s)
        capped: Number = np.where(np.asarray(self.ranks_in_host) > 1, np.minimum(network, inside), network)[()]
        return capped


def fastest_seconds(kind: Collective, whole_bytes: Number, group: RankGroup) -> Number:
    """Seconds of one collective by the fastest wire protocol. 0 for one rank."""
    if kind not in ALGORITHMS:
        raise InputError(f"no collective {kind!r}; {did_you_mean(kind, sorted(ALGORITHMS))}")
    whole = np.asarray(whole_bytes, float)
    axes = np.broadcast(whole, *(getattr(group, name) for name in RankGroup.__slots__)).ndim
    bandwidth, in_host, between = _SHARES.reshape(3, len(PROTOCOLS), *[1] * axes)  # before the axes of the candidates
    scaled = replace(
        group,
        in_host_bytes_per_s=group.in_host_bytes_per_s * bandwidth,
        in_host_latency_s=group.in_host_latency_s * in_host,
        inter_host_bytes_per_s=group.inter_host_bytes_per_s * bandwidth,
        inter_host_latency_s=group.inter_host_latency_s * between,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        priced = np.where(np.asarray(group.ranks) > 1, ALGORITHMS[kind](kind, whole, scaled), 0.0)
    fastest: Number = np.asarray(priced.min(axis=0))[()]
    return fastest


def ring(kind: Collective, whole_bytes: NDArray[Any], group: RankGroup) -> Number:
    n, h, k = group.ranks, group.hosts, 2 if kind == "all_reduce" else 1
    inside = np.where(np.asarray(group.ranks_in_host) > 1, group.in_host_bytes_per_s, np.inf)
    between = np.where(np.asarray(group.hosts) > 1, group.host_bytes_per_s, np.inf)
    latency = (n - h) * group.in_host_latency_s + (h - 1) * group.inter_host_latency_s
    seconds: Number = k * ((n - 1) / n * whole_bytes / np.minimum(inside, between) + latency)
    return seconds


def direct(kind: Collective, whole_bytes: NDArray[Any], group: RankGroup) -> Number:
    n, g, held = group.ranks, group.ranks_in_host, whole_bytes / group.ranks
    latency = np.where(np.asarray(group.hosts) > 1, group.inter_host_latency_s, group.in_host_latency_s)
    inside, between = (g - 1) / n * held / group.in_host_bytes_per_s, (n - g) / n * held * g / group.host_bytes_per_s
    return np.maximum(inside, between) + latency


def mirror(kind: Collective, whole_bytes: NDArray[Any], group: RankGroup) -> Number:
    held, is_inside = whole_bytes / group.ranks, np.asarray(group.hosts) <= 1
    inside = held / group.in_host_bytes_per_s + group.in_host_latency_s
    between = held * group.ranks_in_host / group.host_bytes_per_s + group.inter_host_latency_s
    seconds: Number = np.where(is_inside, inside, between)
    return seconds


def next_rank(kind: Collective, whole_bytes: NDArray[Any], group: RankGroup) -> Number:
    """One rank of a host sends to the next host, as in a ring."""
    spans = np.asarray(group.hosts) > 1
    inside = np.where(np.asarray(group.ranks_in_host) > 1, group.in_host_bytes_per_s, np.inf)
    between = np.where(spans, group.host_bytes_per_s, np.inf)
    latency = np.where(spans, group.inter_host_latency_s, group.in_host_latency_s)
    seconds: Number = whole_bytes / group.ranks / np.minimum(inside, between) + latency
    return seconds


# Each prices one collective by the bytes of the whole tensor.
ALGORITHMS: Mapping[Collective, Callable[[Collective, NDArray[Any], RankGroup], Number]] = {
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), ring),
    "all_to_all": direct,
    "exchange": mirror,
    "shift": next_rank,
}


def sent_bytes(kind: Collective, whole_bytes: float, ranks: int) -> float:
    """Bytes that one rank sends. `whole_bytes` counts the tensor before it is scattered or after it is gathered."""
    part = (ranks - 1) / ranks * whole_bytes
    if kind in ("exchange", "shift"):
        return whole_bytes / ranks if ranks > 1 else 0.0
    if kind == "all_reduce":
        return 2 * part
    return part / ranks if kind == "all_to_all" else part


def hops(kind: Collective, ranks: int) -> int:
    """Hops of one call, one after another."""
    if kind in ("exchange", "shift"):
        return min(ranks - 1, 1)
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)
