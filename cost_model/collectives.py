"""Seconds of collectives by the α-β model of ring algorithms.

With n ranks, S bytes of the whole tensor, link bandwidth B (bytes/s and direction) and latency α per hop:

    all-reduce       2(n-1)/n · S/B + 2(n-1)·α
    all-gather        (n-1)/n · S/B +  (n-1)·α
    reduce-scatter    (n-1)/n · S/B +  (n-1)·α
    all-to-all        (n-1)/n · L/B +  (n-1)·α     where L = S/n is what one rank holds

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005), sections
4.1-4.5; bytes are what one rank sends, as counted by NCCL's "bus bandwidth" (nccl-tests, doc/PERFORMANCE.md).
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from autopar.ir.cluster import ClusterSpec
from autopar.ir.sharding import Mesh

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


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


def sent_bytes(kind: Collective, whole_bytes: float, ranks: int) -> float:
    """Bytes that one rank sends; `whole_bytes` is the tensor before it is scattered or after it is gathered."""
    part = (ranks - 1) / ranks * whole_bytes
    if kind == "all_reduce":
        return 2 * part
    return part / ranks if kind == "all_to_all" else part


def hops(kind: Collective, ranks: int) -> int:
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)


def ring_of(cluster: ClusterSpec, mesh: Mesh, index: int) -> Ring:
    """The ring of mesh dimension `index`: ranks are numbered with the last mesh dimension fastest.

    Its link is the one between its first and last rank, which lie farthest apart; a mesh larger than the cluster
    is priced as if it went on over the slowest tier met.
    """
    ranks, stride = mesh.degrees[index], prod(mesh.degrees[index + 1 :])
    last = min((ranks - 1) * stride, cluster.num_devices - 1)
    link = cluster.link(0, last) if last > 0 else cluster.groups[0].in_host or cluster.inter_host
    if link is None:  # one device: nothing to price
        return Ring(ranks=ranks, bytes_per_s=1e9, latency_s=0.0)
    return Ring(ranks=ranks, bytes_per_s=link.bytes_per_s, latency_s=link.latency_s)
