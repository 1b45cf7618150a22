"""`autopar calibrate`: measure this machine and fit a device profile to it.

`autopar.runtime` measures, `autopar.cost_model` fits. There are three ways to run: this process alone, ranks that it
starts (`calibrate_cluster`), or the ranks of a torchrun job, which all call `calibrate`. With several ranks each work
runs on all of them at once, because a training step also shares the machine between ranks.
"""

import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from autopar._version import __version__
from autopar.cost_model.fit.device import FitSetting, fit_profile
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.machine.profile import DeviceProfile, Measurement
from autopar.cost_model.machine.profile_io import profile_to_dict
from autopar.ir.cluster import ClusterSpec
from autopar.ir.samples import Sample, Work
from autopar.runtime.distributed.broadcast import broadcast_object, gather_objects
from autopar.runtime.distributed.launch import Ranks, device_of_rank
from autopar.runtime.distributed.start import start_process_group
from autopar.runtime.measure import calibrate_device, calibrate_links
from autopar.runtime.measure.calibrate_device import Pace, device_works, measure, seconds_of
from autopar.runtime.measure.calibrate_links import Groups

DEFAULT_MINUTES = 3.0
MEASURING = 0.5  # part of the remaining time for measuring; preparing, first runs and the fit take the rest
LEAST = 0.1  # the least budget of a work, as a part of its share of all the time
TOO_LONG = 3.0  # a work that takes longer, in budgets, is left out, as are larger works of its kind
TIMEOUT_S, PASSES = 300.0, 3
STEADY = 0.25  # passes of a machine that does nothing else differ by less
_Progress = Callable[[int, int, str], None]  # works done, works in all, what comes next


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Works that are measured together; collectives over `groups`."""

    name: str
    works: tuple[Work, ...]
    groups: Groups | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """The device of one rank."""

    host: str
    dtypes: tuple[str, ...]  # in which products are measured
    units: int  # multiprocessors
    reserve_bytes: int  # memory in use that is not torch's tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A profile, the samples behind it, and the number of works that took too long to be measured."""

    profile: DeviceProfile
    samples: tuple[Sample, ...]
    num_skipped: int
    spread: float | None = None  # the slowest pass over the fastest, less 1, as the median of works

    @property
    def is_disturbed(self) -> bool:
        return self.spread is not None and self.spread > STEADY


def calibrate(
    *,
    ranks: int | None = None,
    minutes: float = DEFAULT_MINUTES,
    on_progress: _Progress = lambda done, total, text: None,
) -> Calibration:
    """Measure and fit in about `minutes`: on this process, on gloo `ranks` started here, or on a whole torchrun job."""
    if ranks is not None:
        return calibrate_cluster(ClusterSpec.preset(f"{ranks}xcpu"), minutes, on_progress)
    cluster = ClusterSpec.detect()
    if "RANK" not in os.environ and not dist.is_initialized():
        alone = torch.device(cluster.device_type)
        threads = f" of {torch.get_num_threads()} threads" if alone.type == "cpu" else ""
        setting = f"{alone.type}, one process{threads}"
        every = [_rank_device(alone)]
        return _calibrated(
            cluster, every, setting, minutes, on_progress, lambda: _rank_device(alone),
            lambda stage, budget_s: [measured_stage(stage, alone, budget_s)],
        )  # fmt: skip
    device = start_process_group(cluster, timeout_s=TIMEOUT_S)

    def run(stage: Stage, budget_s: float) -> list[list[float | None]]:
        return gather_objects(measured_stage(stage, device, broadcast_object(budget_s)))  # all must do the same

    every = gather_objects(_rank_device(device))
    setting = f"{dist.get_backend()}, {len(every)} ranks at once on {_hosts_in_words(every)}"
    return _calibrated(cluster, every, setting, minutes, on_progress, lambda: _rank_device(device), run)


