"""Small things that rank 0 tells the others."""

from collections.abc import Callable

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


def from_first_rank(source: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Rank 0's tensors on every rank. Each call is collective: all ranks must ask for the same names in one order."""

    def received(name: str) -> torch.Tensor:
        value = source(name)
        shared = value.detach().to(_device(), copy=True).contiguous()
        dist.broadcast(shared, 0)
        return shared.to(value.device)

    return received
