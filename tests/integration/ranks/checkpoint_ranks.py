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
        own = this_ranks_part(program, batch, plan.degrees, model.rank_mesh.sample_ranks.coordinate)
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
    return of_rank_0(rank, losses, saved, whole_everywhere(state_of(model, optimizer)))


def of_rank_0(rank: int, *values: Any) -> tuple[Any, ...] | None:
    """What one rank sends: all ranks have the same, and tensors take long to send."""
    return values if rank == 0 else None


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
    return of_rank_0(rank, losses, loaded, whole_everywhere(state_of(model, optimizer)))


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
    return of_rank_0(rank, losses, whole_everywhere(state_of(parallel, optimizer)))


def error_of(action: Any) -> str:
    """The text of the `AutoparError` that an action raises."""
    try:
        action()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "NAdam": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},
    "Rprop": {"lr": 0.001},
    "ASGD": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
}


def optimizers_go_on(rank: int, world_size: int, saving: Any, loading: Any, folder: str) -> dict[str, list[str]]:
    """For each optimizer what is not bit-equal after a load under another plan, or after a step under the same one."""
    found = {}
    data = [rows(GLOBAL_BATCH, LENGTH, seed) for seed in range(3)]

    def made(wish: Mapping[str, Any], seed: int, kind: str) -> Any:
        local = GLOBAL_BATCH // wish.get("dp", 1)
        model = parallelize(tokens(seed), f"{world_size}xcpu", example_inputs=rows(local, LENGTH, 0), plan=wish)
        own = [
            p for p in model.parameters() if p.numel() or kind != "Adafactor"
        ]  # it divides by the number of elements
        return model, getattr(torch.optim, kind)(own, **OPTIMIZERS[kind])

    def step(model: ParallelModel, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        model.forward_backward(model.local_batch(batch))
        optimizer.step()
        optimizer.zero_grad()

    for kind in OPTIMIZERS:
        model, optimizer = made(saving, 0, kind)
        for batch in data[:2]:
            step(model, optimizer, batch)
        model.save(f"{folder}/{kind}", optimizer, step=2)
        saved = whole_everywhere(_tensors(state_of(model, optimizer)))
        step(model, optimizer, data[2])
        end = whole_everywhere(_tensors(state_of(model, optimizer)))
        again, other = made(saving, 1, kind)
        again.load(f"{folder}/{kind}", other)
        step(again, other, data[2])
        found[kind] = differing(whole_everywhere(_tensors(state_of(again, other))), end)
        elsewhere, other = made(loading, 2, kind)
        elsewhere.load(f"{folder}/{kind}", other)
        found[kind] += differing(whole_everywhere(_tensors(state_of(elsewhere, other))), saved)
    return found


def _tensors(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        part: {
            name: value if isinstance(value, torch.Tensor) else torch.tensor(value) for name, value in values.items()
        }
        for part, values in state.items()
    }


def memory_that_changes(rank: int, folder: str) -> list[bool]:
    """Whether asynchronous saves hold the values of the moment, also where parameters or optimizer have new memory."""
    model = parallelize(tokens(), "2xcpu", example_inputs=rows(4, LENGTH, 0), plan={"dp": 2, "zero": 3})
    found = []
    for step in range(1, 5):
        if step != 2:  # in the second round the optimizer goes on, in the others it is a new one
            optimizer = torch.optim.AdamW(model.parameters())
        if step == 3:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data = parameter.data * 2
        model.forward_backward(model.local_batch(rows(GLOBAL_BATCH, LENGTH, step)))
        optimizer.step()
        optimizer.zero_grad()
        expected = whole_everywhere(state_of(model, optimizer))
        model.save(folder, optimizer, step=step, asynchronous=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)  # the step after the save
        model.load(folder, optimizer)
        found.append(not differing(whole_everywhere(state_of(model, optimizer)), expected))
    return found