def calibrate_cluster(cluster: ClusterSpec, minutes: float, on_progress: _Progress) -> Calibration:
    """Start a rank for each device of a cluster, measure for about `minutes` and fit. This process holds no device."""
    num_ranks = cluster.num_devices
    on_progress(0, 1, "starting ranks")
    with Ranks(num_ranks, timeout_s=TIMEOUT_S, checked=False, device_type=cluster.device_type) as world:
        here = "autopar.commands.calibrate"
        every: list[RankDevice] = world.run(f"{here}:rank_device")
        is_cpu = cluster.device_type == "cpu"
        where = f"{os.cpu_count()} cores, one thread each" if is_cpu else _hosts_in_words(every)
        setting = f"{cluster.backend}, {num_ranks} ranks at once on {where}"
        return _calibrated(
            cluster, every, setting, minutes, on_progress, lambda: world.run(f"{here}:rank_device")[0],
            partial(world.run, f"{here}:measured_on_rank"),
        )  # fmt: skip


def _calibrated(
    cluster: ClusterSpec,
    ranks: Sequence[RankDevice],
    setting: str,
    minutes: float,
    on_progress: _Progress,
    device_now: Callable[[], RankDevice],
    run: Callable[[Stage, float], Sequence[Sequence[float | None]]],
) -> Calibration:
    """Measure all stages on all ranks.

    `run` measures one stage. It takes the seconds of a work. It returns the times of each rank.
    """
    started, hosts = time.monotonic(), [rank.host for rank in ranks]
    todo = stages(cluster.device_type, ranks[0].dtypes, hosts) * passes(minutes)
    done, total, samples = 0, sum(len(stage.works) for stage in todo), []
    for stage in todo:
        on_progress(done, total, stage.name)
        left_s = started + 60 * minutes - time.monotonic()
        budget_s = max(LEAST * 60 * minutes / total, MEASURING * left_s / (total - done))
        samples.append((stage, run(stage, budget_s)))
        done += len(stage.works)
    sharing = ranks_per_core(cluster.device_type, hosts.count(hosts[0]))
    return combined(samples, cluster, device_now(), _measurement(setting, len(ranks), started, sharing))


def measured_on_rank(rank: int, stage: Stage, budget_s: float) -> list[float | None]:
    """The work of a rank that was started by `calibrate_cluster`. Collective."""
    return measured_stage(stage, device_of_rank(), budget_s)


def rank_device(rank: int) -> RankDevice:
    """The device of a rank that was started by `calibrate_cluster`."""
    return _rank_device(device_of_rank())


def _rank_device(device: torch.device) -> RankDevice:
    return RankDevice(
        host=socket.gethostname(),
        dtypes=calibrate_device.dtypes_of(device),
        units=calibrate_device.num_units(device),
        reserve_bytes=calibrate_device.reserve_bytes(device),
    )


def _hosts_in_words(ranks: Sequence[RankDevice]) -> str:
    count = len({rank.host for rank in ranks})
    return f"{count} host{'s' * (count > 1)}"


def passes(minutes: float) -> int:
    """How often everything is measured: what else a machine does comes and goes, and must not hit one part alone."""
    return PASSES if minutes >= 1 else 1


def stages(device_type: str, dtypes: tuple[str, ...], hosts: Sequence[str]) -> list[Stage]:
    """Everything that is measured, when rank r is on `hosts[r]`."""
    result = [Stage(name=name, works=tuple(works)) for name, works in device_works(device_type, dtypes).items()]
    groups = calibrate_links.link_groups(hosts)
    for g in groups:
        works = tuple(calibrate_links.link_works(g, device_type))
        result.append(Stage(name=f"collectives, {g.name}", works=works, groups=g))
    if groups:
        result.append(Stage(name="overlap", works=tuple(calibrate_links.overlap_works()), groups=groups[-1]))
    return result


