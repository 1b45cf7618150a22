"""The result of `autopar doctor` as values: checks, figures of every rank beside the cluster's, and slow ranks.

A rank is slow if its speed is more than a fifth below the median of its peers, in the median of all rounds and in the
best round. Each round is compared by itself, because a disturbance of a machine slows all its ranks at once. A rank
that was only disturbed has good rounds too. Peers are ranks with equal devices, or messages over the same tier. Of an
even number of peers the median is the faster of the middle two, so that of two ranks the slow one is named.

This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, Literal

from autopar.ir.cluster import ClusterSpec

if TYPE_CHECKING:
    from autopar.runtime.measure.doctor_speed import SpeedMeasurement

SLOW = 0.8  # of the median speed
Unit = Literal["FLOP/s", "B/s", "s"]
_LATENCY_BYTES = 1024  # a message this small measures latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A rank and where it runs."""

    rank: int
    host: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A comparison with one rank: the worst of `num_compared` differences, on which rank, and which is allowed."""

    name: str
    error: float | None  # None where something was missing, not a number, or of another shape
    tolerance: float
    where: str
    num_compared: int
    rank: int = 0

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.tolerance and self.num_compared > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """One figure of every rank, beside the cluster description's; None without one. `slow` has parts of the median."""

    name: str
    unit: Unit
    of_ranks: tuple[float | None, ...]
    of_cluster: tuple[float | None, ...]
    slow: Mapping[int, float] = field(default_factory=dict)

    @property
    def middle(self) -> float:
        return median(value for value in self.of_ranks if value is not None)

    @property
    def worst(self) -> tuple[int, float]:
        """The rank with the lowest speed, or the longest time, and its figure."""
        pairs = [(value, rank) for rank, value in enumerate(self.of_ranks) if value is not None]
        value, rank = max(pairs) if self.unit == "s" else min(pairs)
        return rank, value

    @property
    def promised(self) -> float | None:
        speeds = [value for value in self.of_cluster if value is not None]
        return median(speeds) if speeds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that was found."""

    cluster: str
    backend: str
    ranks: tuple[Rank, ...]
    checks: tuple[Check, ...]
    figures: tuple[_Figure, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every check is right; a slow rank is told, but is no error."""
        return all(check.passed for check in self.checks)

    @property
    def slow_ranks(self) -> dict[int, dict[str, float]]:
        """Per slow rank, the part of the median that it reaches, by figure."""
        slow: dict[int, dict[str, float]] = {}
        for figure in self.figures:
            for rank, part in figure.slow.items():
                slow.setdefault(rank, {})[figure.name] = part
        return dict(sorted(slow.items()))

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        for entry, check in zip(data["checks"], self.checks, strict=True):
            entry["passed"] = check.passed
        slow = {str(rank): parts for rank, parts in self.slow_ranks.items()}
        for entry in data["figures"]:
            entry["slow"] = {str(rank): part for rank, part in entry["slow"].items()}
        return {"passed": self.passed, "slow_ranks": slow} | data


def diagnose(
    cluster: ClusterSpec,
    parts: Sequence[tuple[Rank, Sequence[Check], Sequence["SpeedMeasurement"]]],
    notes: Sequence[str] = (),
) -> Diagnosis:
    """The diagnosis from every rank's checks and measurements."""
    ranks = tuple(rank for rank, _, _ in parts)
    by_check = zip(*(checks for _, checks, _ in parts), strict=True)
    measured: dict[str, dict[int, SpeedMeasurement]] = {}
    for rank, (_, _, speeds) in enumerate(parts):
        for speed in speeds:
            measured.setdefault(speed.name, {})[rank] = speed
    return Diagnosis(
        cluster=cluster.name,
        backend=cluster.backend,
        ranks=ranks,
        checks=tuple(_worst([replace(check, rank=r) for r, check in enumerate(every)]) for every in by_check),
        figures=tuple(_figure(cluster, ranks, name, speeds) for name, speeds in measured.items()),
        notes=tuple(notes),
    )


def _worst(checks: Sequence[Check]) -> Check:
    """The check of the rank that is farthest off; of equals, the first."""
    return max(checks, key=lambda c: (float("inf") if c.error is None else c.error - c.tolerance, -c.rank))


def _figure(
    cluster: ClusterSpec, ranks: Sequence[Rank], name: str, measured: Mapping[int, "SpeedMeasurement"]
) -> _Figure:
    first = next(iter(measured.values()))
    kind, amount = first.kind, first.amount
    is_latency = kind in ("all-reduce", "point-to-point") and amount < _LATENCY_BYTES
    unit: Unit = "s" if is_latency else "FLOP/s" if kind == "flops" else "B/s"
    # the bandwidth that a ring all-reduce of n ranks needs of every link, as NCCL's tests state it
    moved = 2 * (len(ranks) - 1) / len(ranks) * amount if kind == "all-reduce" else amount
    seconds = {rank: median(speed.rounds_s) for rank, speed in measured.items()}
    speeds = seconds if is_latency else {rank: moved / usual for rank, usual in seconds.items()}
    every = range(len(ranks))
    compared = kind != "all-reduce" and not is_latency  # all ranks of a collective take as long as the slowest
    return _Figure(
        name=name,
        unit=unit,
        of_ranks=tuple(speeds.get(rank) for rank in every),
        of_cluster=tuple(_promised(cluster, rank, measured.get(rank), is_latency) for rank in every),
        slow=_slow(cluster, ranks, measured) if compared else {},
    )


def _promised(cluster: ClusterSpec, rank: int, speed: "SpeedMeasurement | None", is_latency: bool) -> float | None:
    """The figure of a rank in the cluster description."""
    device = cluster.place_of(rank)[0].device
    if speed is None:
        return None
    if speed.kind == "flops":
        return device.peak_flops_per_s.get(speed.name.rpartition(" ")[2])
    if speed.kind == "copy":
        return device.memory_bandwidth_bytes_per_s
    if speed.peer is not None:
        link = cluster.link(rank, speed.peer)
        return link.latency_s if is_latency else link.bytes_per_s
    if is_latency:
        return None  # it depends on the algorithm how many hops there are
    size = cluster.num_devices
    return min(cluster.link(r, (r + 1) % size).bytes_per_s for r in range(size))


def _slow(cluster: ClusterSpec, ranks: Sequence[Rank], measured: Mapping[int, "SpeedMeasurement"]) -> dict[int, float]:
    """The ranks below `SLOW` of the median speed of their peers, with the part that they reach."""
    peers: dict[str, list[int]] = {}
    for rank, speed in measured.items():
        group = ranks[rank].device if speed.peer is None else cluster.tier(rank, speed.peer)
        peers.setdefault(group, []).append(rank)
    slower = {}
    for pair in peers.values():
        rounds = list(zip(*(measured[rank].rounds_s for rank in pair), strict=True))
        best = [min(measured[rank].rounds_s) for rank in pair]
        for index, rank in enumerate(pair):
            usual = median(median_low(times) / times[index] for times in rounds)
            at_best = median_low(best) / best[index]
            if max(usual, at_best) < SLOW:
                slower[rank] = usual
    return slower
