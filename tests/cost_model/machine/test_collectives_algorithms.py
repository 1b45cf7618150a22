"""Algorithms of collectives on two tiers: published formulas, properties that hold whatever the figures, the choice."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from autopar.cost_model.machine.collectives import (
    EVERY,
    GLOO,
    NCCL,
    Algorithm,
    Collective,
    Ring,
    Transfer,
    seconds,
    seconds_by_algorithm,
    sent_bytes,
)
from autopar.cost_model.machine.process_group import Group
from autopar.errors import InputError

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
TRANSFERS: tuple[Transfer, ...] = (*COLLECTIVES, "send")
LIBRARIES = (NCCL, GLOO, EVERY)


def group(hosts: int, in_host: int, **figures: Any) -> Group:
    """`hosts` × `in_host` ranks of hosts of 8 devices or more, all devices communicating."""
    per_host = max(8, in_host)
    standard = Group(
        ranks=hosts * in_host,
        ranks_in_host=in_host,
        in_host_bytes_per_s=400e9,
        in_host_latency_s=3e-6,
        inter_host_bytes_per_s=50e9,
        inter_host_latency_s=14e-6,
        devices_per_host=per_host,
        groups_in_host=per_host / in_host,
    )
    return replace(standard, **figures)


sizes = st.integers(1, 64)
few = st.integers(1, 16)
whole = st.floats(1.0, 1e11)
bandwidths = st.floats(1e8, 1e12)
latencies = st.floats(1e-7, 1e-4)


@st.composite
def groups(draw: Any) -> Group:
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
        reduces_in_switch=draw(st.booleans()),
    )


kinds = st.sampled_from(TRANSFERS)
libraries = st.sampled_from(LIBRARIES)


@given(kinds, libraries, groups(), whole, st.floats(1.0, 100.0))
def test_falls_or_stays_with_bandwidth_and_grows_or_stays_with_latency(
    kind: Transfer, library: Any, ranks: Group, num_bytes: float, factor: float
) -> None:
    base = seconds(kind, num_bytes, ranks, library=library)
    assert np.isfinite(base) and base >= 0
    for name in ("in_host_bytes_per_s", "inter_host_bytes_per_s"):
        faster = replace(ranks, **{name: getattr(ranks, name) * factor})
        assert seconds(kind, num_bytes, faster, library=library) <= base * (1 + 1e-12)
    for name in ("in_host_latency_s", "inter_host_latency_s", "groups_in_host"):
        slower = replace(ranks, **{name: getattr(ranks, name) * factor})
        assert seconds(kind, num_bytes, slower, library=library) >= base * (1 - 1e-12)


@given(kinds, libraries, groups(), whole, st.floats(1.0, 100.0))
def test_grows_with_bytes(kind: Transfer, library: Any, ranks: Group, num_bytes: float, factor: float) -> None:
    less, more = seconds(kind, np.array([1.0, factor]) * num_bytes, ranks, library=library)
    assert more >= less


@given(st.sampled_from(COLLECTIVES[:3]), libraries, groups(), whole, few)
def test_grows_or_stays_with_hosts(kind: Collective, library: Any, ranks: Group, num_bytes: float, more: int) -> None:
    """At fixed bytes and as many members in each host; members in a host bring their own share of its network."""
    larger = replace(ranks, ranks=ranks.ranks * more)
    base = seconds(kind, num_bytes, ranks, library=library)
    assert seconds(kind, num_bytes, larger, library=library) >= base * (1 - 1e-12)


@given(st.sampled_from(COLLECTIVES[:3]), libraries, groups(), whole)
def test_grows_or_stays_with_ranks_in_one_host(kind: Collective, library: Any, ranks: Group, num_bytes: float) -> None:
    count = np.arange(1, 17)
    inside = replace(ranks, ranks=count, ranks_in_host=count, groups_in_host=1)
    assert np.all(np.diff(seconds(kind, num_bytes, inside, library=library)) >= 0)


@given(libraries, groups(), whole)
def test_an_all_to_all_is_never_dearer_than_the_all_gather(library: Any, ranks: Group, num_bytes: float) -> None:
    gathered = seconds("all_gather", num_bytes, ranks, library=library)
    assert seconds("all_to_all", num_bytes, ranks, library=library) <= gathered * (1 + 1e-12)


@given(kinds, libraries, groups(), whole, st.integers(2, 64))
def test_links_inside_a_host_are_never_dearer_than_those_between(
    kind: Transfer, library: Any, ranks: Group, num_bytes: float, count: int
) -> None:
    """The same ranks in one host, and one in each of as many; without the trees of halves, which cross hosts only."""
    if library is EVERY:
        library = NCCL
    inside = replace(ranks, ranks=count, ranks_in_host=count, groups_in_host=1, devices_per_host=count)
    apart = replace(ranks, ranks=count, ranks_in_host=1, groups_in_host=8, devices_per_host=8)
    between = seconds(kind, num_bytes, apart, library=library)
    assert seconds(kind, num_bytes, inside, library=library) <= between * (1 + 1e-12)


@given(groups(), whole)
def test_all_reduce_is_its_halves_in_rings_and_hierarchies(ranks: Group, num_bytes: float) -> None:
    algorithms: tuple[Algorithm, ...] = ("ring", "hierarchical")
    for algorithm in algorithms:
        gather, scatter, both = (
            seconds(kind, num_bytes, ranks, algorithm, library=GLOO)
            for kind in ("all_gather", "reduce_scatter", "all_reduce")
        )
        assert gather == scatter
        assert both == pytest.approx(gather + scatter)


@pytest.mark.parametrize("kind", COLLECTIVES[:3])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_one_tier_is_the_ring_of_the_search(kind: Collective, count: int) -> None:
    """2(N-1)/N·S bytes and 2(N-1)α; half of both for the halves."""
    ring = Ring(ranks=count, bytes_per_s=50e9, latency_s=14e-6)
    found = seconds(kind, 3e8, group(count, 1), library=GLOO)
    assert found == pytest.approx(ring.seconds(kind, 3e8))
    k = 2 if kind == "all_reduce" else 1
    assert found == pytest.approx(k * (count - 1) * (3e8 / count / 50e9 + 14e-6))
    inside = seconds(kind, 3e8, group(1, count), library=GLOO)
    assert inside == pytest.approx(sent_bytes(kind, 3e8, count) / 400e9 + k * (count - 1) * 3e-6)


def test_a_ring_through_hosts_uses_every_card() -> None:
    """8 members of each of 4 hosts bring 8 × 50 GB/s; hops inside and between hosts as NCCL counts them."""
    found = seconds("all_reduce", 1e9, group(4, 8), "ring", library=GLOO)
    assert found == pytest.approx(2 * (31 / 32 * 1e9 / 400e9 + 28 * 3e-6 + 3 * 14e-6))
    two = seconds("all_reduce", 1e9, group(4, 2), "ring", library=GLOO)
    assert two == pytest.approx(2 * (7 / 8 * 1e9 / 100e9 + 4 * 3e-6 + 3 * 14e-6))


def test_trees_have_logarithmic_latency_and_win_for_small_tensors() -> None:
    """2(⌈log2 g⌉α + ⌈log2 h⌉β), and 2S over each link, of which NCCL counts 0.92; the ring wins for large tensors."""
    for hosts in (2, 8, 64, 1024):
        small = seconds("all_reduce", 0.0, group(hosts, 8), "tree", library=GLOO)
        assert small == pytest.approx(2 * (3 * 3e-6 + np.log2(hosts) * 14e-6))
    ranks = group(64, 8)
    moved = seconds("all_reduce", 1e9, ranks, "tree", library=GLOO) - seconds(
        "all_reduce", 0.0, ranks, "tree", library=GLOO
    )
    assert moved == pytest.approx(2 * 1e9 / (0.92 * 400e9))
    chosen = [_fastest("all_reduce", size, ranks) for size in (1e3, 1e6, 4e10)]
    assert [name.partition("/")[0] for name in chosen] == ["tree", "tree", "ring"]
    assert chosen[0] == "tree/ll" and chosen[2] == "ring/simple"


def _fastest(kind: Transfer, num_bytes: float, ranks: Group) -> str:
    found = seconds_by_algorithm(kind, num_bytes, ranks)
    return min(found, key=lambda name: found[name])


def test_hierarchical_collectives_by_hand() -> None:
    """4 hosts of 8: in the host 7/8 of S over its links, between hosts 3/4 of an eighth on each rail."""
    ranks, size = group(4, 8, inter_host_bytes_per_s=25e9), 1e9
    gather = 7 / 8 * size / 400e9 + 3 / 4 * (size / 8) / 25e9 + 7 * 3e-6 + 3 * 14e-6
    assert seconds("all_gather", size, ranks, "hierarchical", library=GLOO) == pytest.approx(gather)
    assert seconds("all_reduce", size, ranks, "hierarchical", library=GLOO) == pytest.approx(2 * gather)
    exchanged = 7 / 8 * (size / 32) / 400e9 + 3 / 4 * (size / 32) / 25e9 + 3e-6 + 14e-6
    assert seconds("all_to_all", size, ranks, "hierarchical", library=GLOO) == pytest.approx(exchanged)


def test_all_to_all_by_tier_and_send() -> None:
    """Of the 32 parts that a rank holds 24 leave the host over its own card, 7 stay inside, at the same time."""
    part = 1e9 / 32 / 32
    ranks = group(4, 8)
    assert seconds("all_to_all", 1e9, ranks, library=GLOO) == pytest.approx(
        max(24 * part / 50e9, 7 * part / 400e9) + 14e-6
    )
    assert seconds("all_to_all", 1e9, group(1, 8), library=GLOO) == pytest.approx(7 / 64 * 1e9 / 400e9 + 3e-6)
    assert seconds("send", 1e8, group(4, 1), library=GLOO) == pytest.approx(1e8 / 50e9 + 14e-6)
    assert seconds("send", 1e8, group(1, 4), library=GLOO) == pytest.approx(1e8 / 400e9 + 3e-6)


def test_sums_in_the_switch_are_a_named_mechanism() -> None:
    """NVLink SHARP: an all-reduce in one host at twice the bus bandwidth; nothing where the switch cannot."""
    plain, sums = group(1, 8), group(1, 8, reduces_in_switch=True)
    assert seconds("all_reduce", 1e9, plain, "switch") == np.inf
    expected = 7 / 8 * 1e9 / 400e9 + 7 * 3e-6
    assert seconds("all_reduce", 1e9, sums, "switch") == pytest.approx(expected)
    assert seconds("all_reduce", 1e9, sums) <= seconds("all_reduce", 1e9, plain)
    assert _fastest("all_reduce", 1e9, sums) == "switch/simple"
    assert seconds("all_gather", 1e9, group(2, 8, reduces_in_switch=True), "switch") == np.inf


def test_parallel_aggregated_trees_have_one_rank_per_host() -> None:
    assert seconds("all_gather", 0.0, group(16, 1), "tree", library=GLOO) == pytest.approx(4 * 14e-6)
    assert seconds("all_gather", 0.0, group(16, 2), "tree", library=GLOO) == np.inf


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_arrays_are_each_by_itself(library: Any) -> None:
    hosts, inside, num_bytes = np.array([1, 2, 8]), np.array([[1], [2], [8]]), 1e7
    ranks = replace(group(1, 1), ranks=hosts * inside, ranks_in_host=inside, groups_in_host=8 / inside)
    for kind in TRANSFERS:
        found = seconds(kind, num_bytes, ranks, library=library)
        assert np.shape(found) == (3, 3)
        for i, j in np.ndindex(3, 3):
            one = seconds(kind, num_bytes, group(int(hosts[j]), int(inside[i, 0])), library=library)
            assert found[i, j] == pytest.approx(one)
        assert found[0, 0] == 0.0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="no transfer 'allreduce'; did you mean 'all_reduce'"):
        seconds("allreduce", 1.0, group(1, 8))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no algorithm 'rings'; did you mean 'ring'"):
        seconds("all_reduce", 1.0, group(1, 8), "rings")  # type: ignore[arg-type]


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
