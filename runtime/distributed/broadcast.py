"""Texts and tensors from rank 0 to all ranks."""

from collections.abc import Callable, Container, Iterable

import torch
import torch.distributed as dist


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank. Collective."""
    count = torch.tensor(int(flag), device=_device())
    dist.all_reduce(count)
    return bool(count.item())


def broadcast_text(text: str) -> str:
    """Rank 0's text on every rank, as bytes. Collective."""
    device = _device()
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device) if text else torch.empty(0)
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    if not size.item():
        return ""
    if dist.get_rank() != 0:
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(data, 0)
    return bytes(data.cpu().numpy()).decode()


def gather_texts(text: str) -> list[str]:
    """Every rank's text on rank 0, in rank order; nothing elsewhere. Collective."""
    device, world_size, is_first = _device(), dist.get_world_size(), dist.get_rank() == 0
    data = torch.tensor(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    lengths = [int(size.item()) for size in sizes]
    own = torch.zeros(max(1, *lengths), dtype=torch.uint8, device=device)
    own[: len(data)] = data.to(device)
    every = [torch.empty_like(own) for _ in range(world_size)] if is_first else None
    dist.gather(own, every, dst=0)
    return [bytes(one[:length].cpu().numpy()).decode() for one, length in zip(every or (), lengths, strict=is_first)]


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
