"""The storage of torch.distributed.checkpoint: its planner says who writes and reads which chunk, files are ours.

torch's own storage pickles its metadata and unpickles it when it loads. Here the metadata is the manifest.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.folder import parts_of_size
from autopar.runtime.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, entry_key
from autopar.runtime.checkpoint.tensor_files import dtype_name, opened, write_tensors

FILE_BYTES = 2 << 30  # a rank begins another file; files are hashed by several ranks
Files = Mapping[str, FileEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What all ranks together have written: the files, and the tensors in them."""

    files: Files
    tensors: Mapping[str, TensorEntry]


class ManifestWriter(StorageWriter):
    """Writes the chunks of one rank. `begin` takes every rank's `part` and names the folder; `end` publishes it."""

    def __init__(
        self,
        part: Any,
        begin: Callable[[Sequence[Any]], Path],
        end: Callable[[Contents], None],
        refusal: Callable[[str, torch.Tensor], str | None],
        *,
        rank: int,
    ) -> None:
        self._part, self._begin, self._end, self._refusal, self._rank = part, begin, end, refusal, rank

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, storage_data=self._part)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        folder = self._begin([plan.storage_data for plan in plans])
        return [replace(plan, storage_data=folder) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder: Path = plan.storage_data
        chunks: list[tuple[WriteItem, torch.Tensor]] = []
        for item in plan.items:
            value = planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO or not isinstance(value, torch.Tensor):
                raise CheckpointError(f"{item.index.fqn} is no tensor")
            refusal = self._refusal(item.index.fqn, value)
            if refusal is not None:
                raise CheckpointError(refusal)
            chunks.append((item, value))
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._written(folder, chunks))
        return done

    def _written(self, folder: Path, chunks: Sequence[tuple[WriteItem, torch.Tensor]]) -> list[WriteResult]:
        results = []
        for number, part in enumerate(parts_of_size([value.nbytes for _, value in chunks], FILE_BYTES)):
            name = f"rank-{self._rank:05d}-{number:03d}.safetensors"
            mine = [chunks[index] for index in part]
            keyed = {entry_key(i.index.fqn, i.index.offset or (), value.shape): value for i, value in mine}
            try:
                entry = write_tensors(folder / name, keyed)
            except OSError as error:
                raise CheckpointError(f"{folder / name} cannot be written: {_reason(error, folder)}") from None
            for item, value in mine:
                chunk = Chunk(file=name, offsets=tuple(item.index.offset or ()), sizes=tuple(value.shape))
                stored = (chunk, dtype_name(value.dtype), entry)
                results.append(WriteResult(index=item.index, size_in_bytes=value.nbytes, storage_data=stored))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, FileEntry] = {}
        chunks: dict[str, list[Chunk]] = {}
        dtypes: dict[str, str] = {}
        for result in (r for each in results for r in each):
            chunk, dtype, entry = result.storage_data
            files[chunk.file] = entry
            chunks.setdefault(result.index.fqn, []).append(chunk)
            if dtypes.setdefault(result.index.fqn, dtype) != dtype:
                raise CheckpointError(f"{result.index.fqn} has other dtypes on other ranks; use one dtype on all ranks")
        tensors = {
            name: TensorEntry(
                dtype=dtypes[name],
                shape=tuple(_tensor_metadata(metadata, name).size),
                chunks=tuple(sorted(entries, key=lambda chunk: chunk.offsets)),
            )
            for name, entries in chunks.items()
        }
        self._end(Contents(files=files, tensors=tensors))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _reason(error: OSError, folder: Path) -> str:
    if isinstance(error, FileNotFoundError) and not folder.is_dir():
        return "this rank does not see the folder that the first rank made; save to a file system that all hosts share"
    return error.strerror or str(error)


def _tensor_metadata(metadata: Metadata, name: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


class ManifestReader:
    """Reads the chunks that one rank needs from the files of a checkpoint whose manifest is known."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest

    def read_metadata(self) -> Metadata:
        """The tensors and their chunks, as torch's planner has them."""
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
                    size=torch.Size(tensor.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                        for chunk in tensor.chunks
                    ],
                )
                for name, tensor in self._manifest.tensors.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read the elements of a plan, in place."""
        by_file: dict[str, list[tuple[ReadItem, Chunk]]] = {}
        for item in plan.items:
            chunk = self._chunk_at(item.storage_index)
            by_file.setdefault(chunk.file, []).append((item, chunk))
        for name, items in by_file.items():
            with opened(self._folder / name) as file:
                for item, chunk in items:
                    self._read(file, item, chunk, planner)

    def _read(self, file: Any, item: ReadItem, chunk: Chunk, planner: LoadPlanner) -> None:
        if item.type is LoadItemType.BYTE_IO:
            raise CheckpointError(f"{item.dest_index.fqn} is no tensor")
        name = item.storage_index.fqn
        boxes = zip(item.storage_offsets, item.lengths, strict=True)
        part = tuple(slice(start, start + length) for start, length in boxes)
        dtype = getattr(torch, self._manifest.tensors[name].dtype)
        values = file.read(entry_key(name, chunk.offsets, chunk.sizes), dtype, chunk.sizes, part)
        target = planner.resolve_tensor(item).detach()
        target.copy_(values)
        planner.commit_tensor(item, target)

    def _chunk_at(self, index: MetadataIndex) -> Chunk:
        chunks, offset = self._manifest.tensors[index.fqn].chunks, tuple(index.offset or ())
        hinted = chunks[index.index :][:1] if index.index is not None else ()
        return next(chunk for chunk in (*hinted, *chunks) if chunk.offsets == offset)
