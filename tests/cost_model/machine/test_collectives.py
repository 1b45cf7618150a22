"""The prices of collectives: identities that hold for every size, and a ring counted step by step."""

import pytest

from autopar.cost_model.machine.collectives import Ring, hops, ring_of, sent_bytes
from autopar.ir.cluster import ClusterSpec
from autopar.ir.sharding import Mesh
from autopar.lowering.conversions import Collective

KINDS: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_identities(ranks: int) -> None:
    whole = 3e6
    gather, scatter = sent_bytes("all_gather", whole, ranks), sent_bytes("reduce_scatter", whole, ranks)
    assert gather == scatter
    assert sent_bytes("all_reduce", whole, ranks) == gather + scatter
    assert sent_bytes("all_to_all", whole, ranks) == pytest.approx(gather / ranks)
    assert hops("all_reduce", ranks) == hops("all_gather", ranks) + hops("reduce_scatter", ranks)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_ring_counted_step_by_step(ranks: int) -> None:
    """Each rank passes on one part per step until every rank has met every part."""
    held = [{rank} for rank in range(ranks)]
    sent = steps = 0
    while any(len(parts) < ranks for parts in held):
        moved = [(rank + 1) % ranks for rank in range(ranks)]
        for rank, to in enumerate(moved):
            held[to].add((rank - steps) % ranks)
        sent += 1
        steps += 1
    assert sent_bytes("all_gather", ranks * 10.0, ranks) == sent * 10.0
    assert hops("all_gather", ranks) == steps


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_or_latency_take_longer(kind: Collective) -> None:
    ring = Ring(ranks=4, bytes_per_s=1e9, latency_s=1e-6)
    assert ring.seconds(kind, 2e6) > ring.seconds(kind, 1e6) > ring.seconds(kind, 1e6, latency=False)
    assert Ring(ranks=1, bytes_per_s=1e9, latency_s=1e-6).seconds(kind, 1e6) == 0.0


def test_the_last_mesh_dimension_lies_inside_a_host() -> None:
    cluster, mesh = ClusterSpec.preset("16xh100"), Mesh.of(dp=2, tp=8)
    outer, inner = ring_of(cluster, mesh, 0), ring_of(cluster, mesh, 1)
    assert (outer.ranks, inner.ranks) == (2, 8)
    assert inner.bytes_per_s == cluster.link(0, 7).bytes_per_s
    assert outer.bytes_per_s == cluster.link(0, 8).bytes_per_s < inner.bytes_per_s
