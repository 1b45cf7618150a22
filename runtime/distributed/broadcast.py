"""Values and tensors from rank 0 to all ranks, and errors of one rank to all ranks."""

from collections.abc import Callable, Container, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from autopar.errors import AutoparError

_T = TypeVar("_T")


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank. Collective."""
    count = torch.tensor(int(flag), device=_device())
    dist.all_reduce(count)
    return bool(count.item())


def broadcast_object(value: _T, group: dist.ProcessGroup | None = None) -> _T:
    """Rank 0's value on every rank. Collective."""
    held = [value]
    dist.broadcast_object_list(held, group=group)
    return held[0]


def gather_objects(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Every rank's value on every rank, in rank order. Collective."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value, group=group)
    return every


def run_on_all_ranks(action: Callable[[], _T], group: dist.ProcessGroup | None = None) -> list[_T]:
    """The results of all ranks' actions. The first rank's `AutoparError` is raised on every rank. Collective."""
    result = error = None
    try:
        result = action()
    except AutoparError as raised:
        error = raised
    every = gather_objects((result, error), group)
    for _, failure in every:
        if failure is not None:
            raise failure
    return cast(list[_T], [one for one, _ in every])


def run_on_first_rank(action: Callable[[], _T], group: dist.ProcessGroup | None = None) -> _T:
    """The result of rank 0's action on every rank. Its `AutoparError` is raised on every rank. Collective."""
    result = error = None
    if dist.get_rank() == 0:
        try:
            result = action()
        except AutoparError as raised:
            error = raised
    result, error = broadcast_object((result, error), group)
    if error is not None:
        raise error
    return cast(_T, result)


def from_first_rank(source: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Rank 0's tensors on every rank. Each call is collective: all ranks must ask for the same names in one order."""

    def received(name: str) -> torch.Tensor:
        value = source(name)
        shared = value.detach().to(_device(), copy=True).contiguous()
        dist.broadcast(shared, 0)
        return shared.to(value.device)

    return received


def kept_from_first_rank(
    source: Callable[[str], torch.Tensor], names: Iterable[str], kept: Container[str]
) -> Callable[[str], torch.Tensor]:
    """Rank 0's tensors of `names`, of which this rank keeps `kept`. Ranks may keep different names. Collective."""
    received, found = from_first_rank(source), {}
    for name in names:
        value = received(name)
        if name in kept:
            found[name] = value
    return found.__getitem__
