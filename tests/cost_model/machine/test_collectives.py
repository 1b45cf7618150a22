"""The prices of collectives: identities that hold for every size, and a ring counted step by step."""

import numpy as np
import pytest

from autopar.cost_model.machine.cluster import cluster_machine
from autopar.cost_model.machine.collectives import hops, sent_bytes
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.ir.cluster import ClusterSpec
from autopar.lowering.conversions import Collective


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


@pytest.mark.parametrize("device", ["h100", "a100", "rtx4090", "mi300x", "l4", "v100"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_more_hosts_never_make_a_collective_faster(device: str, kind: Collective) -> None:
    """With the same bytes: of the whole tensor, or of every rank if it sends its own part to each other rank."""
    spec = ClusterSpec.parse(f"64x{device}")
    links = cluster_machine(spec, engine_named("autopar"), mechanisms(), precision="bf16").links
    ranks = np.array([8.0 * 2**n for n in range(10)])
    for size in (1e4, 1e6, 1e8, 1e10):
        whole = size * (ranks if kind == "all_to_all" else np.ones(len(ranks)))
        seconds = links.seconds(kind, whole, ranks, np.ones(len(ranks)))
        assert np.all(np.diff(seconds) >= -1e-9 * seconds[:-1]), (size, seconds)
