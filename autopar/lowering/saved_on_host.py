"""Tensors that autograd saves for the backward pass, held on the host meanwhile: the hooks that run, and are priced.

    forward     a block saves tensors. Each storage among them is copied to the host once, whole, however many tensors
                view it. The device memory is free when the block ends
    backward    the first use of a storage copies it back. It stays until the last of its tensors was used

`torch.autograd.graph.save_on_cpu` copies every saved tensor by itself: the weights too, and one input of three
projections three times. These hooks leave out the storages that stay on the device anyway.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from autopar._torch import private


class Copies(Protocol):
    """How flat tensors move. Between both calls the host's tensor is opaque."""

    device: torch.device

    def to_host(self, value: torch.Tensor) -> Any: ...
    def to_device(self, host: Any) -> torch.Tensor: ...


@dataclass(slots=True, eq=False)
class _Storage:
    """A saved storage on the host, and on the device while the backward pass uses it."""

    held: Any
    num_saved: int = 0  # tensors that view it and that the backward pass has not used
    fetched: torch.Tensor | None = None

    def use(self, copies: Copies) -> torch.Tensor:
        flat = self.fetched if self.fetched is not None else copies.to_device(self.held)
        self.num_saved -= 1
        self.fetched = flat if self.num_saved > 0 else None
        return flat


@dataclass(frozen=True, slots=True, eq=False)
class _HostView:
    """A saved tensor as a view of a storage on the host."""

    storage: _Storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True, eq=False)
class _Block:
    """The storages that a call of a block has saved. Its tensors live until it ends: no address is used twice."""

    copies: Copies
    stays: frozenset[int]
    keep: Callable[[torch.Tensor], Any]
    found: dict[tuple[int, torch.dtype], tuple[_Storage, torch.Tensor]] = field(default_factory=dict)

    def pack(self, tensor: torch.Tensor) -> Any:
        if private.storage_id(tensor) in self.stays or not self._can_move(tensor):
            return self.keep(tensor)
        key = (private.storage_id(tensor), tensor.dtype)
        if key not in self.found:
            size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            flat = tensor.detach().as_strided((size,), (1,), 0)
            self.found[key] = (_Storage(self.copies.to_host(flat)), flat)
        storage = self.found[key][0]
        storage.num_saved += 1
        return _HostView(storage, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def _can_move(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is all of what it shows, and lies on the device: seeds of attention lie on the host."""
        is_plain = private.is_plain(tensor) and not (tensor.is_conj() or tensor.is_neg())
        return is_plain and tensor.device.type == self.copies.device.type


@contextmanager
def saved_on_host(copies: Copies, stays: Iterable[Any]) -> Iterator[None]:
    """A context in which autograd saves tensors on the host, but those of `stays` as the code around it saves them."""
    keep, used = private.saved_tensor_hooks()
    ids = frozenset(private.storage_id(value) for value in stays if isinstance(value, torch.Tensor))
    block = _Block(copies, ids, keep)

    def unpack(saved: Any) -> torch.Tensor:
        if not isinstance(saved, _HostView):
            return used(saved)
        return saved.storage.use(copies).as_strided(saved.shape, saved.stride, saved.offset)

    with torch.autograd.graph.saved_tensors_hooks(block.pack, unpack):
        yield
    block.found.clear()
