"""One ring per mesh dimension: the labeller prices conversions with it."""

from dataclasses import dataclass
from math import prod

from autopar.cost_model.machine.collectives import hops, sent_bytes
from autopar.ir.cluster import ClusterSpec
from autopar.ir.sharding import Mesh
from autopar.lowering.conversions import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks of one mesh dimension: how many, and their slowest link."""

    ranks: int
    bytes_per_s: float
    latency_s: float

    def seconds(self, kind: Collective, whole_bytes: float, *, latency: bool = True) -> float:
        """Time of one collective over a tensor of `whole_bytes` in all; `latency=False` prices its bytes only."""
        return sent_bytes(kind, whole_bytes, self.ranks) / self.bytes_per_s + latency * self.latency_of(kind)

    def latency_of(self, kind: Collective) -> float:
        return hops(kind, self.ranks) * self.latency_s


def ring_of(cluster: ClusterSpec, mesh: Mesh, index: int) -> Ring:
    """The ring of mesh dimension `index`, with the link of its first and last rank, which lie farthest apart."""
    ranks, stride = mesh.degrees[index], prod(mesh.degrees[index + 1 :])
    last = min((ranks - 1) * stride, cluster.num_devices - 1)
    link = cluster.link(0, last) if last > 0 else cluster.groups[0].in_host or cluster.inter_host
    if link is None:  # one device: nothing to price
        return Ring(ranks=ranks, bytes_per_s=1e9, latency_s=0.0)
    return Ring(ranks=ranks, bytes_per_s=link.bytes_per_s, latency_s=link.latency_s)
