"""The ring of a mesh dimension: its links, and how its prices grow."""

from typing import get_args

import pytest

from autopar.ir.cluster import ClusterSpec
from autopar.ir.sharding import Mesh
from autopar.lowering.conversions import Collective
from autopar.search.labels.prices import Ring, ring_of


@pytest.mark.parametrize("kind", get_args(Collective))
def test_more_bytes_or_latency_take_longer(kind: Collective) -> None:
    ring = Ring(ranks=4, bytes_per_s=1e9, latency_s=1e-6)
    assert ring.seconds(kind, 2e6) > ring.seconds(kind, 1e6) and ring.latency_of(kind) > 0
    assert Ring(ranks=1, bytes_per_s=1e9, latency_s=1e-6).seconds(kind, 1e6) == 0.0


def test_the_last_mesh_dimension_lies_inside_a_host() -> None:
    cluster, mesh = ClusterSpec.preset("16xh100"), Mesh.of(dp=2, tp=8)
    outer, inner = ring_of(cluster, mesh, 0), ring_of(cluster, mesh, 1)
    assert (outer.ranks, inner.ranks) == (2, 8)
    assert inner.bytes_per_s == cluster.link(0, 7).bytes_per_s
    assert outer.bytes_per_s == cluster.link(0, 8).bytes_per_s < inner.bytes_per_s
