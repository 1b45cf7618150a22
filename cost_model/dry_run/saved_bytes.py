"""Bytes of what autograd keeps from a forward to a backward pass, while they run; with or without data."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from autopar._torch import private


class _Kept:
    """A tensor that autograd keeps; without its graph, else a result would keep the operator that keeps it."""

    def __init__(self, tensor: torch.Tensor, holders: Counter[int]) -> None:
        self.tensor, self.holders, self.at = tensor.detach(), holders, private.storage_id(tensor)
        holders[self.at] += 1

    def __del__(self) -> None:
        self.holders[self.at] -= 1


class SavedBytes:
    """Counts the storages that autograd saves inside this context, without the storages of the `outside` tensors."""

    def __init__(self, outside: Sequence[Any]) -> None:
        self._outside = {private.storage_id(value) for value in outside if isinstance(value, torch.Tensor)}
        self._holders, self._sizes = Counter[int](), dict[int, int]()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def bytes(self) -> int:
        """Bytes of the saved storages, each counted once."""
        return sum(self._sizes[at] for at, holders in self._holders.items() if holders)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What is saved instead of a tensor."""
        at = private.storage_id(tensor)
        if at in self._outside:
            return tensor
        self._sizes[at] = tensor.untyped_storage().nbytes()
        return _Kept(tensor, self._holders)

    @staticmethod
    def unpack(kept: Any) -> torch.Tensor:
        """The tensor of what `pack` gave."""
        found: torch.Tensor = kept.tensor if isinstance(kept, _Kept) else kept
        return found

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
