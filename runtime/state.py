"""Sharded state under flat global shapes, as torch.distributed.checkpoint saves and loads it.

A parameter held in factored shape (`autopar.runtime.parameters`) is presented as the chunks of the flat tensor that a
rank holds: for ``(3, h, e)`` split on `h`, three runs of rows. A checkpoint is then independent of the plan.
"""

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from autopar.runtime.parameters import Held
from autopar.trace._torch_private import local_shape_and_offset

Chunk = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]  # offsets, sizes, this rank's values


class FlatShards(torch.Tensor):
    """This rank's chunks of a tensor of flat global shape; values are views, so loading writes in place.

    A tensor on meta, because torch.distributed.checkpoint looks for shards in tensors only.
    """

    tensor: DTensor
    chunks: tuple[Chunk, ...]

    @staticmethod
    def of(tensor: DTensor, flat_shape: tuple[int, ...]) -> "FlatShards":
        made = torch.empty(flat_shape, dtype=tensor.dtype, device="meta").as_subclass(FlatShards)
        made.tensor, made.chunks = tensor, tuple(_flat_chunks(tensor, flat_shape))
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the values are: loading replaces tensors that say they are on meta by new ones."""
        return self.tensor.device

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor in its flat shape. Collective."""
        return self.tensor.full_tensor().reshape(self.size())

    def __create_write_items__(self, name: str, obj: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties=TensorProperties.create_from_tensor(values),
                    size=self.size(),
                ),
            )
            for offsets, sizes, values in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offsets, _, values in self.chunks:
            if index.offset is None or tuple(index.offset) == offsets:
                return values
        raise ValueError(f"no chunk at {index} among {[c[0] for c in self.chunks]}")


def _factors(shape: tuple[int, ...], flat_shape: tuple[int, ...]) -> list[int]:
    """How many factored dimensions make up each flat one."""
    counts, position = [], 0
    for size in flat_shape:
        start = position
        position += 1
        while prod(shape[start:position]) < size:
            position += 1
        counts.append(position - start)
    return counts


def _flat_chunks(tensor: DTensor, flat_shape: tuple[int, ...]) -> Iterator[Chunk]:
    """Boxes of the flat tensor that make up a box of the factored one: one per index of the packing dimensions."""
    local, offset = local_shape_and_offset(tensor)
    values = tensor.to_local()
    if not values.numel():
        return
    counts = _factors(tuple(tensor.shape), flat_shape)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    outer = [d for start, count in zip(starts, counts, strict=True) for d in range(start, start + count - 1)]
    for index in product(*(range(local[d]) for d in outer)):
        at = dict(zip(outer, index, strict=True))
        offsets, sizes = [], []
        for start, count in zip(starts, counts, strict=True):
            last = start + count - 1
            base = 0
            for d in range(start, last):
                base = (base + offset[d] + at[d]) * tensor.shape[d + 1]
            offsets.append(base + offset[last])
            sizes.append(local[last])
        piece = values[tuple(at.get(d, slice(None)) for d in range(len(local)))]
        yield tuple(offsets), tuple(sizes), piece


def flat_state(tensor: torch.Tensor, how: Held) -> Any:
    """A parameter, or optimizer state shaped like it, under its flat global shape."""
    if how.is_factored and isinstance(tensor, DTensor):
        return FlatShards.of(tensor, how.dims.shape)
    return tensor if tensor.dim() == 0 or isinstance(tensor, DTensor) else tensor.reshape(how.dims.shape)
