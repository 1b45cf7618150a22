"""A part of a cluster: its first hosts, or some devices of one of them, as a cluster of its own.

Objectives other than time may be better on fewer devices. A part of several hosts has the links between them. A part of
one host has no such links, and hosts under one leaf switch have no spine. Without a switch inside a host, devices are
linked pair by pair. Then k of n devices have (k-1)/(n-1) of a device's bandwidth among themselves.
"""

from collections.abc import Iterator
from dataclasses import replace

from autopar.ir.cluster import ClusterSpec
from autopar.ir.device import HostGroup
from autopar.search.space.dimensions import divisors


def device_counts(cluster: ClusterSpec) -> tuple[int, ...]:
    """Numbers of devices of the parts that a plan may use: divisors of a host's devices, whole hosts, all of them."""
    whole, counts = 0, set(divisors(cluster.groups[0].devices_per_host))
    for group in cluster.groups:
        counts |= {whole + (i + 1) * group.devices_per_host for i in range(group.num_hosts)}
        whole += group.num_devices
    return tuple(sorted(counts))


def part_of(cluster: ClusterSpec, num_devices: int) -> ClusterSpec:
    """The first `num_devices` devices, which must be one of `device_counts`."""
    if num_devices == cluster.num_devices:
        return cluster
    groups = tuple(_first_groups(cluster, num_devices))
    num_hosts = sum(group.num_hosts for group in groups)
    assert sum(group.num_devices for group in groups) == num_devices, (cluster, num_devices)
    has_spine = cluster.hosts_per_leaf is not None and num_hosts > cluster.hosts_per_leaf
    return replace(
        cluster,
        name=f"{num_devices} devices of {cluster.name}",
        groups=groups,
        inter_host=cluster.inter_host if num_hosts > 1 else None,
        spine=cluster.spine if has_spine else None,
        hosts_per_leaf=cluster.hosts_per_leaf if has_spine else None,
    )


def _first_groups(cluster: ClusterSpec, num_devices: int) -> Iterator[HostGroup]:
    left = num_devices
    for group in cluster.groups:
        if left >= group.devices_per_host:
            hosts = min(group.num_hosts, left // group.devices_per_host)
            left -= hosts * group.devices_per_host
            yield replace(group, num_hosts=hosts)
        elif left:
            yield _of_one_host(group, left)
            left = 0


def _of_one_host(group: HostGroup, num_devices: int) -> HostGroup:
    link = group.in_host
    if link is not None and not link.is_switched and num_devices > 1:
        share = (num_devices - 1) / (group.devices_per_host - 1)
        link = replace(link, bytes_per_s=link.bytes_per_s * share)
    return replace(group, num_hosts=1, devices_per_host=num_devices, in_host=link if num_devices > 1 else None)
