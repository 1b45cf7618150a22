"""A module that sends SIGKILL to rank 1 long after its own trial, when it is the best plan and steps beside another."""

import os
import signal
from typing import Any

import torch.distributed as dist

_BARRIER, _CALLS = dist.barrier, [0]


def _barrier(*args: Any, **more: Any) -> Any:
    _CALLS[0] += 1
    if _CALLS[0] == 15:
        os.kill(os.getpid(), signal.SIGKILL)
    return _BARRIER(*args, **more)


if os.environ.get("RANK") == "1":
    dist.barrier = _barrier
