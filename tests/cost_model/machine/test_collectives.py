"""The prices of collectives: identities that hold for every size, and a ring counted step by step."""

import pytest

from autopar.cost_model.machine.collectives import hops, sent_bytes


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
