"""Functions of ranks in test_run: `Ranks.run("run_ranks:name", ...)`."""

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from data_models import rows
from data_ranks import LENGTH, made, own_rows

import autopar
from autopar.errors import AutoparError
from autopar.runtime.recording import run as run_module

SECRET = "s3cret-of-the-environment"


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except AutoparError as error:
        return str(error)
    return ""


def trained(rank: int, world_size: int, wish: Mapping[str, Any], folder: str, starts: Any) -> list[float]:
    """The losses of steps; each start goes from a step to before another, with a short batch at odd steps."""
    os.environ["TOKEN"] = SECRET
    parallel, _ = made(world_size, wish, 4)
    memory = mock.patch.object(run_module, "peak_bytes", lambda device: 1000 + 10 * rank)
    found = []
    for first, last in starts:
        with memory, autopar.Run(folder, parallel, total_steps=10) as run:
            for step in range(first, last):
                counts = (4, 3) if step % 2 else (4, 4)
                batch, _ = own_rows(parallel, counts[: parallel.plan.degrees.dp], LENGTH, step)
                loss = parallel.forward_backward(batch)
                parallel.evaluate(batch)  # is not trained
                norm = parallel.clip_grad_norm_(1.0)
                run.log(step, loss, learning_rate=0.1, gradient_norm=norm, extra={"share": 0.5})
                found.append(loss.item())
    return found


def refusals(rank: int, world_size: int, wish: Mapping[str, Any], folder: str) -> dict[str, str]:
    """The messages of wrong calls, which all ranks get; the next right call works."""
    parallel, _ = made(world_size, wish, 2)
    odd = rank == 1
    found = {}
    with autopar.Run(folder, parallel) as run:
        found["second"] = message(lambda: autopar.Run(folder, parallel))
        found["total"] = message(lambda: autopar.Run(f"{folder}-2", parallel, total_steps=0))
        found["folder"] = message(lambda: autopar.Run("/proc/no/such", parallel))
        run.log(0, 1.0)
        found["step"] = message(lambda: run.log(0, 1.0))
        found["steps"] = message(lambda: run.log(3 if odd else 2, 1.0))
        found["type"] = message(lambda: run.log(4, "low" if odd else 1.0))  # type: ignore[arg-type]
        found["extra"] = message(lambda: run.log(4, 1.0, extra={"x": "y"}))  # type: ignore[dict-item]
        batch = rows(2, LENGTH, 0)
        found["call"] = message(lambda: parallel.forward_backward(batch) if odd else run.log(4, 1.0))
        run.log(5, torch.tensor(2.0))
    return found


def on_a_full_disk(rank: int, world_size: int, wish: Mapping[str, Any], folder: str) -> tuple[list[str], str]:
    """The messages of two steps of which the first cannot be written, and of the end."""
    parallel, _ = made(world_size, wish, 2)
    run = autopar.Run(folder, parallel)
    with mock.patch.object(os, "write", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        logged = [message(lambda step=step: run.log(step, 1.0)) for step in range(2)]
    return logged, message(run.close)


def another_model(rank: int, world_size: int, wish: Mapping[str, Any], folder: str) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    batch = (torch.randn(4, 8), torch.arange(4))
    loss_fn = torch.nn.functional.cross_entropy
    parallel = autopar.parallelize(model, f"{world_size}xcpu", example_inputs=batch, plan=wish, loss_fn=loss_fn)
    return message(lambda: autopar.Run(folder, parallel))


def with_tensorboard(rank: int, world_size: int, wish: Mapping[str, Any], folder: str) -> str:
    parallel, _ = made(world_size, wish, 2)

    def logged() -> None:
        with autopar.Run(folder, parallel, tensorboard=True) as run:
            for step in range(2):
                run.log(step, 1.0)

    return message(logged)
