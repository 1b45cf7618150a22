"""Every algorithm of `ALGORITHMS` on two tiers of links: published formulas, and properties of any figures."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from autopar.cost_model.machine.collectives import (
    ALGORITHMS,
    PROTOCOLS,
    Collective,
    RankGroup,
    fastest_seconds,
    sent_bytes,
)
from autopar.errors import InputError
from autopar.search.labels.prices import Ring

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
# the largest ratio of in-host latency over inter-host latency for which no protocol makes a hop in a host the slower
LATENCY_RATIO = min(between / inside for _, inside, between in PROTOCOLS.values())


def group(hosts: int, in_host: int, **figures: Any) -> RankGroup:
    """`hosts` × `in_host` ranks."""
    standard = RankGroup(
        ranks=hosts * in_host,
        ranks_in_host=in_host,
        in_host_bytes_per_s=400e9,
        in_host_latency_s=3e-6,
        inter_host_bytes_per_s=50e9,
        inter_host_latency_s=14e-6,
    )
    return replace(standard, **figures)


def simple(kind: Collective, num_bytes: float, ranks: RankGroup) -> float:
    """Seconds of a collective by the simple protocol, which has all of the bandwidth and of the latencies."""
    return float(ALGORITHMS[kind](kind, np.asarray(num_bytes, float), ranks))


sizes = st.integers(1, 64)
few = st.integers(1, 16)
whole = st.floats(1.0, 1e11)
bandwidths = st.floats(1e8, 1e12)
latencies = st.floats(1e-7, 1e-4)


@st.composite
def groups(draw: Any) -> RankGroup:
    """Links inside a host are no slower than those between hosts."""
    slow, fast = sorted((draw(bandwidths), draw(bandwidths)))
    short, long = sorted((draw(latencies), draw(latencies)))
    return group(
        draw(sizes),
        draw(few),
        in_host_bytes_per_s=fast,
        inter_host_bytes_per_s=slow,
        in_host_latency_s=short,
        inter_host_latency_s=long,
    )


kinds = st.sampled_from(COLLECTIVES)


def test_every_collective_has_an_algorithm() -> None:
    assert set(ALGORITHMS) == set(COLLECTIVES)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_an_algorithm_sends_at_least_what_leaves_a_rank(kind: Collective) -> None:
    """No algorithm beats the bandwidth of a rank's link, and 0 bytes still take a hop."""
    for hosts, inside in ((1, 8), (8, 1), (4, 8)):
        ranks = group(hosts, inside)
        assert simple(kind, 1e9, ranks) >= sent_bytes(kind, 1e9, hosts * inside) / 400e9
        assert simple(kind, 0.0, ranks) >= 3e-6


@given(kinds, groups(), whole, st.floats(1.0, 100.0))
def test_falls_or_stays_with_bandwidth_and_grows_or_stays_with_latency(
    kind: Collective, ranks: RankGroup, num_bytes: float, factor: float
) -> None:
    base = fastest_seconds(kind, num_bytes, ranks)
    assert np.isfinite(base) and base >= 0
    for name in ("in_host_bytes_per_s", "inter_host_bytes_per_s"):
        faster = replace(ranks, **{name: getattr(ranks, name) * factor})
        assert fastest_seconds(kind, num_bytes, faster) <= base * (1 + 1e-12)
    for name in ("in_host_latency_s", "inter_host_latency_s"):
        slower = replace(ranks, **{name: getattr(ranks, name) * factor})
        assert fastest_seconds(kind, num_bytes, slower) >= base * (1 - 1e-12)


@given(kinds, groups(), whole, st.floats(1.0, 100.0))
def test_grows_with_bytes(kind: Collective, ranks: RankGroup, num_bytes: float, factor: float) -> None:
    less, more = fastest_seconds(kind, np.array([1.0, factor]) * num_bytes, ranks)
    assert more >= less


