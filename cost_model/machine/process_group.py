"""Groups of ranks that communicate, as a collective sees them: how many sit in a host, and what their links carry.

Ranks are numbered with the last mesh dimension fastest, so that a dimension's stride is the product of those after it
and its neighbours sit in one host as long as stride · ranks fits. Every field may be an array over candidates.

**Who has how much of a host's network.** `Link.bytes_per_s` is per device, so that a host of D devices sends D·b. All
groups of one mesh dimension communicate at once, and D/g of them have g members in a host each: every group gets g·b,
which is one device's share per member, whether a device has a network card of its own or several share one. So with tp
inside hosts of 8, the 8 data-parallel groups have b each, and a data-parallel group of all 8 devices has 8b.
`groups_in_host` says otherwise: fewer where only some groups communicate, such as the ends of a pipeline that sum tied
weights; more where several mesh dimensions do at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir.cluster import ClusterSpec
from autopar.ir.device import Link

Number = float | NDArray[Any]
_NO_LINK = Link(bytes_per_s=1e9, latency_s=1e-9, name="none")  # one device: nothing to price


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks of one group, the links that they use, bytes/s per device and direction, and seconds per hop.

    `groups_in_host` communicate at once over the network of a host with `devices_per_host`. `reduces_in_switch`: the
    host's switch sums (NVLink SHARP).
    """

    ranks: Number
    ranks_in_host: Number
    in_host_bytes_per_s: Number
    in_host_latency_s: Number
    inter_host_bytes_per_s: Number
    inter_host_latency_s: Number
    devices_per_host: Number
    groups_in_host: Number
    reduces_in_switch: bool | NDArray[Any] = False

    @property
    def hosts(self) -> Number:
        return self.ranks / self.ranks_in_host

    @property
    def host_bytes_per_s(self) -> Number:
        """What leaves a host for this group: an equal part of the host's network, at most its links inside."""
        network = self.inter_host_bytes_per_s * self.devices_per_host / self.groups_in_host
        inside = self.ranks_in_host * np.asarray(self.in_host_bytes_per_s)
        capped: Number = np.where(np.asarray(self.ranks_in_host) > 1, np.minimum(network, inside), network)[()]
        return capped


def group_of(cluster: ClusterSpec, sizes: Sequence[Number], index: int, *, reduces_in_switch: bool = False) -> Group:
    """The groups of mesh dimension `index`, whose sizes are in the order of the mesh; each may be an array.

    A group that does not fill hosts evenly counts the hosts it needs and the mean of its members there; one that lies
    across the border of two hosts, though it would fit into one, counts two. Unlike hosts: the smallest and slowest.
    Between leaf switches the spine's figures hold; a mesh larger than the cluster is priced as if it went on.
    """
    ranks = np.asarray(sizes[index], float)
    stride: NDArray[Any] = np.asarray(1.0)
    for size in sizes[index + 1 :]:
        stride = stride * np.asarray(size, float)
    span, per_host = ranks * stride, float(min(group.devices_per_host for group in cluster.groups))
    fits = np.maximum(1.0, np.floor(per_host / stride))
    straddles = (span <= per_host) & (per_host % span != 0) & (cluster.num_hosts > 1) & (ranks > 1)
    hosts = np.where(straddles, 2.0, np.ceil(ranks / fits))
    in_host, between, spine = _links(cluster)
    leaf = float((cluster.hosts_per_leaf or cluster.num_hosts) * per_host)
    crosses = (span - stride >= leaf) if cluster.spine is not None else np.zeros(span.shape, bool)
    ranks_in_host = ranks / hosts
    return Group(
        ranks=ranks[()],
        ranks_in_host=ranks_in_host[()],
        in_host_bytes_per_s=in_host.bytes_per_s,
        in_host_latency_s=in_host.latency_s,
        inter_host_bytes_per_s=np.where(crosses, spine.bytes_per_s, between.bytes_per_s)[()],
        inter_host_latency_s=np.where(crosses, spine.latency_s, between.latency_s)[()],
        devices_per_host=per_host,
        groups_in_host=(per_host / ranks_in_host)[()],
        reduces_in_switch=reduces_in_switch,
    )


def _links(cluster: ClusterSpec) -> tuple[Link, Link, Link]:
    """In a host, between hosts, between leaves: the slowest of each; one missing has its neighbour's figures."""
    inside = [group.in_host for group in cluster.groups if group.in_host is not None]
    slowest = min(inside, key=lambda link: link.bytes_per_s) if inside else None
    in_host = slowest or cluster.inter_host or _NO_LINK
    between = cluster.inter_host or in_host
    return in_host, between, cluster.spine or between
