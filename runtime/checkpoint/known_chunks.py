"""Chunks of tensors that are saved again and again: which part of a tensor a rank holds is found once.

An asynchronous save lets the step wait for its copy only. With many small tensors, finding their chunks takes longer
than the copy.
"""

from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch

from autopar._torch import private
from autopar.runtime.parameters.flat_shards import FlatShards
from autopar.runtime.parameters.shown_tensor import as_shards, parts_of

_Place = tuple[tuple[int, tuple[int, ...]], ...]  # address and shape of each part in this rank's memory


class KnownChunks:
    """The chunks of tensors by name, as long as a name means the same tensor, not kept alive, in the same memory."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[ref[torch.Tensor], _Place, FlatShards]] = {}

    def of(self, name: str, tensor: torch.Tensor) -> FlatShards:
        """The chunks of a tensor."""
        place = _place(tensor)
        held = self._known.get(name)
        if held is not None and held[0]() is tensor and held[1] == place:
            return held[2]

        def forget(gone: Any) -> None:
            if name in self._known and self._known[name][0] is gone:
                del self._known[name]

        shards = as_shards(tensor.detach())
        self._known[name] = (ref(tensor, forget), place, shards)
        return shards


class ChunkCopies:
    """Copies of chunks in host memory, which the next copies overwrite."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[ref[FlatShards], FlatShards]] = {}

    def of(self, tensors: Mapping[str, FlatShards]) -> dict[str, FlatShards]:
        """A copy of every tensor."""
        copies = {name: self._memory(name, shards) for name, shards in tensors.items()}
        self._copies = {name: self._copies[name] for name in copies}
        targets = [values for shards in copies.values() for _, _, values in shards.chunks]
        sources = [values for shards in tensors.values() for _, _, values in shards.chunks]
        with torch.no_grad():
            private.copy_each(targets, sources)
        return copies

    def _memory(self, name: str, shards: FlatShards) -> FlatShards:
        held = self._copies.get(name)
        if held is None or held[0]() is not shards:
            before = {} if held is None else {offsets: values for offsets, _, values in held[1].chunks}

            def like(offsets: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
                old = before.get(offsets)
                if old is not None and old.shape == values.shape and old.dtype == values.dtype:
                    return old
                return torch.empty(values.shape, dtype=values.dtype, device="cpu")

            held = self._copies[name] = (ref(shards), shards.copied(like))
        return held[1]


def _place(tensor: torch.Tensor) -> _Place:
    parts = map(private.local_part, parts_of(tensor))
    return tuple((part.data_ptr(), tuple(part.shape)) for part in parts)
