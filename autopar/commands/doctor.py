"""`autopar doctor`: is this cluster right, and as fast as its description says? Collective; every rank calls `examine`.

Checks compare tiny runs on these ranks with the same run on one rank. Speeds are measured on all ranks at once. Every
rank gathers all results and makes the same `Diagnosis`.
"""

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from math import isfinite
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autopar.api import parallelize
from autopar.commands.diagnosis import Check, Diagnosis, Rank, diagnose
from autopar.errors import AutoparError, ClusterError, RankError
from autopar.ir.cluster import ClusterSpec
from autopar.runtime.distributed.broadcast import gather_objects
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.distributed.start import size_difference, start_process_group
from autopar.runtime.measure.doctor_checks import (
    CONVERSION_CASES,
    Difference,
    check_conversion,
    groups_to_check,
    relative,
    world_mesh,
)
from autopar.runtime.measure.doctor_speed import SpeedMeasurement, device_speeds, link_speeds

_TIMEOUT_S = 120.0
GIVEN_UP = 0.5  # of the timeout: after so long a rank that did not reach a check is named
WIDTH, MICRO_BATCHES, SEQUENCES = 8, 2, 4
STEPS, RATE = 2, 0.1
_Progress = Callable[[str], None]
_T = TypeVar("_T")


def examine(
    cluster: ClusterSpec, *, timeout_s: float = _TIMEOUT_S, on_progress: _Progress = lambda _: None
) -> Diagnosis:
    """Examine the ranks of this job, as torchrun started them; alone, this process is the only rank. Collective."""
    if difference := size_difference(cluster):
        raise ClusterError(difference)
    device = start_process_group(cluster, timeout_s=timeout_s)
    together = _Together(timeout_s)
    checks, measured = list[Check](), list[SpeedMeasurement]()
    world = together("process groups", lambda: world_mesh(device.type))
    groups = together("process groups of some ranks", lambda: groups_to_check(world))
    runs = {f"conversion {row.name}": partial(check_conversion, row, groups, device) for row in CONVERSION_CASES}
    count = cluster.num_devices
    runs["FSDP2"] = partial(check_step, cluster, {"dp": count, "zero": 3})
    is_odd = count % 2
    if not is_odd:
        wish = {"pp": 2, "dp": count // 2, "zero": 0, "micro_batches": MICRO_BATCHES}
        runs["pipeline of two stages"] = partial(check_step, cluster, wish)
    for name, run in runs.items():
        on_progress(name)
        checks.append(together(name, partial(_checked, name, run)))
    on_progress("speed of devices")
    dtypes = set.intersection(*(set(d.peak_flops_per_s) for d in cluster.devices))  # that every device has a peak for
    measured += together("speed of devices", lambda: list(device_speeds(device, dtypes)))
    on_progress("speed of links")
    measured += together("speed of links", lambda: list(link_speeds(device)))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    mine = Rank(rank=dist.get_rank(), host=socket.gethostname(), device=name)
    notes = [*cluster.assumptions, *(("an odd number of ranks: no pipeline of two stages",) * is_odd)]
    return diagnose(cluster, gather_objects((mine, checks, measured)), notes)


def leave() -> None:
    """Leave the process group, if this process is in one: its threads must not outlive the interpreter. Collective."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def examine_here(num_ranks: int, cluster: ClusterSpec | None, *, timeout_s: float = _TIMEOUT_S) -> Diagnosis:
    """Examine gloo ranks that are started on this machine for it. Raises `RankError` where one of them fails."""
    spec = cluster or ClusterSpec.preset(f"{num_ranks}xcpu")
    if spec.device_type != "cpu":
        raise ClusterError(f"--ranks starts CPU ranks, cluster {spec.name} has other devices; use torchrun for those")
    if spec.num_devices != num_ranks:
        raise ClusterError(
            f"cluster {spec.name} has {spec.num_devices} devices, --ranks starts {num_ranks}; make them equal"
        )
    with Ranks(num_ranks, timeout_s=timeout_s, checked=False) as ranks:
        diagnoses: list[Diagnosis] = ranks.run("autopar.commands.doctor:examine_rank", spec, timeout_s)
    return diagnoses[0]


def examine_rank(rank: int, cluster: ClusterSpec, timeout_s: float) -> Diagnosis:
    """The work of one rank that was started here."""
    return examine(cluster, timeout_s=timeout_s)


class _Together:
    """Runs one thing after the other on all ranks; a rank that fails, or is not there, ends it with a `RankError`."""

    def __init__(self, timeout_s: float) -> None:
        limit = timedelta(seconds=timeout_s)
        on_gpu = dist.get_backend() != "gloo"
        self._group = dist.new_group(backend="gloo", timeout=limit) if on_gpu else None
        self._patience = limit * GIVEN_UP

    def __call__(self, name: str, run: Callable[[], _T]) -> _T:
        rank = dist.get_rank()
        try:
            if dist.get_world_size() > 1:
                dist.monitored_barrier(self._group, timeout=self._patience, wait_all_ranks=True)
        except RuntimeError as error:
            raise RankError(f"before {name}: {str(error).splitlines()[0]}", rank=rank) from error
        try:
            return run()
        except AutoparError:
            raise
        except Exception as error:
            raise RankError(f"rank {rank} in {name}: {type(error).__name__}: {error}", rank=rank) from error


def _checked(name: str, run: Callable[[], Iterable[Difference]]) -> Check:
    """The worst difference, relative to its tolerance."""
    differences = list(run())
    worst = max(differences, key=lambda diff: diff.error - diff.tolerance, default=Difference(name="", error=0.0))
    error = worst.error if isfinite(worst.error) else None
    return Check(name=name, error=error, tolerance=worst.tolerance, where=worst.name, num_compared=len(differences))


class TwoLayers(nn.Module):
    """Two equal layers, one for each stage, and a mean square loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - target).square().mean()


def check_step(cluster: ClusterSpec, wish: Mapping[str, int]) -> Iterator[Difference]:
    """Losses and gradients of training steps under a plan. Collective."""
    width = max(WIDTH, wish["dp"])  # a part of every parameter for each rank
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        alone = TwoLayers(width).double()
        batches = torch.randn(STEPS, 2, wish["dp"] * SEQUENCES, width, dtype=torch.float64)
    inputs = dict(zip(("x", "target"), batches[0, :, :SEQUENCES], strict=True))
    parallel = parallelize(alone, cluster, example_inputs=inputs, plan=wish)  # the same seed: the same weights
    coordinate = parallel.rank_mesh.sample_ranks.coordinate
    rows = slice(coordinate * SEQUENCES, (coordinate + 1) * SEQUENCES)
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in (alone, parallel)]
    for step, batch in enumerate(batches):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = parallel.forward_backward(dict(zip(inputs, batch[:, rows], strict=True)))
        wanted = alone(*batch)
        wanted.backward()
        yield relative(f"loss of step {step}", loss, wanted.detach())
        gradients = parallel.whole_gradients()
        for name, parameter in alone.named_parameters():
            if name in gradients:
                assert parameter.grad is not None
                yield relative(f"gradient of {name} in step {step}", gradients[name], parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
