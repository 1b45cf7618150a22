"""Rank 1 gets a signal before one of its steps."""

import os
from typing import Any

import torch.distributed as dist


def send(signal: int, before_step: int) -> None:
    barrier, num_calls = dist.barrier, 0

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == before_step:
            os.kill(os.getpid(), signal)
        return barrier(*args, **more)

    if os.environ.get("RANK") == "1":
        dist.barrier = counted
