"""This rank's part of a tensor as chunks of a flat global shape, for torch.distributed.checkpoint.

A parameter of factored shape (`autopar.runtime.parameters.placement`) appears as chunks of the flat tensor: three runs
of rows for ``(3, h, e)`` split on `h`. The parts of an unequal packing (`autopar.capture.passes.packings`) appear as
chunks of the model's parameter. So a checkpoint does not depend on the plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from autopar._torch.private import local_shape_and_offset

ShardPiece = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]  # offsets, sizes, this rank's values


@dataclass(frozen=True, slots=True)
class Joint:
    """What makes up a tensor of `shape`: one stored tensor, or several between `bounds` in dimension `dim`.

    ``(0, 6, 9, 12)`` are the bounds of three parts.
    """

    shape: tuple[int, ...]
    dim: int = 0
    bounds: tuple[int, ...] = ()

    @property
    def pieces(self) -> list[tuple[int, tuple[int, ...]]]:
        """Where in `dim` each part begins, and its own flat shape."""
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        return [(a, (*before, b - a, *after)) for a, b in pairwise(self.bounds)] or [(0, self.shape)]

    def cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The values of each part in a whole value. Views."""
        return [whole.narrow(self.dim, a, b - a) for a, b in pairwise(self.bounds)] or [whole]

    def joined(self, parts: Sequence[torch.Tensor], **options: Any) -> torch.Tensor:
        """The whole value. `options` are those of `DTensor.full_tensor`. Collective."""
        every = [DTensor.full_tensor(part, **options) if isinstance(part, DTensor) else part for part in parts]
        wholes = [whole.reshape(shape) for whole, (_, shape) in zip(every, self.pieces, strict=True)]
        return torch.cat(wholes, self.dim) if self.bounds else wholes[0]

    def chunks(self, parts: Sequence[torch.Tensor]) -> Iterator[ShardPiece]:
        """This rank's chunks of the whole value."""
        for part, (start, shape) in zip(parts, self.pieces, strict=True):
            for offsets, sizes, values in _flat_chunks(part, shape):
                yield tuple(o + start * (d == self.dim) for d, o in enumerate(offsets)), sizes, values


class FlatShards(torch.Tensor):
    """This rank's chunks of a flat tensor, as views. It is on meta, because torch's checkpoint looks for tensors."""

    parts: tuple[torch.Tensor, ...]
    joint: Joint
    chunks: tuple[ShardPiece, ...]

    @staticmethod
    def of(parts: Sequence[torch.Tensor], joint: Joint) -> "FlatShards":
        shards = torch.empty(joint.shape, dtype=parts[0].dtype, device="meta").as_subclass(FlatShards)
        shards.parts, shards.joint, shards.chunks = tuple(parts), joint, tuple(joint.chunks(parts))
        return shards

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the values are: loading replaces tensors that say they are on meta by new ones."""
        return self.parts[0].device

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor in its flat shape. Collective."""
        return self.joint.joined(self.parts)

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
            for offsets, sizes, values in {chunk[0]: chunk for chunk in self.chunks}.values()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        hinted = self.chunks[index.index :][:1] if index.index is not None else ()
        for offsets, _, values in (*hinted, *self.chunks):
            if index.offset is None or tuple(index.offset) == offsets:
                return values
        raise ValueError(f"no chunk at {index} among {[c[0] for c in self.chunks]}")


def _factors(shape: tuple[int, ...], flat_shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The factored dimensions that make up each flat one: the first, and the one behind the last."""
    spans, position = [], 0
    for size in flat_shape:
        start = position
        position += 1
        while prod(shape[start:position]) < size:
            position += 1
        spans.append((start, position))
    return spans


def _flat_chunks(tensor: torch.Tensor, flat_shape: tuple[int, ...]) -> Iterator[ShardPiece]:
    """Boxes of the flat tensor that make up a box of the factored one: one per index of the packing dimensions."""
    if isinstance(tensor, DTensor):
        local, offset = local_shape_and_offset(tensor)
        values = tensor.to_local()
    else:
        local, offset, values = tuple(flat_shape), (0,) * len(flat_shape), tensor.reshape(flat_shape)
        tensor = values
    if not values.numel():
        return
    spans = _factors(tuple(tensor.shape), flat_shape)
    outer = [d for start, stop in spans for d in range(start, stop - 1)]
    sizes = tuple(local[stop - 1] for _, stop in spans)
    for index in product(*(range(local[d]) for d in outer)):
        at = dict(zip(outer, index, strict=True))
        begin = [offset[d] + at.get(d, 0) for d in range(len(local))]
        offsets = tuple(int(np.ravel_multi_index(begin[a:b], tensor.shape[a:b])) for a, b in spans)
        yield offsets, sizes, values[tuple(at.get(d, slice(None)) for d in range(len(local)))]
