"""The cluster of a program: hosts × devices, their peaks, memories and links, in SI units.

A cluster is a sequence of `HostGroup`s; ranks are numbered group by group, host by host, device by device. Traffic
between two ranks crosses one *tier*: ``in_host``, ``inter_host`` (the leaf switch) or ``spine``. Every bandwidth is per
device and per direction; every latency is per hop of a collective. Figures that were not given but assumed are listed
in `ClusterSpec.assumptions`, and belong in every output that rests on them.

This module does not import torch: planning and listing do not need it.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autopar.errors import ClusterError, Problem
from autopar.files.strict_yaml import read_yaml, write_yaml
from autopar.files.units import from_entry, in_file
from autopar.ir.device import Device, DeviceType, HostGroup, Link, device_of_preset

__all__ = ["ClusterSpec", "ClusterWarning", "Device", "HostGroup", "Link", "Tier"]

Tier = Literal["in_host", "inter_host", "spine"]
_MAX_DEVICES = 10_000_000
_PRESET = re.compile(r"([0-9]{1,8})x([a-z0-9][a-z0-9._-]{0,39})")


class ClusterWarning(UserWarning):
    """A value of a cluster file is legal but unlike any known hardware."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ClusterSpec:
    """The hosts, devices and links of a cluster, in SI units.

    Make one by `preset`, `load`, `detect` or `parse`, or name all fields.

    Example:
        >>> cluster = autopar.ClusterSpec.preset("16xh100")
        >>> cluster.num_hosts, cluster.num_devices, cluster.backend
        (2, 16, 'nccl')
    """

    name: str
    groups: tuple[HostGroup, ...]  # ranks are numbered group by group, host by host, device by device
    inter_host: Link | None = None  # between hosts under one leaf switch; None for a single host
    spine: Link | None = None  # between hosts under different leaf switches
    hosts_per_leaf: int | None = None
    profile: str | None = None  # the device profile of predictions: a shipped name, or the absolute path of a file
    assumptions: tuple[str, ...] = ()  # figures that nobody gave or measured

    def __post_init__(self) -> None:
        for name in ("groups", "assumptions"):  # a list has no hash
            object.__setattr__(self, name, tuple(getattr(self, name)))
        problems = []
        if not self.groups:
            raise ClusterError("a cluster needs at least one group of hosts")
        for index, group in enumerate(self.groups):
            if group.in_host is None and group.devices_per_host > 1:
                rule = "is required for a device that is not a preset"
                problems.append(Problem(path=f"groups[{index}].in_host", rule=rule))
        if self.num_hosts > 1 and self.inter_host is None:
            problems.append(Problem(path="inter_host", rule=f"is required for {self.num_hosts} hosts"))
        if (self.spine is None) != (self.hosts_per_leaf is None):
            problems.append(Problem(path="spine", rule="spine and hosts_per_leaf must be given together"))
        elif self.hosts_per_leaf is not None and not 1 <= self.hosts_per_leaf <= self.num_hosts:
            rule = f"must be from 1 to the number of hosts, {self.num_hosts}"
            problems.append(Problem(path="spine.hosts_per_leaf", value=self.hosts_per_leaf, rule=rule))
        if len({group.device.device_type for group in self.groups}) > 1:
            rule = "the groups' devices must be all cuda or all cpu: one process group has one backend"
            problems.append(Problem(path="groups", rule=rule))
        if self.num_devices > _MAX_DEVICES:
            rule = f"at most {_MAX_DEVICES:,} devices in all"
            problems.append(Problem(path="groups", value=self.num_devices, rule=rule))
        if problems:
            raise ClusterError(f"cluster {self.name!r} cannot be used", problems)

    # ---- making one ----

    @classmethod
    def preset(cls, text: str) -> ClusterSpec:
        """Make a cluster of a known device, such as ``4xcpu``, ``8xh100`` or ``64xa100-80gb``.

        More devices than the device's usual host holds make several full hosts.

        Args:
            text: ``<n>x<device>``. ``autopar clusters`` lists the devices.

        Returns:
            The cluster, with the figures of the device's data sheet.

        Raises:
            ClusterError: The device is unknown, or the number does not fill whole hosts. The message names the nearest
                number that does.

        Example:
            >>> autopar.ClusterSpec.preset("8xh100")
            ClusterSpec('8xh100': 1x8 h100-sxm; nccl)
        """
        from autopar.ir.device_presets import device_names, device_preset

        match = _PRESET.fullmatch(text.strip().lower())
        if match is None:
            hint = f"did you mean '8x{text}'?" if text.lower() in device_names() else "for example 8xh100 or 4xcpu"
            raise ClusterError(f"a cluster is <n>x<device> or a YAML file; got {text[:80]!r} ({hint})")
        num_devices, preset = int(match[1]), device_preset(match[2])
        per_host = min(num_devices, int(preset.devices_per_host.value))
        if num_devices < 1 or num_devices > _MAX_DEVICES:
            raise ClusterError(f"{text}: the number of devices must be from 1 to {_MAX_DEVICES:,}")
        if num_devices % per_host:
            below = num_devices - num_devices % per_host
            raise ClusterError(
                f"{text}: {num_devices} devices do not fill hosts of {per_host}; "
                f"use {below} or {below + per_host}, or write a cluster file with hosts of another size"
            )
        num_hosts = num_devices // per_host
        group = HostGroup(
            num_hosts=num_hosts,
            devices_per_host=per_host,
            device=device_of_preset(preset),
            in_host=from_entry(Link, preset.in_host),
        )
        several = num_hosts > 1
        skipped = () if several else ("inter_host", "devices_per_host")
        assumptions = tuple(a for a in preset.assumptions() if not any(f": {key}" in a for key in skipped))
        inter_host = from_entry(Link, preset.inter_host) if several else None
        return cls(name=text.strip().lower(), groups=(group,), inter_host=inter_host, assumptions=assumptions)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ClusterSpec:
        """Read a YAML cluster file (docs/clusters.md).

        A value unlike any known hardware is legal and gives a `ClusterWarning`.

        Args:
            path: The file.

        Returns:
            The cluster.

        Raises:
            ClusterError: The file cannot be used. The message lists every problem.

        Example:
            >>> autopar.ClusterSpec.preset("8xh100").dump("cluster.yaml")
            >>> autopar.ClusterSpec.load("cluster.yaml").num_devices
            8
        """
        what = f"cluster file {os.fspath(path)!r} cannot be used"
        return cls._of_content(*read_yaml(path), what, Path(path).stem, Path(path).parent)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ClusterSpec:
        """Make a cluster from the content of a cluster file.

        Args:
            content: The result of `to_dict`, or the mapping of a cluster file.

        Returns:
            The cluster.

        Raises:
            ClusterError: The content cannot be used. The message lists every problem.

        Example:
            >>> cluster = autopar.ClusterSpec.preset("8xh100")
            >>> autopar.ClusterSpec.from_dict(cluster.to_dict()) == cluster
            True
        """
        return cls._of_content(dict(content), [], "the cluster description cannot be used", "cluster", Path())

    @classmethod
    def parse(cls, text: str) -> ClusterSpec:
        """Make a cluster from a text of the command line.

        Args:
            text: ``detect``, the path of a YAML file, or a preset such as ``8xh100``.

        Returns:
            The cluster.

        Raises:
            ClusterError: The text names no cluster, or its file cannot be used.

        Example:
            >>> autopar.ClusterSpec.parse("4xcpu").num_devices
            4
        """
        if text == "detect":
            return cls.detect()
        if _PRESET.fullmatch(text.strip().lower()):  # whatever files lie in the current folder
            return cls.preset(text)
        is_file = text.lower().endswith((".yaml", ".yml")) or os.sep in text or os.path.isfile(text)
        if is_file and not os.path.exists(text):
            raise ClusterError(
                f"no cluster file {text!r}; write one (docs/clusters.md shows how), or name a preset: 64xh100"
            )
        return cls.load(text) if is_file else cls.preset(text)

    @classmethod
    def detect(cls) -> ClusterSpec:
        """Describe the devices of this job: the host's GPUs, or its CPU without GPUs.

        Under torchrun a host has LOCAL_WORLD_SIZE devices, and there are WORLD_SIZE / LOCAL_WORLD_SIZE equal hosts.
        Without torchrun the cluster is every GPU of this host. The driver gives the memory; the preset of the device
        gives the rest. A GPU without a preset gets the slowest preset's figures. `assumptions` lists every assumed
        figure. Torch is imported and CUDA is initialised.

        Returns:
            The cluster.

        Raises:
            ClusterError: Ranks outnumber the GPUs, or the GPUs of a host or the hosts differ.

        Example:
            >>> autopar.ClusterSpec.detect().num_devices >= 1
            True
        """
        from autopar.ir.cluster_detect import detected

        return cls(**detected(os.environ))

    @classmethod
    def _of_content(cls, content: object, problems: list[Problem], what: str, name: str, folder: Path) -> ClusterSpec:
        from autopar.ir.cluster_file import check_cluster, implausible, resolve

        entry, problems = check_cluster(content, problems, folder)
        if entry is None or problems:
            raise ClusterError(what, problems)
        try:
            cluster = cls(**resolve(entry, name, folder))
        except ClusterError as error:
            raise ClusterError(what, error.problems) from None
        for sentence in implausible(entry):
            warnings.warn(sentence, ClusterWarning, stacklevel=3)
        return cluster

    # ---- writing one ----

    def to_dict(self) -> dict[str, Any]:
        """Convert the cluster to the content of a cluster file that names no preset.

        Returns:
            Plain data. `from_dict` makes an equal cluster of it.

        Example:
            >>> autopar.ClusterSpec.preset("8xh100").to_dict()["version"]
            1
        """
        content: dict[str, Any] = {"version": 1} | in_file(self)
        if self.spine is not None:
            content["spine"]["hosts_per_leaf"] = content.pop("hosts_per_leaf")
        return content

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster as a YAML file, whole or not at all.

        Args:
            path: The file to write.

        Example:
            >>> autopar.ClusterSpec.preset("8xh100").dump("cluster.yaml")
        """
        write_yaml(path, self.to_dict())

    # ---- reading one ----

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return sum(group.num_hosts for group in self.groups)

    @property
    def num_devices(self) -> int:
        """The number of devices, which is the number of ranks."""
        return sum(group.num_devices for group in self.groups)

    @property
    def device_type(self) -> DeviceType:
        """What `torch.device` calls the devices ("cuda" for AMD's too)."""
        return self.groups[0].device.device_type

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """The torch.distributed backend: "gloo" on CPU, else "nccl"."""
        return "gloo" if self.device_type == "cpu" else "nccl"

    @property
    def devices(self) -> tuple[Device, ...]:
        """The distinct devices, in the order of the groups."""
        return tuple(dict.fromkeys(group.device for group in self.groups))

    @property
    def is_heterogeneous(self) -> bool:
        """Whether groups differ in device, devices of a host or link."""
        return len({(group.device, group.devices_per_host, group.in_host) for group in self.groups}) > 1

    @property
    def min_memory_bytes(self) -> int:
        """The memory of the smallest device."""
        return min(group.device.memory_bytes for group in self.groups)

    @property
    def price_usd_per_hour(self) -> float | None:
        """The whole cluster's price, or None when a group has none."""
        prices = [(group.price_usd_per_device_hour, group.num_devices) for group in self.groups]
        return None if any(p is None for p, _ in prices) else sum(p * n for p, n in prices if p is not None)

    @property
    def power_w(self) -> float | None:
        """The devices' power, or None when a device's is unknown. Hosts and switches come on top."""
        powers = [(group.device.power_w, group.num_devices) for group in self.groups]
        return None if any(p is None for p, _ in powers) else sum(p * n for p, n in powers if p is not None)

    def place_of(self, rank: int) -> tuple[HostGroup, int]:
        """The group of a rank, and the number of its host in the whole cluster. Raises IndexError for no such rank."""
        first_rank = first_host = 0
        for group in self.groups:
            if 0 <= rank - first_rank < group.num_devices:
                return group, first_host + (rank - first_rank) // group.devices_per_host
            first_rank += group.num_devices
            first_host += group.num_hosts
        raise IndexError(f"rank {rank} of a cluster of {self.num_devices} devices")

    def tier(self, rank: int, other: int) -> Tier:
        """The tier of links between two ranks. Raises IndexError for no such rank."""
        host, other_host = self.place_of(rank)[1], self.place_of(other)[1]
        if host == other_host:
            return "in_host"
        if self.hosts_per_leaf is None or host // self.hosts_per_leaf == other_host // self.hosts_per_leaf:
            return "inter_host"
        return "spine"

    def link(self, rank: int, other: int) -> Link:
        """The link between two ranks. Raises IndexError for no such rank."""
        tier = self.tier(rank, other)
        link = self.place_of(rank)[0].in_host if tier == "in_host" else getattr(self, tier)
        assert isinstance(link, Link), f"no {tier} link between ranks {rank} and {other}"
        return link

    def __repr__(self) -> str:
        parts = [f"{g.num_hosts}x{g.devices_per_host} {g.device.name}" for g in self.groups[:4]]
        more = ", ..." if len(self.groups) > 4 else ""
        return f"ClusterSpec({self.name!r}: {', '.join(parts)}{more}; {self.backend})"


def peak_flops_per_s(cluster: ClusterSpec, dtype: Any) -> float:
    """The slowest device's dense peak in a torch dtype. A dtype without a peak counts as float32."""
    name = str(dtype).removeprefix("torch.")

    def peak(peaks: Mapping[str, float]) -> float:
        return peaks.get(name) or peaks.get("float32") or max(peaks.values())

    return min(peak(device.peak_flops_per_s) for device in cluster.devices)


def memory_bytes_per_s(cluster: ClusterSpec) -> float:
    """The memory bandwidth of the slowest device."""
    return min(device.memory_bandwidth_bytes_per_s for device in cluster.devices)
