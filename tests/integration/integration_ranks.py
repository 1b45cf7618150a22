"""What ranks run in integration tests; `Ranks.run("integration_ranks:name", ...)` imports it in every rank."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from integration_models import Wanted, built

from autopar.ir.plan import Plan
from autopar.runtime.mesh import training_mesh
from autopar.runtime.module import ParallelModel
from autopar.runtime.verify import batches, this_ranks_part

FSDP2 = {"c10d::_allgather_base_": "all-gather", "c10d::_reduce_scatter_base_": "reduce-scatter"}
FUNCTIONAL = {
    "_c10d_functional::all_gather_into_tensor": "all-gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional::all_to_all_single": "all-to-all",
}


def counted(profile: Any) -> dict[str, tuple[int, int]]:
    """Calls and elements per kind of collective: of the gathered, scattered or reduced whole for FSDP2's and for
    all-reduces, of the operand for those of generated code.

    gloo's reduce-scatter is an all-reduce inside, and the profiler shows shapes only there.
    """
    calls: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for event in profile.events():
        kind = FSDP2.get(event.name) or FUNCTIONAL.get(event.name)
        if event.name == "gloo:all_reduce":
            kind = "all-reduce"
        if kind is None:
            continue
        sizes = [int(torch.Size(shape).numel()) for shape in event.input_shapes[:2]]
        size = max(sizes) if event.name in FSDP2 else sizes[0]
        calls[kind] += 1
        elements[kind] += size
        if kind == "reduce-scatter":
            calls["all-reduce"] -= 1
            elements["all-reduce"] -= size
    return {kind: (calls[kind], elements[kind]) for kind in sorted(calls)}


def model_of(wanted: Wanted, plan: Plan) -> tuple[ParallelModel, Any]:
    """A parallel model of this rank, and its program."""
    program, source = built(wanted, plan.degrees)
    model = ParallelModel(program, plan, training_mesh(plan.degrees, "cpu"), source, torch.device("cpu"))
    return model, program


def profiled_step(rank: int, wanted: Wanted, plan: Plan) -> Mapping[str, tuple[int, int]]:
    """Collectives of one `forward_backward` after one that was not counted."""
    model, program = model_of(wanted, plan)
    data = batches(program, plan.degrees, 2, 0, wanted.vocabulary)
    coordinate = model.rank_mesh.dims["dp"].coordinate
    parts = [this_ranks_part(program, batch, plan.degrees, coordinate) for batch in data]
    model.forward_backward(parts[0])
    model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        model.forward_backward(parts[1])
    return counted(profile)
