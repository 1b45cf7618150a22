"""Values from rank 0 to all ranks, errors of one rank to all ranks, and tensors from rank to rank."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from autopar._torch import private
from autopar.errors import AutoparError
from autopar.runtime.distributed.launch import device_of_rank

_T = TypeVar("_T")
_CHUNK_BYTES = 64 << 20


def broadcast_object(value: _T, group: dist.ProcessGroup | None = None) -> _T:
    """Rank 0's value on every rank. Collective."""
    held = [value]
    dist.broadcast_object_list(held, group=group)
    return held[0]


def gather_objects(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Every rank's value on every rank, in rank order. Collective."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=group)
    return every


def _outcome(action: Callable[[], _T]) -> tuple[_T | None, AutoparError | None]:
    try:
        return action(), None
    except AutoparError as error:
        return None, error


def run_on_all_ranks(action: Callable[[], _T], group: dist.ProcessGroup | None = None) -> list[_T]:
    """The results of all ranks' actions. The first rank's `AutoparError` is raised on every rank. Collective."""
    every = gather_objects(_outcome(action), group)
    for _, failure in every:
        if failure is not None:
            raise failure
    return cast(list[_T], [result for result, _ in every])


def run_on_first_rank(action: Callable[[], _T], group: dist.ProcessGroup | None = None) -> _T:
    """The result of rank 0's action on every rank. Its `AutoparError` is raised on every rank. Collective."""
    result, error = broadcast_object(_outcome(action) if dist.get_rank() == 0 else (None, None), group)
    if error is not None:
        raise error
    return cast(_T, result)


def on_all_ranks(action: Callable[[], _T]) -> _T:
    """The result of this rank's action. The first rank's `AutoparError` is raised on every rank. Collective."""
    results: list[_T] = []
    run_on_all_ranks(lambda: results.append(action()))
    return results[0]


# Tensors of any dtype, as bytes in bounded chunks. NCCL gets chunks on the device of a tensor that lies on the host.


def group_of_messages() -> dist.ProcessGroup | None:
    """The group of messages, of its own if collectives are checked: the check counts messages. Collective."""
    return _group_of_messages(dist.group.WORLD)


@cache
def _group_of_messages(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    is_checked = dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
    return dist.new_group(timeout=private.group_timeout()) if is_checked else world


def send_tensor(value: torch.Tensor, to: int) -> None:
    """Send a tensor to a rank, which must call `receive_tensor`."""
    for chunk in _chunks(value.contiguous()):
        dist.send(chunk, to, group=group_of_messages())


def receive_tensor(into: torch.Tensor, source: int) -> None:
    """Fill a contiguous tensor of the device of this rank."""
    for chunk in _chunks(into):
        dist.recv(chunk, source, group=group_of_messages())


def share_tensor(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill a contiguous tensor on this rank's device with the value on the group's first rank. Collective."""
    for chunk in _chunks(value):
        dist.broadcast(chunk, group=group, group_src=0)


def _chunks(value: torch.Tensor) -> Iterator[torch.Tensor]:
    if value.numel():
        for chunk in value.detach().reshape(-1).view(torch.uint8).split(_CHUNK_BYTES):
            yield chunk.to(device_of_rank())