def measured_stage(stage: Stage, device: torch.device, budget_s: float) -> list[float | None]:
    """Seconds of each work of a stage on this rank; None where it would take too long. Collective with ranks."""
    pace = _pace(device, alone=stage.groups is None)
    group = calibrate_links.join_group(stage.groups) if stage.groups is not None else None
    rates: dict[str, float] = {}
    times: list[float | None] = []
    for work in stage.works:
        if work.amount * rates.get(work.name, 0.0) > TOO_LONG * budget_s:
            times.append(None)
            continue
        if group is None:
            seconds = measure(work, device, pace, budget_s)
        else:
            prepared = _PREPARED[work.part](work, group, device)
            with torch.no_grad():
                seconds = seconds_of(prepared, device, pace, budget_s) / calibrate_links.times_of_one(work)
        times.append(seconds)
        rates[work.name] = pace.largest(seconds) / work.amount
    if group is not None:
        dist.destroy_process_group(group)
    return times


_PREPARED = {"collective": calibrate_links.prepared_collective, "overlap": calibrate_links.prepared_overlap}


def ranks_per_core(device_type: str, ranks: int) -> float:
    """How many of `ranks` CPU ranks on this host share a core; 1 where each has one, or a GPU."""
    return max(1.0, ranks / len(os.sched_getaffinity(0))) if device_type == "cpu" else 1.0


def _pace(device: torch.device, *, alone: bool) -> Pace:
    """`alone`: every rank works for itself, and does not wait for messages."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Pace()

    def largest(value: float) -> float:
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return float(shared.item())

    here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    counts = alone and device.type == "cpu" and torch.get_num_threads() == 1
    return Pace(
        largest=largest, meet=dist.barrier, ranks_per_core=ranks_per_core(device.type, here) if counts else None
    )


def _measurement(setting: str, ranks: int, started: float, sharing: float) -> Measurement:
    versions = {"autopar": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    if torch.version.cuda is not None:
        versions["cuda"] = str(torch.version.cuda)
    return Measurement(
        date=datetime.now(UTC).date().isoformat(),
        host=socket.gethostname(),
        how=setting,
        ranks=ranks,
        seconds=round(time.monotonic() - started, 1),
        ranks_per_core=sharing,
        versions=versions,
    )


def combined(
    runs: Sequence[tuple[Stage, Sequence[Sequence[float | None]]]],
    cluster: ClusterSpec,
    device: RankDevice,
    measurement: Measurement,
) -> Calibration:
    """One sample of each work, as the median of passes and ranks (the last rank of a collective), and their profile."""
    every: dict[tuple[str, int], tuple[Work, list[float]]] = {}
    for stage, ranks in runs:
        for index, (work, times) in enumerate(zip(stage.works, zip(*ranks, strict=True), strict=True)):
            _, values = every.setdefault((stage.name, index), (work, []))
            there = [seconds for seconds in times if seconds is not None]
            if len(there) == len(times):
                values.append(median(there) if stage.groups is None else max(there))
    samples = [Sample(work=work, seconds=median(values)) for work, values in every.values() if values]
    skipped = len(every) - len(samples)
    spreads = [max(values) / min(values) - 1 for _, values in every.values() if len(values) > 1]
    spread = round(median(spreads), 3) if spreads else None
    if spread is not None:
        measurement = replace(measurement, how=f"{measurement.how}, passes differ by {spread:.0%}")
    group, is_cpu = cluster.groups[0], cluster.device_type == "cpu"
    known = group.device
    setting = FitSetting(
        device=known,
        base=device_profile(known.name),
        measured=measurement,
        units=float(device.units),
        figures_are_known=not is_cpu and not known.source.startswith("assumed"),
        reserve_bytes=device.reserve_bytes,
        link=None if is_cpu else group.in_host,
    )
    profile = fit_profile(samples, setting)
    return Calibration(profile=profile, samples=tuple(samples), num_skipped=skipped, spread=spread)


def to_dict(calibration: Calibration) -> dict[str, Any]:
    """Plain data for JSON."""
    return {
        "profile": profile_to_dict(calibration.profile),
        "fit": {name: asdict(error) for name, error in calibration.profile.fit.items()},
        "samples": [asdict(sample) for sample in calibration.samples],
        "num_skipped": calibration.num_skipped,
        "spread": calibration.spread,
    }
