"""Functions that ranks run in tests of pipelines: `Ranks.run("pipeline_ranks:name", ...)`."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from data_models import rows, tokens
from data_ranks import LENGTH, made, own_rows
from integration_models import Wanted, built

from autopar.api import parallelize
from autopar.ir.degrees import degrees_from
from autopar.ir.plan import Plan
from autopar.runtime.distributed.mesh import group_of_stages, training_mesh
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.model.pipeline import _TorchStage
from autopar.runtime.parameters.shown_tensor import whole_of

State = dict[str, dict[str, torch.Tensor]]


def state_of(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}


def whole_everywhere(state: Mapping[str, Mapping[str, Any]]) -> State:
    """The whole state of all stages, on every rank; copies of tied parameters must be equal."""
    own = {part: {name: whole_of(value).clone() for name, value in values.items()} for part, values in state.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    found: State = {part: {} for part in own}
    for one in every:
        for part, values in one.items():
            for name, value in values.items():
                assert torch.equal(found[part].setdefault(name, value), value), (part, name)
    return found


def live_micro_batches(rank: int, world_size: int, wish: Mapping[str, Any], local: int) -> int:
    """The most micro-batches whose activations this rank held at once in a step, over all its stages."""
    parallel, _ = made(world_size, wish, local)
    stages: dict[int, _TorchStage] = {}
    most = 0
    forward = _TorchStage.forward_one_chunk

    def counting(stage: _TorchStage, *arguments: Any, **options: Any) -> Any:
        nonlocal most
        out = forward(stage, *arguments, **options)
        stages[stage.stage_index] = stage
        most = max(most, sum(len(s.fwd_cache.keys() | s.backward_state.keys()) for s in stages.values()))
        return out

    own, _ = own_rows(parallel, (local,) * parallel.plan.degrees.dp, LENGTH, 0)
    with mock.patch.object(_TorchStage, "forward_one_chunk", counting):
        parallel.forward_backward(own)
    return most


def weights_of_first_rank(rank: int, world_size: int, wish: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's state where every rank built other weights."""
    parallel = parallelize(tokens(seed=rank), f"{world_size}xcpu", example_inputs=rows(8, LENGTH, 0), plan=wish)
    return {name: whole_of(value) for name, value in parallel.state_dict().items()}


def asked_for(rank: int, wanted: Wanted, plan: Plan) -> tuple[set[str], set[str]]:
    """Names of the parameters that this rank asked the source for, and of those that it holds."""
    program, source = built(wanted, plan.degrees)
    asked: set[str] = set()

    def recording(name: str) -> torch.Tensor:
        asked.add(name)
        return source(name)

    model = ParallelModel(program, plan, recording, torch.device("cpu"))
    return asked & program.parameters.keys(), {name for name, _ in model.named_parameters()}


def groups_of_order(rank: int, wish: Mapping[str, Any]) -> dict[str, Any]:
    """The ranks of this rank's groups, "ends" those of its pipeline's ends, and its coordinates on pp, dp and tp."""
    degrees = degrees_from(wish)
    mesh = training_mesh(degrees, "cpu")
    assert mesh.pipeline is not None
    assert all(dim.of(rank) == dim.coordinate for dim in (mesh.pipeline, *mesh.dims.values()))
    groups = {name: dim.group for name, dim in mesh.dims.items()} | {"pp": mesh.pipeline.group}
    groups |= {"ends": group_of_stages(mesh, (0, degrees.pp - 1)), "dp_shard": mesh.device_mesh.get_group("dp_shard")}
    found: dict[str, Any] = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    at = tuple(degrees.coordinate(name, rank) for name in ("pp", "dp", "tp"))
    assert at == (mesh.stage_rank, mesh.sample_ranks.coordinate, mesh.dims["tp"].coordinate)
    return found | {"at": at}


def with_dropout(rank: int, world_size: int, wish: Mapping[str, Any], local: int) -> dict[str, torch.Tensor]:
    """This rank's gradients of one step with dropout, by name; the same draws whatever the plan's stages."""
    parallel, _ = made(world_size, wish, local, dropout=0.4)
    own, _ = own_rows(parallel, (local,) * parallel.plan.degrees.dp, LENGTH, 0)
    parallel.forward_backward(own)
    return parallel.whole_gradients()


def faulty_step(rank: int, world_size: int, wish: Mapping[str, Any], who: int, fault: str, folder: str) -> None:
    """Two steps; in the second a stage of rank `who` raises, is killed, stops or sleeps in its second micro-batch."""
    parallel, _ = made(world_size, wish, 4)
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    own, _ = own_rows(parallel, (4,) * parallel.plan.degrees.dp, LENGTH, 0)
    parallel.forward_backward(own)
    if rank == who:
        parallel.segments[-1].register_forward_pre_hook(planted(fault, Path(folder, "when")))
    parallel.forward_backward(own)


def planted(fault: str, when: Path) -> Any:
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls < 2:
            return
        when.write_text(str(time.time()))
        if fault == "raise":
            raise ValueError("a planted fault")
        if fault == "sleep":
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    return fail
