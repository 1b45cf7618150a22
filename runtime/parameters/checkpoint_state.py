"""Sharded state under flat global shapes, as torch.distributed.checkpoint saves and loads it.

A parameter of factored shape (`autopar.runtime.parameters.placement`) appears as chunks of the flat tensor: three runs
of rows for ``(3, h, e)`` split on `h`. The parts of an unequal packing (`autopar.capture.passes.packings`) appear as
chunks of the model's parameter. So a checkpoint does not depend on the plan.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from autopar._torch.private import local_shape_and_offset
from autopar.ir.program import Program, StateInfo
from autopar.ir.storage import Storage
from autopar.runtime.parameters.packed import by_model_parameter
from autopar.runtime.parameters.user_view import stored

Chunk = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]  # offsets, sizes, this rank's values


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRows:
    """A tensor that is all of a flat one, or rows of it: its own flat shape, and where in `dim` it starts."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0

    def chunks(self) -> Iterator[Chunk]:
        for offsets, sizes, values in _flat_chunks(stored(self.tensor), self.shape):
            yield tuple(o + self.start * (d == self.dim) for d, o in enumerate(offsets)), sizes, values

    def full_tensor(self) -> torch.Tensor:
        whole = self.tensor.full_tensor() if isinstance(self.tensor, DTensor) else self.tensor
        return whole.reshape(self.shape)


class FlatShards(torch.Tensor):
    """This rank's chunks of a tensor of flat global shape; values are views, so loading writes in place.

    A tensor on meta, because torch.distributed.checkpoint looks for shards in tensors only.
    """

    rows: tuple[FlatRows, ...]
    chunks: tuple[Chunk, ...]

    @staticmethod
    def of(rows: Sequence[FlatRows], flat_shape: tuple[int, ...]) -> "FlatShards":
        made = torch.empty(flat_shape, dtype=rows[0].tensor.dtype, device="meta").as_subclass(FlatShards)
        made.rows = tuple(rows)
        made.chunks = tuple(chunk for part in rows for chunk in part.chunks())
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the values are: loading replaces tensors that say they are on meta by new ones."""
        return self.rows[0].tensor.device

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor in its flat shape. Collective."""
        whole = [part.full_tensor() for part in self.rows]
        return torch.cat(whole, self.rows[0].dim) if self.dim() else whole[0]

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


def _flat_chunks(tensor: torch.Tensor, flat_shape: tuple[int, ...]) -> Iterator[Chunk]:
    """Boxes of the flat tensor that make up a box of the factored one: one per index of the packing dimensions."""
    if isinstance(tensor, DTensor):
        local, offset = local_shape_and_offset(tensor)
        values = tensor.to_local()
    else:
        local, offset, values = tuple(flat_shape), (0,) * len(flat_shape), tensor.reshape(flat_shape)
        tensor = values
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


def flat_state(tensor: torch.Tensor, how: Storage) -> Any:
    """A parameter, or optimizer state shaped like it, under its flat global shape."""
    if how.is_factored and isinstance(tensor, DTensor):
        return FlatShards.of([FlatRows(tensor=tensor, shape=how.dims.shape)], how.dims.shape)
    return tensor if tensor.dim() == 0 or isinstance(tensor, DTensor) else tensor.reshape(how.dims.shape)


def whole_state(infos: Sequence[StateInfo], tensors: Sequence[torch.Tensor], held: Mapping[str, Storage]) -> Any:
    """What `flat_state` says of a parameter, for one that is held in pieces too."""
    rows = [
        FlatRows(tensor=tensor, shape=held[info.name].dims.shape, dim=info.part.dim, start=info.part.start)
        for info, tensor in zip(infos, tensors, strict=True)
        if info.part is not None
    ]
    part = infos[0].part
    return flat_state(tensors[0], held[infos[0].name]) if part is None else FlatShards.of(rows, part.shape)


def optimizer_state(
    program: Program,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    held: Mapping[str, Storage],
) -> dict[str, Any]:
    """The state of every parameter under the model's names.

    The parts of a packed parameter join their state if it has the parameter's shape. One scalar, such as a step count,
    stands for all parts. State of another shape keeps the names of the parts.
    """
    found: dict[str, Any] = {}
    for name, infos in by_model_parameter(program):
        own = [parameters[info.name] for info in infos if info.name in parameters]
        if not own:
            continue  # another pipeline stage's
        states = [optimizer.state.get(parameter, {}) for parameter in own]
        for key in dict.fromkeys(key for state in states for key in state):
            values = [state.get(key) for state in states]
            tensors = [v for v in values if isinstance(v, torch.Tensor)]
            if len(tensors) == len(own) and all(t.shape == p.shape for t, p in zip(tensors, own, strict=True)):
                found[f"{name}.{key}"] = whole_state(infos, tensors, held)
            elif len(own) == 1:
                found[f"{name}.{key}"] = values[0]
            elif len(tensors) == len(own) and all(t.dim() == 0 for t in tensors):
                found[f"{name}.{key}"] = FlatShards.of([FlatRows(tensor=t, shape=()) for t in tensors], ())
            else:
                found |= {f"{info.name}.{key}": s[key] for info, s in zip(infos, states, strict=True) if key in s}
    return found
