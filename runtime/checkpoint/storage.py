"""The files of a checkpoint: which rank writes which chunk of a tensor, and which chunks it reads.

torch.distributed.checkpoint pickles its metadata and unpickles it when it loads. Here the metadata is the manifest.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from autopar.errors import CheckpointError
from autopar.ir.storage import buckets
from autopar.runtime.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, entry_key
from autopar.runtime.checkpoint.tensor_files import Part, dtype_name, parts_in_file, write_tensors
from autopar.runtime.parameters.shown_tensor import as_shards

_T = TypeVar("_T")
FILE_BYTES = 2 << 30  # a rank begins another file; files are hashed by several ranks
Key = tuple[str, tuple[int, ...]]  # of a chunk: its tensor and its offsets
Written = tuple[str, str, Chunk, FileEntry]  # the tensor of a chunk, its dtype, its place and its file


def held_chunks(tensors: Mapping[str, Any]) -> dict[Key, torch.Tensor]:
    """This rank's chunks of tensors."""
    return {(name, at): values for name, tensor in tensors.items() for at, _, values in as_shards(tensor).chunks}


def shares(ranks: Sequence[Mapping[_T, int]]) -> list[set[_T]]:
    """What each rank writes or reads, of the bytes of what it holds. The holder with the least so far gets a thing."""
    holders: dict[_T, list[int]] = {}
    for rank, sizes in enumerate(ranks):
        for key in sizes:
            holders.setdefault(key, []).append(rank)
    parts, loads = [set[_T]() for _ in ranks], [0] * len(ranks)
    for key, those in holders.items():
        least = min(those, key=loads.__getitem__)
        parts[least].add(key)
        loads[least] += ranks[least][key]
    return parts


def write_chunks(folder: Path, chunks: Mapping[Key, torch.Tensor], finite: frozenset[str], rank: int) -> list[Written]:
    """Write the chunks of one rank, of which some tensors must be `finite`."""
    for (name, _), value in chunks.items():
        if name in finite and not bool(torch.isfinite(value).all()):
            raise CheckpointError(
                f"the parameter {name.partition('/')[2]} holds NaN or infinity on rank {rank}; the checkpoints before "
                "are as they were: load one of them"
            )
    written, items = list[Written](), list(chunks.items())
    for number, part in enumerate(buckets(((value.nbytes, None) for _, value in items), FILE_BYTES)):
        file, mine = f"rank-{rank:05d}-{number:03d}.safetensors", [items[index] for index in part]
        try:
            entry = write_tensors(folder / file, {entry_key(n, at, v.shape): v for (n, at), v in mine})
        except OSError as error:
            raise CheckpointError(f"{folder / file} cannot be written: {_reason(error, folder)}") from None
        for (name, at), value in mine:
            chunk = Chunk(file=file, offsets=at, sizes=tuple(value.shape))
            written.append((name, dtype_name(value.dtype), chunk, entry))
    return written


def _reason(error: OSError, folder: Path) -> str:
    if isinstance(error, FileNotFoundError) and not folder.is_dir():
        return "this rank does not see the folder that the first rank made; save to a file system that all hosts share"
    return error.strerror or str(error)


def entries_of(written: Iterable[Written], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    """The tensors that all ranks together have written, of these global shapes."""
    chunks: dict[str, list[Chunk]] = {}
    dtypes: dict[str, str] = {}
    for name, dtype, chunk, _ in written:
        chunks.setdefault(name, []).append(chunk)
        if dtypes.setdefault(name, dtype) != dtype:
            raise CheckpointError(f"{name} has other dtypes on other ranks; use one dtype on all ranks")
    for name, parts in chunks.items():
        if sum(prod(chunk.sizes) for chunk in parts) != prod(shapes[name]):
            raise CheckpointError(f"{name} is not made up of the chunks that the ranks hold")
    return {
        name: TensorEntry(
            dtype=dtypes[name], shape=shapes[name], chunks=tuple(sorted(parts, key=lambda chunk: chunk.offsets))
        )
        for name, parts in chunks.items()
    }


def read_chunks(folder: Path, manifest: Manifest, wanted: Mapping[str, Any]) -> None:
    """Read this rank's elements of tensors, in place."""
    by_file: dict[str, list[tuple[torch.Tensor, Part]]] = {}
    for name, tensor in wanted.items():
        entry = manifest.tensors[name]
        for offsets, sizes, values in as_shards(tensor).chunks:
            for chunk in entry.chunks:
                sides = zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
                box = [(max(at, o), min(at + size, o + s)) for at, size, o, s in sides]  # what both hold
                if all(start < stop for start, stop in box):
                    key, dtype = entry_key(name, chunk.offsets, chunk.sizes), getattr(torch, entry.dtype)
                    part = key, dtype, chunk.sizes, _within(box, chunk.offsets)
                    by_file.setdefault(chunk.file, []).append((values.detach()[_within(box, offsets)], part))
    for file, pairs in by_file.items():
        for (target, _), values in zip(pairs, parts_in_file(folder / file, [p for _, p in pairs]), strict=True):
            target.copy_(values)


def _within(box: Sequence[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    """A box of a tensor as a part of a chunk that begins at `offsets`."""
    return tuple(slice(start - at, stop - at) for (start, stop), at in zip(box, offsets, strict=True))
