"""Who communicates with whom over which link: members per host, strides, and a host's network shared by its groups."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autopar.cost_model.machine.collectives import seconds
from autopar.cost_model.machine.process_group import group_of
from autopar.ir.cluster import ClusterSpec
from autopar.ir.device import HostGroup, Link

CLUSTER = ClusterSpec.preset("64xh100")  # 8 hosts of 8, 50 GB/s per device between hosts
NETWORK = 50e9
PP, DP_SHARD, TP = 0, 2, 5  # of pp, dp_replicate, dp_shard, cp, ep, tp


def by_enumeration(sizes: tuple[int, ...], index: int, per_host: int) -> tuple[set[int], set[int]]:
    """Members per host and hosts of every group of a mesh dimension, rank by rank."""
    members, hosts = set(), set()
    others = [range(size) if i != index else range(1) for i, size in enumerate(sizes)]
    for place in product(*others):
        ranks = []
        for number in range(sizes[index]):
            rank = 0
            for i, size in enumerate(sizes):
                rank = rank * size + (number if i == index else place[i])
            ranks.append(rank // per_host)
        members |= {ranks.count(host) for host in ranks}
        hosts.add(len(set(ranks)))
    return members, hosts


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 64, 1, 1, 1),
        (1, 1, 8, 1, 1, 8),
        (2, 2, 4, 1, 1, 4),
        (4, 1, 8, 1, 1, 2),
        (2, 1, 2, 2, 2, 4),
        (32, 1, 1, 1, 1, 2),
    ],
)
def test_members_per_host_as_counted_rank_by_rank(sizes: tuple[int, ...]) -> None:
    for index, size in enumerate(sizes):
        group = group_of(CLUSTER, sizes, index)
        assert group.ranks == size
        assert by_enumeration(sizes, index, 8) == ({group.ranks_in_host}, {group.hosts})


def test_groups_that_do_not_fill_hosts() -> None:
    """12 ranks need two hosts of 8, a group of 6 may lie across two, as does one of 3 with stride 3."""
    twelve = group_of(CLUSTER, (1, 1, 12, 1, 1, 1), DP_SHARD)
    assert (twelve.ranks_in_host, twelve.hosts) == (6, 2)
    six = group_of(CLUSTER, (1, 1, 1, 1, 1, 6), TP)
    assert (six.ranks_in_host, six.hosts) == (3, 2)
    assert group_of(ClusterSpec.preset("6xh100"), (1, 1, 1, 1, 1, 6), TP).hosts == 1
    assert group_of(CLUSTER, (1, 1, 3, 1, 1, 3), DP_SHARD).hosts == 2


def test_every_member_brings_its_share_of_the_hosts_network() -> None:
    """With tp = 8 in a host 8 groups have one card's share each, with tp = 4 four have two; without tp one has all."""
    for tp in (8, 4, 2, 1):
        group = group_of(CLUSTER, (1, 1, 64 // tp, 1, 1, tp), DP_SHARD)
        assert group.groups_in_host == tp
        assert group.host_bytes_per_s == pytest.approx(NETWORK * 8 / tp)


def test_fewer_groups_at_once_have_more_and_several_dimensions_less() -> None:
    group = group_of(CLUSTER, (1, 1, 8, 1, 1, 8), DP_SHARD)
    alone, crowded = (replace(group, groups_in_host=count) for count in (1, 16))
    assert (alone.host_bytes_per_s, crowded.host_bytes_per_s) == (8 * NETWORK, NETWORK / 2)
    times = [seconds("all_gather", 1e9, each) for each in (alone, group, crowded)]
    assert times == sorted(times) and len(set(times)) == 3


def test_the_spine_is_met_beyond_the_leaf() -> None:
    host = HostGroup(num_hosts=16, devices_per_host=8, device=CLUSTER.devices[0], in_host=CLUSTER.groups[0].in_host)
    link, spine = Link(bytes_per_s=50e9, latency_s=1e-5), Link(bytes_per_s=20e9, latency_s=2e-5)
    cluster = ClusterSpec(name="two tiers", groups=(host,), inter_host=link, spine=spine, hosts_per_leaf=4)
    near, far = (group_of(cluster, (1, 1, dp, 1, 1, 8), DP_SHARD) for dp in (4, 5))
    assert (near.inter_host_bytes_per_s, near.inter_host_latency_s) == (50e9, 1e-5)
    assert (far.inter_host_bytes_per_s, far.inter_host_latency_s) == (20e9, 2e-5)


def test_arrays_of_degrees() -> None:
    tp = np.array([1, 2, 4, 8, 16])
    sizes = (1, 1, 64 // tp, 1, 1, tp)
    for index in (DP_SHARD, TP):
        found = group_of(CLUSTER, sizes, index)
        for i, degree in enumerate(tp):
            one = group_of(CLUSTER, (1, 1, 64 // int(degree), 1, 1, int(degree)), index)
            for name in ("ranks", "ranks_in_host", "inter_host_bytes_per_s", "groups_in_host", "host_bytes_per_s"):
                assert np.broadcast_to(getattr(found, name), 5)[i] == getattr(one, name)


def test_one_device_and_meshes_beyond_the_cluster() -> None:
    one = group_of(ClusterSpec.preset("1xcpu"), (1, 1, 1, 1, 1, 1), TP)
    assert seconds("all_reduce", 1e9, one) == 0.0
    host = ClusterSpec.preset("8xh100")
    beyond = group_of(host, (1, 1, 2, 1, 1, 8), DP_SHARD)
    assert beyond.hosts == 2
    assert beyond.inter_host_bytes_per_s == host.link(0, 1).bytes_per_s
