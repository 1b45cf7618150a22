"""Functions of ranks in tests of `parallel.save` and `parallel.load`: `Ranks.run("checkpoint_ranks:name", ...)`."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from data_models import rows, tokens
from data_ranks import LENGTH
from integration_models import Wanted
from integration_ranks import model_of
from pipeline_ranks import State, state_of, whole_everywhere
from shared_captures import captured_by_first_rank

from autopar.api import parallelize
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.verify.verify import this_ranks_part

GLOBAL_BATCH = 8
Batches = Sequence[Mapping[str, torch.Tensor]]


def groups_of(model: ParallelModel) -> list[dict[str, Any]]:
    """Two groups with other options; in a pipeline a rank has the parameters of its own stages."""
    named = list(model.named_parameters())
    small = [p for _, p in named if p.dim() < 2]
    large = [p for _, p in named if p.dim() >= 2]
    return [{"params": large, "weight_decay": 0.1}, {"params": small, "lr": 3e-3, "weight_decay": 0.0}]


def optimizer_of(model: ParallelModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=1e-3, amsgrad=True)


def trained(
    model: ParallelModel, program: Any, plan: Plan, optimizer: Any, schedule: Any, data: Batches
) -> list[float]:
    """The losses of steps on global batches."""
    losses = []
    for batch in data:
        own = this_ranks_part(program, batch, plan.degrees, model.rank_mesh.dims["dp"].coordinate)
        losses.append(float(model.forward_backward(own)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


def save_and_train(rank: int, wanted: Wanted, plan: Plan, before: Batches, after: Batches, folder: str) -> Any:
    """Train, save, and train on: losses after the save, the saved whole state, and the whole state in the end."""
    model, program = model_of(wanted, plan)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
    trained(model, program, plan, optimizer, schedule, before)
    saved = whole_everywhere(state_of(model, optimizer))
    model.save(folder, optimizer, {"schedule": schedule, "epoch": 3}, step=len(before))
    losses = trained(model, program, plan, optimizer, schedule, after)
    return losses, saved, whole_everywhere(state_of(model, optimizer)) if rank == 0 else _end(model, optimizer)


def _end(model: ParallelModel, optimizer: Any) -> None:
    whole_everywhere(state_of(model, optimizer))


def load_and_train(rank: int, wanted: Wanted, plan: Plan, after: Batches, folder: str, *, spoil: bool = True) -> Any:
    """Load into a new model and train on: losses, the loaded whole state, and the whole state in the end."""
    model, program = model_of(wanted, plan)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.fill_(7.0)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
    extra = model.load(folder, optimizer, {"schedule": schedule})
    assert extra["epoch"] == 3 and extra["schedule"] == schedule.state_dict()
    loaded = whole_everywhere(state_of(model, optimizer))
    losses = trained(model, program, plan, optimizer, schedule, after)
    return losses, loaded, whole_everywhere(state_of(model, optimizer)) if rank == 0 else _end(model, optimizer)


def differing(found: State, expected: State) -> list[str]:
    """The names of values that are not bit-equal."""
    assert {part: values.keys() for part, values in found.items()} == {p: v.keys() for p, v in expected.items()}
    pairs = [(f"{part}: {n}", v, found[part][n]) for part, values in expected.items() for n, v in values.items()]
    return [name for name, one, other in pairs if one.dtype != other.dtype or not torch.equal(one, other)]


def largest_difference(found: State, expected: State) -> float:
    """The largest relative difference of whole values."""
    worst = 0.0
    for part, values in expected.items():
        for name, value in values.items():
            scale = float(value.double().norm()) or 1.0
            worst = max(worst, float((found[part][name].double() - value.double()).norm()) / scale)
    return worst


@captured_by_first_rank
def with_dropout(rank: int, world_size: int, wish: Mapping[str, Any], folder: str, loads: bool) -> Any:
    """Losses and state of steps with dropout: unbroken with a save after two, or continued from that save."""
    local = GLOBAL_BATCH // wish.get("dp", 1)
    model = tokens(dropout=0.4, tied=True)
    parallel = parallelize(
        copy.deepcopy(model), f"{world_size}xcpu", example_inputs=rows(local, LENGTH, 0), plan=wish, seed=5 + loads
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    data = [rows(GLOBAL_BATCH, LENGTH, seed) for seed in range(4)]
    losses = []
    if loads:
        parallel.load(folder, optimizer)
    for step in range(2 if loads else 0, 4):
        losses.append(float(parallel.forward_backward(parallel.local_batch(data[step]))))
        optimizer.step()
        optimizer.zero_grad()
        if not loads and step == 1:
            parallel.save(folder, optimizer, step=2, asynchronous=True)
    parallel.finish_saving()
    return losses, whole_everywhere(state_of(parallel, optimizer))


def error_of(action: Any) -> str:
    """The text of the `AutoparError` that an action raises."""
    try:
        action()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
