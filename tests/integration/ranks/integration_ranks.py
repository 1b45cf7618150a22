"""Functions of ranks in integration tests; `Ranks.run("integration_ranks:name", ...)` imports it in every rank."""

import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from integration_models import Wanted, built, recorded_batch, seeded_recorded

from autopar.api import parallelize
from autopar.errors import RuntimeInputError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.verify.random_batches import random_batches
from autopar.runtime.verify.verify import this_ranks_part

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
    for event in profile.profiler.kineto_results.events():  # as recorded: `events()` takes seconds to make its tree
        name = event.name()
        kind = FSDP2.get(name) or FUNCTIONAL.get(name)
        if name == "gloo:all_reduce":
            kind = "all-reduce"
        if kind is None:
            continue
        sizes = [int(torch.Size(shape).numel()) for shape in event.shapes()[:2]]
        size = max(sizes) if name in FSDP2 else sizes[0]
        calls[kind] += 1
        elements[kind] += size
        if kind == "reduce-scatter":
            calls["all-reduce"] -= 1
            elements["all-reduce"] -= size
    return {kind: (calls[kind], elements[kind]) for kind in sorted(calls)}


def model_of(wanted: Wanted, plan: Plan) -> tuple[ParallelModel, Any]:
    """A parallel model of this rank, and its program."""
    program, source = built(wanted, plan.degrees)
    model = ParallelModel(program, plan, source, torch.device("cpu"))
    return model, program


def own_batches(model: ParallelModel, program: Program, plan: Plan, count: int = 1) -> list[dict[str, torch.Tensor]]:
    """This rank's part of random batches."""
    coordinate, data = model.rank_mesh.sample_ranks.coordinate, random_batches(program, plan.degrees, count, 0)
    return [this_ranks_part(program, batch, plan.degrees, coordinate) for batch in data]


def profiled_step(rank: int, wanted: Wanted, plan: Plan) -> Mapping[str, tuple[int, int]]:
    """Collectives of one `forward_backward` after one that was not counted."""
    model, program = model_of(wanted, plan)
    parts = own_batches(model, program, plan, 2)
    model.forward_backward(parts[0])
    model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        model.forward_backward(parts[1])
    return counted(profile)