@given(st.sampled_from(COLLECTIVES[:3]), groups(), whole, few)
def test_grows_or_stays_with_hosts(kind: Collective, ranks: RankGroup, num_bytes: float, more: int) -> None:
    """At fixed bytes and as many members in each host; members in a host bring their own share of its network."""
    larger = replace(ranks, ranks=ranks.ranks * more)
    base = fastest_seconds(kind, num_bytes, ranks)
    assert fastest_seconds(kind, num_bytes, larger) >= base * (1 - 1e-12)


@given(st.sampled_from(COLLECTIVES[:3]), groups(), whole)
def test_grows_or_stays_with_ranks_in_one_host(kind: Collective, ranks: RankGroup, num_bytes: float) -> None:
    count = np.arange(1, 17)
    inside = replace(ranks, ranks=count, ranks_in_host=count)
    assert np.all(np.diff(fastest_seconds(kind, num_bytes, inside)) >= 0)


@given(groups(), whole)
def test_an_all_to_all_is_never_dearer_than_the_all_gather(ranks: RankGroup, num_bytes: float) -> None:
    gathered = fastest_seconds("all_gather", num_bytes, ranks)
    assert fastest_seconds("all_to_all", num_bytes, ranks) <= gathered * (1 + 1e-12)


@pytest.mark.parametrize("kind", COLLECTIVES)
@given(ranks=groups(), num_bytes=whole, count=st.integers(2, 64))
def test_links_inside_a_host_are_never_dearer_than_those_between(
    kind: Collective, ranks: RankGroup, num_bytes: float, count: int
) -> None:
    """The same ranks in one host, and one in each of as many hosts, by one protocol."""
    inside, apart = (replace(ranks, ranks=count, ranks_in_host=near) for near in (count, 1))
    assert simple(kind, num_bytes, inside) <= simple(kind, num_bytes, apart) * (1 + 1e-12)


@given(kinds, groups(), whole, st.integers(2, 64))
def test_the_fastest_protocol_is_never_dearer_inside_a_host(
    kind: Collective, ranks: RankGroup, num_bytes: float, count: int
) -> None:
    """Protocols shorten hops between hosts more than hops in a host, by NCCL's table. Hops in a host must be shorter by
    as much (NVLink's 3.4 µs are a quarter of a network's 14), or they become the slower ones."""
    short = min(float(ranks.in_host_latency_s), LATENCY_RATIO * float(ranks.inter_host_latency_s))
    inside, apart = (replace(ranks, ranks=count, ranks_in_host=near, in_host_latency_s=short) for near in (count, 1))
    assert fastest_seconds(kind, num_bytes, inside) <= fastest_seconds(kind, num_bytes, apart) * (1 + 1e-12)


def test_a_host_with_hops_as_long_as_the_networks_is_the_slower_one() -> None:
    """ll128 takes 1.9/3.4 of a hop in a host and 4/14 of a hop between hosts, so that 30 ranks in one host may wait
    longer than 30 ranks of as many hosts with nearly the same links."""
    links = {"in_host_bytes_per_s": 76.8e9, "inter_host_bytes_per_s": 49.6e9}
    hops = {"in_host_latency_s": 9.93e-5, "inter_host_latency_s": 1e-4}
    inside, apart = (fastest_seconds("all_gather", 1e8, group(*shape, **links, **hops)) for shape in ((1, 30), (30, 1)))
    assert inside > apart


