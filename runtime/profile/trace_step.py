"""One profiled step of all ranks, written by rank 0 as one trace. Collective.

Three steps run. The first warms up, the second logs its collectives (`autopar.runtime.distributed.collective_log`),
and the third runs under torch's profiler alone. Every rank makes slices of its own profile
(`autopar.runtime.profile.timeline`), and rank 0 writes them.

Slices have the clock of their rank's host. Ranks of one host share a clock; clocks of different hosts may differ.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from autopar._torch import private
from autopar.ir.degrees import Degrees
from autopar.runtime.distributed.broadcast import broadcast_object, gather_objects, run_on_first_rank
from autopar.runtime.distributed.collective_log import log_collectives
from autopar.runtime.distributed.mesh import RankMesh, pipeline_messages
from autopar.runtime.profile.chrome_trace import check_writable, chrome_trace, write_whole
from autopar.runtime.profile.timeline import slices_of

ALL_RANKS = "all ranks"


def trace_step(
    path: str | os.PathLike[str],
    step: Callable[[], object],
    mesh: RankMesh,
    degrees: Degrees,
    device: torch.device,
    *,
    sizes: Mapping[str, int | None],
) -> None:
    """Run a step three times and write the trace of the last one. Raises `InputError` on all ranks. Collective."""
    run_on_first_rank(lambda: check_writable(path))
    step()  # the first of a pipeline opens connections
    with log_collectives() as sent:
        step()
    origin_ns = broadcast_object(time.time_ns())
    document = _profiled(step, device)
    groups = {c.group for c in sent if c.group is not None}
    tracks = tracks_of(mesh, groups)
    slices = slices_of(document, sent, tracks=tracks, micro_batches=degrees.micro_batches, origin_ns=origin_ns)
    name = rank_label(dist.get_rank(), degrees)
    ranks = gather_objects((name, slices))
    about = {
        "schedule": degrees.schedule if degrees.pp > 1 else "",
        "world_size": dist.get_world_size(),
        "degrees": asdict(degrees),
        **sizes,
        "backend": dist.get_backend(),
        "torch": torch.__version__,
        "clocks": "each rank's slices carry the clock of its host",
    }

    run_on_first_rank(lambda: write_whole(path, chrome_trace(ranks, about)))


def _profiled(step: Callable[[], object], device: torch.device) -> Any:
    """The profile of a step, which all ranks begin together."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    dist.barrier()
    with profile(activities=activities) as recorded:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory(prefix="autopar-trace-") as folder:
        file = Path(folder) / "rank.json"
        recorded.export_chrome_trace(str(file))
        return json.loads(file.read_text())


def tracks_of(mesh: RankMesh, groups: Iterable[str]) -> dict[str, str]:
    """The track of each process group by name: its mesh dimension, pp for tied parameters, or one for all ranks."""
    replicate, shard = mesh.device_mesh["dp_replicate"], mesh.device_mesh["dp_shard"]
    both, all_data = replicate.size() > 1, "dp" if mesh.data is None else mesh.data.name
    tracks = {str(replicate.get_group().group_name): "dp_replicate" if both else all_data}
    tracks[str(shard.get_group().group_name)] = "dp_shard" if both else all_data
    tracks |= {mesh.data.group_name: all_data} if mesh.data is not None else {}
    if mesh.experts is not None:
        over = mesh.experts.zero_mesh.get_group(1)
        tracks[str(over.group_name)] = "dp_experts" if both else mesh.experts.data.name
        tracks[mesh.experts.data.group_name] = mesh.experts.data.name
    tracks |= {dim.group_name: name for name, dim in mesh.dims.items()}
    if mesh.pipeline is not None:
        tracks |= {str(g.group_name): "pp" for g in (mesh.pipeline.group, pipeline_messages(mesh.pipeline))}
    for name in groups:
        every = private.size_of_group(name) == dist.get_world_size()
        tracks.setdefault(name, ALL_RANKS if every else "pp")
    return tracks


def rank_label(rank: int, degrees: Degrees) -> str:
    """A rank with its coordinates: ``rank 3: pp 1 dp 0 tp 1``."""
    names = ("pp", "dp", *(["cp"] if degrees.cp > 1 else []), "tp")
    return f"rank {rank}: " + " ".join(f"{name} {degrees.coordinate(name, rank)}" for name in names)
