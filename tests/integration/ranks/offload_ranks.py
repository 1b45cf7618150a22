"""Functions that ranks run in test_offload: steps of training with parts on the host, and the bytes that move."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from priced_models import Case, captured
from priced_ranks import distinct_bytes, local

from autopar.ir.offload import PARAMETERS
from autopar.ir.plan import Plan
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.model.zero import is_zero_sharded
from autopar.runtime.verify.random_batches import random_batches
from autopar.runtime.verify.verify import this_ranks_part

STEPS = 2


def made(one: Case, plan: Plan) -> tuple[ParallelModel, list[Any]]:
    """The model of a case in float64, and this rank's part of every batch."""
    program, source = captured(one.spec, one.layers, plan.degrees.precision)
    model = ParallelModel(program, plan, source, torch.device("cpu"))
    data = random_batches(program, plan.degrees, STEPS, 0)
    at = model.rank_mesh.sample_ranks.coordinate
    return model, [this_ranks_part(program, batch, plan.degrees, at) for batch in data]


def trained(
    rank: int, one: Case, plan: Plan, offload: str, optimizer: str = "AdamW", clip: float | None = 0.5
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps, and whole weights after them."""
    model, parts = made(one, replace(plan, degrees=replace(plan.degrees, offload=offload)))
    held = [p for p in model.parameters() if optimizer != "Muon" or p.dim() == 2]
    own = getattr(torch.optim, optimizer)(held, lr=1e-2)
    losses = []
    for part in parts:
        losses.append(float(model.forward_backward(part)))
        if clip is not None:
            model.clip_grad_norm_(clip)
        own.step()
        own.zero_grad()
    evaluated = float(model.evaluate(first_micro_batch(model, parts[0]))["loss"])
    return [*losses, evaluated], whole(model)


def first_micro_batch(model: ParallelModel, part: Any) -> Any:
    """The first sequences of a rank's part of a batch."""
    degrees = model.plan.degrees
    return {
        name: value[: len(value) // degrees.num_micro_batches] if value.dim() else value for name, value in part.items()
    }


def whole(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Whole weights by name. Collective."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }


class _MovesOfFsdp:
    """Bytes that FSDP2 moves with `Tensor.to`, which copies nothing between equal devices: shards, then gradients.

    It asks for shards without blocking. It never asks for gradients so without pinned memory.
    """

    def __init__(self) -> None:
        self.to_device = self.to_host = 0

    def to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and isinstance(args[0], torch.device) and set(kwargs) == {"non_blocking"}:
            size = tensor.numel() * tensor.element_size()
            self.to_device += size * kwargs["non_blocking"]
            self.to_host += size * (not kwargs["non_blocking"])
        return torch._C.TensorBase.to(tensor, *args, **kwargs)


@contextmanager
def counting(model: ParallelModel) -> Iterator[dict[str, int]]:
    """The bytes that move in this context."""
    found: dict[str, int] = {}
    down, up = model.copies.bytes_to_host, model.copies.bytes_to_device
    fsdp = _MovesOfFsdp()
    with mock.patch.object(torch.Tensor, "to", lambda tensor, *args, **kwargs: fsdp.to(tensor, *args, **kwargs)):
        yield found
    found["to_host_bytes"] = model.copies.bytes_to_host - down
    found["to_device_bytes"] = model.copies.bytes_to_device - up
    found["fsdp_to_host_bytes"], found["fsdp_to_device_bytes"] = fsdp.to_host, fsdp.to_device


def moved(rank: int, one: Case, plan: Plan) -> dict[str, int]:
    """The bytes that one step moves between device and host."""
    model, parts = made(one, plan)
    model.forward_backward(parts[0])
    model.zero_grad()
    with counting(model) as found:
        model.forward_backward(parts[1])
    return found


def held_on_host(rank: int, one: Case, plan: Plan) -> int:
    """Bytes of the parameters on the host, of their gradients and of AdamW's state, after a step."""
    model, parts = made(one, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for part in parts:  # the gradients of the last step stay
        optimizer.zero_grad()
        model.forward_backward(part)
        optimizer.step()
    stored = dict(model.stored_parameters())
    if plan.degrees.offloads(PARAMETERS):
        stored = {name: p for name, p in stored.items() if is_zero_sharded(p)}
    else:
        assert not {id(p) for p in stored.values()} & {id(p) for p in computed(model)}
    held = [t for p in stored.values() for t in (p, p.grad) if t is not None]
    state = [v for p, own in optimizer.state.items() for v in own.values() if any(p is one for one in stored.values())]
    return distinct_bytes(local(t) for t in held) + sum(local(v).numel() * v.element_size() for v in state)


def computed(model: ParallelModel) -> list[torch.Tensor]:
    """The parameters that blocks compute with."""
    return [p for module in model.stage_modules().values() for p in module.parameters()]


def trained_in_backward(
    rank: int, one: Case, plan: Plan, in_backward: bool
) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """Losses and weights of some steps, and what was updated while a backward pass ran, in order."""
    model, parts = made(one, plan)

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    early: list[str] = []
    if not in_backward:
        own = make(list(model.parameters()))
    else:
        model.step_in_backward(make)
        step = model._backward_step
        assert step is not None
        begin = step._update

        def update(name: str) -> None:
            if threading.current_thread() is not threading.main_thread():
                early.append(name)
            begin(name)

        step._update = update  # type: ignore[method-assign]
    losses = []
    for part in parts:
        losses.append(float(model.forward_backward(part)))
        if not in_backward:
            own.step()
            own.zero_grad()
        assert [p for p in model.parameters() if p.grad is not None] == []
    return losses, whole(model), early
