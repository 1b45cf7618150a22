"""The objective of a search: the value of a plan, and a lower bound of the value for every candidate.

    time      seconds of a step cost      seconds · US dollars a second of the devices used
    energy    seconds · watts of the devices used (not those of hosts, switches and cooling)
    memory    bytes of the fullest rank, as little as recomputation can make it

If the batch of a data-parallel rank is fixed, the first three values are per sequence, because plans with more
data-parallel ranks train more sequences in a step. For cost and energy, fewer devices may be better. Therefore every
part of the cluster (`autopar.search.space.subcluster`) is a `Part` with its own links, memory and price.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.errors import InputError, Problem, did_you_mean
from autopar.ir.arrays import Floats
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.search.bounds.lower_bounds import Machinery, Screening
from autopar.search.pricing.exact import PricedPlan
from autopar.search.result.result import ON_FEWER_DEVICES, UNITS, why_fuller, why_slower
from autopar.search.space.candidates import Candidates
from autopar.search.space.subcluster import device_counts, part_of

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Part:
    """Devices that a plan may use, how they are priced, and the cost of a second: 1, dollars, or joules."""

    cluster: ClusterSpec
    on: Machinery
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """An objective over parts of a cluster, by their numbers of devices."""

    objective: str
    parts: Mapping[int, Part]
    per_sequence: bool = False

    @property
    def unit(self) -> str:
        """The unit of a value: SI units, or US dollars."""
        return UNITS[self.objective] + (" per sequence" if self.per_sequence and self.objective != "memory" else "")

    @property
    def is_memory(self) -> bool:
        return self.objective == "memory"

    def part(self, plan: PricedPlan) -> Part:
        return self.parts[plan.degrees.world_size]

    def value(self, plan: PricedPlan) -> float:
        """The value of a priced plan, whether it fits or not."""
        return self.value_of(plan.seconds, plan.peak_bytes, plan.degrees)

    def value_of(self, step_s: float, peak_bytes: float, degrees: Degrees) -> float:
        """The value of a step of `degrees`."""
        if self.is_memory:
            return peak_bytes
        return step_s * self.parts[degrees.world_size].weight / (degrees.global_batch if self.per_sequence else 1)

    def by_devices(self, candidates: Candidates, figure: Callable[[Part], float]) -> Floats:
        """A figure of the devices that each candidate uses."""
        figures = np.zeros(len(candidates))
        for count, part in self.parts.items():
            figures[candidates.num_devices == count] = figure(part)
        return figures

    def bounds(self, candidates: Candidates, screened: Screening) -> Floats:
        """A lower bound of every candidate's value; infinite if the candidate cannot fit."""
        if self.is_memory:
            least = np.minimum(screened.without_bytes, screened.recomputed_bytes)
            return np.where(screened.fits, least, np.inf)
        weights = self.by_devices(candidates, lambda part: part.weight)
        sequences: Any = candidates.dp * candidates.micro_batch * candidates.micro_batches if self.per_sequence else 1
        return np.asarray(screened.seconds * weights / sequences)


def goal_of(
    objective: str,
    cluster: ClusterSpec,
    machinery: Callable[[ClusterSpec], Machinery],
    *,
    per_sequence: bool = False,
) -> Goal:
    """The goal on a cluster, whose parts are priced by `machinery`."""
    if objective not in UNITS:
        raise InputError(f"unknown objective {objective[:80]!r}; {did_you_mean(objective, tuple(UNITS))}")
    _weight(objective, cluster)
    counts = device_counts(cluster) if objective in ON_FEWER_DEVICES else (cluster.num_devices,)
    # parts with the same links and devices share one machinery, so that screening takes them together
    known: list[Machinery] = []
    parts = {}
    for part in (part_of(cluster, count) for count in counts):
        on = machinery(part)
        on = next((other for other in known if other == on), on)
        known.append(on)
        parts[part.num_devices] = Part(cluster=part, on=on, weight=_weight(objective, part))
    return Goal(objective=objective, parts=parts, per_sequence=per_sequence)


def _weight(objective: str, cluster: ClusterSpec) -> float:
    """The cost of one second on all devices."""
    if objective == "cost":
        if cluster.price_usd_per_hour is None:
            raise _unknown(objective, cluster, "price_usd_per_device_hour", "US dollars per device and hour")
        return cluster.price_usd_per_hour / _SECONDS_PER_HOUR
    if objective == "energy":
        if cluster.power_w is None:
            raise _unknown(objective, cluster, "device.power_w", "watts per device")
        return cluster.power_w
    return 1.0


def _unknown(objective: str, cluster: ClusterSpec, name: str, meaning: str) -> InputError:
    stated = [g.price_usd_per_device_hour if objective == "cost" else g.device.power_w for g in cluster.groups]
    paths = [f"groups[{i}].{name}" for i, figure in enumerate(stated) if figure is None]
    hint = f"give it in a cluster file, in {meaning}"
    return InputError(
        f"objective {objective!r} needs a figure that cluster {cluster.name!r} does not have",
        [Problem(path=path, rule="is missing", suggestion=hint) for path in paths],
    )


def why_worse(goal: Goal, best: PricedPlan, other: PricedPlan) -> str:
    """The reasons why a plan's value is larger than the best plan's value."""
    ours, theirs = best.degrees.world_size, other.degrees.world_size
    if goal.is_memory:
        return why_fuller(part_numbers(best.memory.parts), part_numbers(other.memory.parts))
    scale = [plan.degrees.global_batch if goal.per_sequence else 1 for plan in (best, other)]
    if ours != theirs:
        per_second = goal.parts[theirs].weight / goal.parts[ours].weight
        return (
            f"{theirs:,} devices instead of {ours:,} take {per_second:.2f} times the {goal.objective} a second "
            f"and {other.seconds / scale[1] / (best.seconds / scale[0]):.2f} times the time"
        )
    times = [
        {name: value / many for name, value in part_numbers(plan.step.parts).items()}
        for plan, many in zip((best, other), scale, strict=True)
    ]
    return why_slower(times[0], times[1])


def part_numbers(parts: Mapping[str, Any]) -> dict[str, float]:
    """The parts of one plan's step as numbers."""
    return {name: float(np.max(value)) for name, value in parts.items()}