@given(groups(), whole)
def test_an_all_reduce_is_its_halves_in_rings(ranks: RankGroup, num_bytes: float) -> None:
    gather, scatter, both = (simple(kind, num_bytes, ranks) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    assert gather == scatter
    assert both == pytest.approx(gather + scatter)


@pytest.mark.parametrize("kind", COLLECTIVES[:3])
@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_one_tier_is_the_ring_of_the_search(kind: Collective, count: int) -> None:
    """2(N-1)/N·S bytes and 2(N-1)α; half of both for the halves."""
    ring = Ring(ranks=count, bytes_per_s=50e9, latency_s=14e-6)
    found = simple(kind, 3e8, group(count, 1))
    assert found == pytest.approx(ring.seconds(kind, 3e8) + ring.latency_of(kind))
    k = 2 if kind == "all_reduce" else 1
    assert found == pytest.approx(k * (count - 1) * (3e8 / count / 50e9 + 14e-6))
    inside = simple(kind, 3e8, group(1, count))
    assert inside == pytest.approx(sent_bytes(kind, 3e8, count) / 400e9 + k * (count - 1) * 3e-6)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_rank_sends_nothing(kind: Collective) -> None:
    assert fastest_seconds(kind, 3e8, group(1, 1)) == 0.0


def test_every_member_brings_its_share_of_the_hosts_network() -> None:
    """8 members have the network of 8 devices, as far as their links in the host let it through."""
    for members in (1, 2, 4, 8):
        assert group(4, members).host_bytes_per_s == members * 50e9
    assert group(4, 8, in_host_bytes_per_s=10e9).host_bytes_per_s == 8 * 10e9
    assert group(4, 1, in_host_bytes_per_s=10e9).host_bytes_per_s == 50e9


def test_a_ring_through_hosts_uses_every_card() -> None:
    """8 members of each of 4 hosts bring 8 × 50 GB/s; hops inside and between hosts as NCCL counts them."""
    found = simple("all_reduce", 1e9, group(4, 8))
    assert found == pytest.approx(2 * (31 / 32 * 1e9 / 400e9 + 28 * 3e-6 + 3 * 14e-6))
    two = simple("all_reduce", 1e9, group(4, 2))
    assert two == pytest.approx(2 * (7 / 8 * 1e9 / 100e9 + 4 * 3e-6 + 3 * 14e-6))


def test_all_to_all_by_tier() -> None:
    """Of the 32 parts that a rank holds 24 leave the host over its own card, 7 stay inside, at the same time."""
    part = 1e9 / 32 / 32
    found = simple("all_to_all", 1e9, group(4, 8))
    assert found == pytest.approx(max(24 * part / 50e9, 7 * part / 400e9) + 14e-6)
    assert simple("all_to_all", 1e9, group(1, 8)) == pytest.approx(7 / 64 * 1e9 / 400e9 + 3e-6)


def test_small_tensors_take_the_protocol_of_the_shortest_hops() -> None:
    """NCCL's ll for small tensors, its simple protocol for large ones."""
    ranks = group(8, 8)
    hops = 2 * (56 * 3e-6 * 0.6 / 3.4 + 7 * 14e-6 * 2.7 / 14.0)
    assert fastest_seconds("all_reduce", 1.0, ranks) == pytest.approx(hops, rel=1e-6)
    large = fastest_seconds("all_reduce", 4e10, ranks)
    assert large == pytest.approx(simple("all_reduce", 4e10, ranks))


def test_arrays_are_each_by_itself() -> None:
    hosts, inside, num_bytes = np.array([1, 2, 8]), np.array([[1], [2], [8]]), 1e7
    ranks = replace(group(1, 1), ranks=hosts * inside, ranks_in_host=inside)
    for kind in COLLECTIVES:
        found = fastest_seconds(kind, num_bytes, ranks)
        assert np.shape(found) == (3, 3)
        for i, j in np.ndindex(3, 3):
            one = fastest_seconds(kind, num_bytes, group(int(hosts[j]), int(inside[i, 0])))
            assert found[i, j] == pytest.approx(one)
        assert found[0, 0] == 0.0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="no collective 'allreduce'; did you mean 'all_reduce'"):
        fastest_seconds("allreduce", 1.0, group(1, 8))  # type: ignore[arg-type]


@given(st.integers(1, 1024), whole)
def test_what_training_sends(ranks: int, num_bytes: float) -> None:
    """Data parallel and ZeRO-1, 2: 2P a micro-batch; ZeRO-3: 3P; sequence parallelism as much as tensor parallelism."""
    reduced, gathered, scattered = (
        sent_bytes(kind, num_bytes, ranks) for kind in ("all_reduce", "all_gather", "reduce_scatter")
    )
    assert reduced == pytest.approx(2 * num_bytes * (ranks - 1) / ranks)
    assert gathered + scattered == pytest.approx(reduced)
    assert 2 * gathered + scattered == pytest.approx(1.5 * reduced)
    assert 4 * reduced == pytest.approx(4 * gathered + 4 * scattered)