def stage_arguments(rank: int, wanted: Wanted, plan: Plan) -> list[tuple[str, ...]]:
    """Types of what a stage's forward pass is called with, and of what stands in its mappings."""
    model, program = model_of(wanted, plan)
    batch = random_batches(program, plan.degrees, 1, 0)[0]
    found: list[tuple[str, ...]] = []

    def note(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        inside = [value for one in arguments if isinstance(one, Mapping) for value in one.values()]
        found.append(tuple(sorted({type(one).__name__ for one in (*arguments, *inside)})))

    for module in model.stage_modules().values():
        module.register_forward_pre_hook(note)
    model.forward_backward(this_ranks_part(program, batch, plan.degrees, model.rank_mesh.sample_ranks.coordinate))
    return found


def compiled_step(rank: int, wanted: Wanted, plan: Plan) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Loss before and after the blocks are compiled, without a graph break, and the largest difference of gradients."""
    model, program = model_of(wanted, plan)
    (own,) = own_batches(model, program, plan)
    plain = model.forward_backward(own)
    reference = model.whole_gradients()
    model.zero_grad()
    model.compile(backend="aot_eager", fullgraph=True)
    loss = model.forward_backward(own)
    found = model.whole_gradients()
    return plain, loss, max(float((found[name] - grad).abs().max()) for name, grad in reference.items())


def _step(model: Any, program: Any, plan: Plan, optimizer: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    own = this_ranks_part(program, batch, plan.degrees, model.rank_mesh.sample_ranks.coordinate)
    loss: torch.Tensor = model.forward_backward(own)
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _whole(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
    return {k: v.detach().clone() for k, v in whole.items() if isinstance(v, torch.Tensor)}


def train_and_save(rank: int, wanted: Wanted, plan: Plan, data: list[Any], save_after: int, folder: str) -> Any:
    """Losses of all steps, and the whole state after `save_after` of them, when it is also saved."""
    model, program = model_of(wanted, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    whole: Any = None
    for index, batch in enumerate(data):
        losses.append(_step(model, program, plan, optimizer, batch))
        if index + 1 == save_after:
            state = {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}
            dcp.save(state, checkpoint_id=folder)
            whole = {part: _whole(values) for part, values in state.items()}
    return losses, whole if rank == 0 else None


def load_and_train(rank: int, wanted: Wanted, plan: Plan, data: list[Any], folder: str) -> Any:
    """The state as loaded, and losses of the steps that follow."""
    model, program = model_of(wanted, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _step(model, program, plan, optimizer, data[0])  # makes the optimizer's state, and spoils all values
    state = {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}
    dcp.load(state, checkpoint_id=folder)
    whole = {part: _whole(values) for part, values in state.items()}
    losses = [_step(model, program, plan, optimizer, batch) for batch in data]
    return losses, whole if rank == 0 else None


def state_after_evaluating(rank: int, wanted: Wanted, plan: Plan) -> tuple[bool, bool, int]:
    """After an evaluation: whether parameters are the optimizer's, its state has the same names, and how many."""
    model, program = model_of(wanted, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = random_batches(program, plan.degrees, 1, 0)[0]
    _step(model, program, plan, optimizer, batch)
    before = model.optimizer_state_dict(optimizer)
    model.evaluate(this_ranks_part(program, batch, plan.degrees, model.rank_mesh.sample_ranks.coordinate))
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    after = model.optimizer_state_dict(optimizer)
    return all(id(p) in known for p in model.parameters()), before.keys() == after.keys(), len(after)


def faulty_step(rank: int, wanted: Wanted, plan: Plan, who: int, fault: str) -> None:
    """Two steps; in the second, rank `who` raises, aborts or is killed in the middle of the forward pass."""
    model, program = model_of(wanted, plan)
    (own,) = own_batches(model, program, plan)
    model.forward_backward(own)
    if rank == who:
        plant(model, fault)
    model.forward_backward(own)


def plant(model: Any, fault: str) -> None:
    """Let the model's third segment fail."""

    def fail(*_: Any) -> None:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "abort":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.abort()
        raise ValueError("a planted fault")

    model.segments[2].register_forward_pre_hook(fail)


def unfit_batches(rank: int, wanted: Wanted, plan: Plan) -> tuple[dict[str, str], float]:
    """Messages of batches that do not fit, then the loss of one that does."""
    model, program = model_of(wanted, plan)
    (good,) = own_batches(model, program, plan)
    ids, labels = good["input_ids"], good["labels"]
    batch_error: dict[str, Any] = {
        "shape": {"input_ids": ids[:, 1:], "labels": labels},
        "batch": {"input_ids": ids.repeat(2, 1), "labels": labels.repeat(2, 1)},
        "uneven": {"input_ids": ids[:1], "labels": labels},
        "dtype": {"input_ids": ids, "labels": labels.int()},
        "unknown": {"input_ids": ids, "labels": labels, "input_idz": ids},
        "missing": {"input_ids": ids},
        "not a tensor": {"input_ids": ids.tolist(), "labels": labels},
        "too few": (ids,),
    }
    messages = {}
    for name, value in batch_error.items():
        try:
            model.forward_backward(value)
        except RuntimeInputError as error:
            messages[name] = str(error)
    return messages, float(model.forward_backward(good))


def pid(rank: int) -> int:
    return os.getpid()


def abort_or_sleep(rank: int, after_s: float) -> None:
    """Rank 0 ends as NCCL's watchdog ends a process, and rank 1 does not answer."""
    time.sleep(after_s if rank == 0 else 60.0)
    os.abort()


def unlike_collectives(rank: int, differ: str) -> None:
    """The ranks call all-reduces of different shapes, or collectives of different kinds."""
    value = torch.ones(2, 3 + rank if differ == "shape" else 3)
    if differ == "kind" and rank == 0:
        dist.broadcast(value, src=0)
    else:
        dist.all_reduce(value)


def sleep(rank: int, seconds: float) -> None:
    time.sleep(seconds)


def repeated_calls(rank: int, wanted: Wanted, plan: Plan) -> float:
    """Largest difference between gradients of two calls in a row and the sum of gradients of each alone."""
    model, program = model_of(wanted, plan)
    first, second = own_batches(model, program, plan, 2)
    alone = []
    for part in (first, second):
        model.forward_backward(part)
        alone.append(model.whole_gradients())
        model.zero_grad()
    model.forward_backward(first)
    model.forward_backward(second)
    both = model.whole_gradients()
    assert both.keys() == alone[0].keys()
    return max(float((both[n] - alone[0][n] - alone[1][n]).abs().max()) for n in both)


def recorded_steps(rank: int, zero: int) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Two steps of a model that records, with its loss outside: losses, the state, and scores of an evaluation."""
    own = slice(4 * rank, 4 * rank + 4)
    x, target = recorded_batch(0)
    loss_fn = torch.nn.CrossEntropyLoss()
    plan = {"dp": 2, "zero": zero}
    parallel = parallelize(seeded_recorded(), "2xcpu", example_inputs=(x[own], target[own]), plan=plan, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        x, target = recorded_batch(step)
        losses.append(float(parallel.forward_backward({"x": x[own], "target": target[own]})))
        optimizer.step()
        optimizer.zero_grad()
    scores = parallel.evaluate((x[own], target[own]))["output_0"].full_tensor()
    held = parallel.state_dict().items()
    state = {name: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for name, v in held}
    parallel.state_dict()["scale"].mul_(2)  # as loading in place does
    doubled = parallel.evaluate((x[own], target[own]))["output_0"].full_tensor()
    assert not torch.allclose(doubled, scores)
    return losses, state, scores


def traced_step(rank: int, wanted: Wanted, plan: Plan, path: str) -> bool:
    """A trace between two steps; whether these are as they are without one."""
    model, program = model_of(wanted, plan)
    first, second = own_batches(model, program, plan, 2)
    model.forward_backward(first)
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.trace(path, second)
    same = all(torch.equal(_local(p.grad), _local(before[n])) for n, p in model.named_parameters() if n in before)
    other, _ = model_of(wanted, plan)
    other.forward_backward(first)
    losses = model.forward_backward(second), other.forward_backward(second)
    return same and bool(before) and torch.equal(*losses)


def _local(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found
