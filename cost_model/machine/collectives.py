"""Seconds of collectives: α-β models of the algorithms that libraries run, over two tiers of links and over arrays.

n ranks, g of them in each of h = n/g hosts, a tensor of S bytes in all. Inside a host a device sends at B and a hop
takes α; H bytes/s leave and enter the host for this group (`Group.host_bytes_per_s`), a hop between hosts takes β.
k is 2 for all-reduce (reduce-scatter, then all-gather) and 1 for the two halves:

    ring          k(n-1)/n · S/min(B, H) + k((n-h)α + (h-1)β)
    tree          2S/min(B, H) + 2(⌈log2 g⌉α + ⌈log2 h⌉β)              all-reduce: double binary trees
                  (n-1)/n · S/H + ⌈log2 h⌉β                            its halves, g = 1: parallel aggregated trees
    hierarchical  k(g-1)/g · S/B + k(h-1)/h · S/H + k((g-1)α + (h-1)β)
    switch        2(n-1)/n · S/min(2B, H) + (g-1)α + 2⌈log2 h⌉β        all-reduce
                  (n-1)/n · S/B + (g-1)α                               its halves, h = 1
    direct        max((g-1)/n · L/B, (n-g)/n · gL/H) + α or β          all-to-all of L = S/n on each rank
                  S over the link + α or β                             send

In a hierarchical collective every rail, the devices of one number in all hosts, carries S/g of the data.
`seconds` takes the fastest that a library has (`NCCL`, `GLOO`), as NCCL's tuner does, over its wire protocols too.

Sources: ring and direct: Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in
MPICH", sections 4.1-4.5; bytes as in nccl-tests, doc/PERFORMANCE.md. Hops by tier, protocols, switch and choice: NCCL
2.28, src/graph/tuning.cc. Trees: Jeaugey 2019, "Massively scale your deep learning training with NCCL 2.4"; inside a
host NCCL walks a chain of g-1 hops where we take a tree. Parallel aggregated trees: Jeaugey 2025, arXiv 2506.20252.
Hierarchical: Cho et al. 2019, "BlueConnect", section 3. Switch: NVLink SHARP (NVLS), in NCCL since 2.17.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.machine.process_group import Group, Number
from autopar.errors import InputError, did_you_mean
from autopar.ir.cluster import ClusterSpec
from autopar.ir.sharding import Mesh

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Transfer = Collective | Literal["send"]
Algorithm = Literal["ring", "tree", "hierarchical", "switch", "direct"]
Protocol = Literal["simple", "ll128", "ll"]
_HALVES = ("all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """What a communication library may choose from."""

    name: str
    algorithms: Mapping[Transfer, tuple[Algorithm, ...]]
    protocols: tuple[Protocol, ...]


_DIRECT: Mapping[Transfer, tuple[Algorithm, ...]] = {"all_to_all": ("direct",), "send": ("direct",)}
NCCL = Library(
    name="nccl",
    algorithms={
        "all_reduce": ("ring", "tree", "switch"),
        "all_gather": ("ring", "switch"),
        "reduce_scatter": ("ring", "switch"),
        **_DIRECT,
    },
    protocols=("simple", "ll128", "ll"),
)
GLOO = Library(
    name="gloo",
    algorithms={"all_reduce": ("ring",), "all_gather": ("ring",), "reduce_scatter": ("ring",), **_DIRECT},
    protocols=("simple",),
)
EVERY = Library(
    name="every",
    algorithms={
        "all_reduce": ("ring", "tree", "switch", "hierarchical"),
        "all_gather": ("ring", "tree", "switch", "hierarchical"),
        "reduce_scatter": ("ring", "tree", "switch", "hierarchical"),
        "all_to_all": ("direct", "hierarchical"),
        "send": ("direct",),
    },
    protocols=("simple", "ll128", "ll"),
)


def seconds(
    kind: Transfer, whole_bytes: Number, group: Group, algorithm: Algorithm | None = None, *, library: Library = NCCL
) -> Number:
    """Seconds of one transfer of a tensor of `whole_bytes` in all, by the fastest algorithm and protocol of `library`.

    With `algorithm` by that one, whether the library has it or not; infinite where it does not apply. `whole_bytes` is
    the tensor before it is scattered or after it is gathered, for "send" the message. 0 for one rank. The fixed cost
    of a call is not in it. Raises InputError for an unknown kind or algorithm.
    """
    names = _algorithms(kind, algorithm, library)
    found = [_of_protocols(kind, whole_bytes, group, name, library.protocols).min(axis=0) for name in names]
    fastest: Number = np.minimum.reduce(np.broadcast_arrays(*found))[()]
    return fastest


def seconds_by_algorithm(
    kind: Transfer, whole_bytes: Number, group: Group, algorithm: Algorithm | None = None, *, library: Library = NCCL
) -> dict[str, Number]:
    """As `seconds`, of each algorithm and protocol by its name, ``ring/ll128``."""
    names = _algorithms(kind, algorithm, library)
    found = {name: _of_protocols(kind, whole_bytes, group, name, library.protocols) for name in names}
    return {f"{name}/{p}": found[name][k][()] for name in names for k, p in enumerate(library.protocols)}


def _algorithms(kind: Transfer, algorithm: Algorithm | None, library: Library) -> tuple[Algorithm, ...]:
    if kind not in library.algorithms:
        raise InputError(f"no transfer {kind!r}; {did_you_mean(kind, tuple(library.algorithms))}")
    if algorithm is not None and algorithm not in _ALGORITHMS:
        raise InputError(f"no algorithm {algorithm!r}; {did_you_mean(algorithm, tuple(_ALGORITHMS))}")
    return library.algorithms[kind] if algorithm is None else (algorithm,)


# Of the bandwidth, of the latency of a hop in a host and of one between hosts; by whether it is a tree, and protocol.
# NCCL 2.28, src/graph/tuning.cc: hwLatencies of NVLink and network over those of the ring's simple protocol, which our
# figures of links are; trees have 0.92 of the bus bandwidth, ll128 carries 120 of 128 bytes (0.92 on rings), ll half
# (on trees 1/3.8). The switch has the simple protocol only.
_SHARES: Mapping[tuple[bool, Protocol], tuple[float, float, float]] = {
    (False, "simple"): (1.0, 1.0, 1.0),
    (False, "ll128"): (0.92, 1.9 / 3.4, 4.0 / 14.0),
    (False, "ll"): (0.5, 0.6 / 3.4, 2.7 / 14.0),
    (True, "simple"): (0.92, 1.0, 1.0),
    (True, "ll128"): (0.92 * 120 / 128, 1.25 / 3.4, 8.5 / 14.0),
    (True, "ll"): (0.92 / 3.8, 0.6 / 3.4, 5.0 / 14.0),
}


def _of_protocols(
    kind: Transfer, whole_bytes: Number, group: Group, algorithm: Algorithm, protocols: Sequence[Protocol]
) -> NDArray[Any]:
    """Seconds by each protocol, in arrays with an axis of protocols before their own."""
    whole = np.asarray(whole_bytes, float)
    axes = max(whole.ndim, *(np.ndim(getattr(group, each.name)) for each in fields(group)))
    shares = np.array([_SHARES[algorithm == "tree", protocol] for protocol in protocols]).T
    bandwidth, in_host, between = shares.reshape(3, len(protocols), *[1] * axes)
    scaled = replace(
        group,
        in_host_bytes_per_s=group.in_host_bytes_per_s * bandwidth,
        in_host_latency_s=group.in_host_latency_s * in_host,
        inter_host_bytes_per_s=group.inter_host_bytes_per_s * bandwidth,
        inter_host_latency_s=group.inter_host_latency_s * between,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        found = _ALGORITHMS[algorithm](kind, whole, scaled)
    priced = np.where(np.asarray(group.ranks) > 1, found, 0.0)
    if priced.ndim <= axes:
        priced = np.broadcast_to(priced, (len(protocols), *priced.shape))
    if algorithm == "switch":  # it has the simple protocol only
        priced = np.array([one if p == "simple" else one + np.inf for p, one in zip(protocols, priced, strict=True)])
    return priced


def _ring(kind: Transfer, whole_bytes: NDArray[Any], group: Group) -> Number:
    if kind not in ("all_reduce", *_HALVES):
        return np.inf
    n, h, k = group.ranks, group.hosts, _passes(kind)
    latency = (n - h) * group.in_host_latency_s + (h - 1) * group.inter_host_latency_s
    found: Number = k * ((n - 1) / n * whole_bytes / _slower(group) + latency)
    return found


def _tree(kind: Transfer, whole_bytes: NDArray[Any], group: Group) -> Number:
    g, h = group.ranks_in_host, group.hosts
    between = _depth(h) * group.inter_host_latency_s
    if kind == "all_reduce":
        found: Number = 2 * (whole_bytes / _slower(group) + _depth(g) * group.in_host_latency_s + between)
        return found
    if kind not in _HALVES:
        return np.inf
    alone = (group.ranks - 1) / group.ranks * whole_bytes / group.host_bytes_per_s + between
    return np.where(np.asarray(g) == 1, alone, np.inf)


def _hierarchical(kind: Transfer, whole_bytes: NDArray[Any], group: Group) -> Number:
    n, g, h = group.ranks, group.ranks_in_host, group.hosts
    inside, between = (g - 1) / g * whole_bytes, (h - 1) / h * whole_bytes
    if kind == "all_to_all":  # to the rail of the receiver, then along it; a rank holds S/n, a host g of them
        alpha = np.where(np.asarray(g) > 1, group.in_host_latency_s, 0.0)
        beta = np.where(np.asarray(h) > 1, group.inter_host_latency_s, 0.0)
        moved: Number = inside / n / group.in_host_bytes_per_s + between * g / n / group.host_bytes_per_s
        return moved + alpha + beta
    if kind not in ("all_reduce", *_HALVES):
        return np.inf
    latency = (g - 1) * group.in_host_latency_s + (h - 1) * group.inter_host_latency_s
    return _passes(kind) * (inside / group.in_host_bytes_per_s + between / group.host_bytes_per_s + latency)


def _switch(kind: Transfer, whole_bytes: NDArray[Any], group: Group) -> Number:
    n, g, h = group.ranks, group.ranks_in_host, group.hosts
    part = (n - 1) / n * whole_bytes
    if kind == "all_reduce":
        bytes_per_s = np.minimum(
            2 * group.in_host_bytes_per_s, np.where(np.asarray(h) > 1, group.host_bytes_per_s, np.inf)
        )
        found = 2 * part / bytes_per_s + (g - 1) * group.in_host_latency_s + 2 * _depth(h) * group.inter_host_latency_s
    elif kind in _HALVES:
        alone = part / group.in_host_bytes_per_s + (g - 1) * group.in_host_latency_s
        found = np.where(np.asarray(h) == 1, alone, np.inf)
    else:
        return np.inf
    return np.where(np.logical_and(group.reduces_in_switch, np.asarray(g) > 1), found, np.inf)


def _direct(kind: Transfer, whole_bytes: NDArray[Any], group: Group) -> Number:
    n, g, h = group.ranks, group.ranks_in_host, group.hosts
    crosses = np.asarray(h) > 1
    latency = np.where(crosses, group.inter_host_latency_s, group.in_host_latency_s)
    if kind == "send":
        bytes_per_s = np.where(crosses, group.host_bytes_per_s / g, group.in_host_bytes_per_s)
        return whole_bytes / bytes_per_s + latency
    if kind != "all_to_all":
        return np.inf
    held = whole_bytes / n
    inside, between = (g - 1) / n * held / group.in_host_bytes_per_s, (n - g) / n * held * g / group.host_bytes_per_s
    return np.maximum(inside, between) + latency


_ALGORITHMS: Mapping[str, Callable[[Transfer, NDArray[Any], Group], Number]] = {
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
    "switch": _switch,
    "direct": _direct,
}


def _passes(kind: Transfer) -> int:
    return 2 if kind == "all_reduce" else 1


def _slower(group: Group) -> NDArray[Any]:
    """Bytes/s of a ring or tree through all ranks: its slowest link."""
    inside = np.where(np.asarray(group.ranks_in_host) > 1, group.in_host_bytes_per_s, np.inf)
    between = np.where(np.asarray(group.hosts) > 1, group.host_bytes_per_s, np.inf)
    slower: NDArray[Any] = np.minimum(inside, between)
    return slower


def _depth(count: Number) -> NDArray[Any]:
    depth: NDArray[Any] = np.ceil(np.log2(count))
    return depth


# ---- one ring per mesh dimension, which the search for labels prices conversions with ----


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
