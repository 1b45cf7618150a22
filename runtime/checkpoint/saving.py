"""Saving: a copy of this rank's state, its files, and the manifest that makes them a checkpoint.

Every rank writes its chunks into a folder that is set aside. When all files are on disk, the first rank writes the
manifest, names the folder, and moves `latest`. An asynchronous save does all of this in a thread with a process group
of its own. The step waits for the copy only.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from autopar._torch import private
from autopar._version import __version__
from autopar.errors import CheckpointError, InputError
from autopar.files.lock import FolderLock, take_lock
from autopar.runtime.checkpoint.folder import new_partial, parsed, publish, remove_old
from autopar.runtime.checkpoint.manifest import FORMAT, Manifest, write_manifest
from autopar.runtime.checkpoint.optimizers import SavedOptimizer, merged
from autopar.runtime.checkpoint.storage import Key, Written, entries_of, held_chunks, shares, write_chunks
from autopar.runtime.checkpoint.tensor_files import pieces_of
from autopar.runtime.distributed.broadcast import broadcast_object, gather_objects
from autopar.runtime.distributed.mesh import named_ranks, ranks_by
from autopar.runtime.parameters.flat_shards import FlatShards

_T = TypeVar("_T")
Chunks = Mapping[Key, torch.Tensor]
GROUP_TIMEOUT = timedelta(hours=1)  # ranks write for different times
MAX_SHOWN = 3
_FAILED = "the checkpoint was not saved"
_logger = logging.getLogger("autopar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one rank saves: its chunks, plain data that all ranks share, optimizers, and which tensors are `finite`."""

    root: Path
    step: int
    keep_last: int | None
    tensors: Mapping[str, FlatShards]
    common: Mapping[str, Any]
    plain_tensors: Mapping[str, torch.Tensor]
    optimizers: Sequence[SavedOptimizer]
    finite: frozenset[str]
    made_by: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What the first rank gets of each rank: digests of what must be equal, optimizers, chunks with their bytes."""

    where: str
    step: int
    digests: Mapping[str, str]
    optimizers: Sequence[SavedOptimizer]
    shapes: Mapping[str, tuple[int, ...]]
    chunk_bytes: Mapping[Key, int]


class Saver:
    """The saves of one model: one after the other, perhaps in a thread."""

    def __init__(self) -> None:
        self._locks: dict[Path, FolderLock] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autopar-save")  # starting a thread would wait for it
        self._pending: Future[None] | None = None
        self.failure: CheckpointError | None = None  # of an asynchronous save, which was not raised yet
        self._copies: dict[Key, torch.Tensor] = {}  # host memory, which the next asynchronous save overwrites

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The process group of saves and loads, over gloo. Collective when it is first asked for."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        return group

    def finish(self) -> None:
        """Wait for the asynchronous save, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def save(self, snapshot: Snapshot, *, asynchronous: bool) -> None:
        """Save. An earlier save must have been finished. Collective."""
        group, chunks = self.group, held_chunks({**snapshot.tensors, **snapshot.plain_tensors})
        if not asynchronous:
            self._write(snapshot, chunks, group)
            return
        self._copies = {key: _memory_for(value, self._copies.get(key)) for key, value in chunks.items()}
        with torch.no_grad():
            private.copy_each(list(self._copies.values()), list(chunks.values()))
        self._pending = self._thread.submit(self._write_in_thread, snapshot, self._copies, group)

    def _write_in_thread(self, snapshot: Snapshot, chunks: Chunks, group: dist.ProcessGroup) -> None:
        try:
            with suppress(RuntimeError):  # of a rank that is gone, which the save meets too
                dist.barrier(group)  # writing would take processors from ranks that still copy
            self._write(snapshot, chunks, group)
        except CheckpointError as error:
            self.failure = error
            _logger.error("%s", error)

    def _write(self, snapshot: Snapshot, chunks: Chunks, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank()

        def on_first(action: Callable[[], _T]) -> _T:
            results = results_on_first(lambda: action() if rank == 0 else None, group, _FAILED)
            return cast(_T, broadcast_object(results[0] if results else None, group))

        try:
            parts = results_on_first(lambda: _part_of(snapshot, chunks), group, _FAILED)
            partial, final = on_first(lambda: _begin(self, snapshot, parts))
            try:
                share: list[Any] = [None]
                every_share = shares([part.chunk_bytes for part in parts]) if rank == 0 else None
                dist.scatter_object_list(share, every_share, src=0, group=group)
                mine = {key: value for key, value in chunks.items() if key in share[0]}
                every = results_on_first(lambda: write_chunks(partial, mine, snapshot.finite, rank), group, _FAILED)
                on_first(lambda: _end(self, snapshot, parts, partial, final, list(chain.from_iterable(every))))
            except CheckpointError:
                if rank == 0:  # above all a full disk
                    shutil.rmtree(partial, ignore_errors=True)
                raise
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"step {snapshot.step} was not saved: {type(error).__name__}: {error}") from error

    def lock(self, root: Path) -> FolderLock:
        """The lock of a folder, taken by the first save and confirmed by every one. Raises `CheckpointError`."""
        try:
            if root not in self._locks:
                self._locks[root] = take_lock(root, again=True)
            self._locks[root].confirm()
        except InputError as error:
            raise CheckpointError(str(error)) from None
        return self._locks[root]


def _memory_for(value: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Host memory for a copy: that of an earlier copy if it fits."""
    if old is not None and old.shape == value.shape and old.dtype == value.dtype:
        return old
    return torch.empty(value.shape, dtype=value.dtype, device="cpu")


def _begin(saver: Saver, snapshot: Snapshot, parts: Sequence[_Part]) -> tuple[Path, Path]:
    """Compare the ranks' parts, and make the folder of a checkpoint. Gives it and the name that it will have."""
    _refuse_differences(parts)
    try:
        snapshot.root.mkdir(parents=True, exist_ok=True)
        saver.lock(snapshot.root)
        return new_partial(snapshot.root, snapshot.step)
    except OSError as error:
        raise CheckpointError(
            f"{snapshot.root} cannot be written: {error.strerror or error}; name a folder that you may write to"
        ) from None


def _end(
    saver: Saver, snapshot: Snapshot, parts: Sequence[_Part], partial: Path, final: Path, written: Sequence[Written]
) -> None:
    """Write the manifest, name the folder, move `latest`, and remove old checkpoints."""
    shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
    manifest = Manifest(
        format=FORMAT,
        step=snapshot.step,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        made_by={"autopar": __version__, "torch": torch.__version__, **snapshot.made_by},
        files={chunk.file: entry for _, _, chunk, entry in written},
        tensors=entries_of(written, shapes),
        plain={**snapshot.common, "optimizers": [asdict(o) for o in _optimizers_of(parts)]},
    )
    current = parsed(final)
    assert current is not None
    try:
        write_manifest(partial, manifest)
        saver.lock(snapshot.root)
        publish(snapshot.root, partial, final)
        remove_old(snapshot.root, current, snapshot.keep_last)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or snapshot.root} cannot be written: {error.strerror or error}"
        ) from None


def _optimizers_of(parts: Sequence[_Part]) -> list[SavedOptimizer]:
    return [merged(every) for every in zip(*(part.optimizers for part in parts), strict=True)]


def _part_of(snapshot: Snapshot, chunks: Chunks) -> _Part:
    texts = {key: json.dumps(value) for key, value in snapshot.common.items() if key != "extra"}
    extra: Mapping[str, Any] = dict(snapshot.common["extra"]["dict"])
    texts |= {f"extra[{key!r}]": json.dumps(value) for key, value in extra.items()}
    digests = {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}
    for name, tensor in snapshot.plain_tensors.items():
        digest = hashlib.sha256()
        for piece in pieces_of(chunks[name, (0,) * tensor.dim()]):
            digest.update(piece)
        digests[name.replace("/", ".")] = digest.hexdigest()
    shapes = {name: tuple(tensor.shape) for name, tensor in {**snapshot.tensors, **snapshot.plain_tensors}.items()}
    return _Part(
        where=str(snapshot.root),
        step=snapshot.step,
        digests=digests,
        optimizers=snapshot.optimizers,
        shapes=shapes,
        chunk_bytes={key: prod(shapes[key[0]]) * value.element_size() for key, value in chunks.items()},
    )


def _refuse_differences(parts: Sequence[_Part]) -> None:
    first = parts[0]
    for rank, part in enumerate(parts):
        if (part.where, part.step) != (first.where, first.step):
            raise CheckpointError(
                f"rank {rank} saves step {part.step} to {part.where}, but rank 0 step {first.step} to {first.where}; "
                "save the same step to the same folder on every rank"
            )
        if len(part.optimizers) != len(first.optimizers):
            raise CheckpointError(
                f"rank {rank} saves {len(part.optimizers)} optimizers, but rank 0 {len(first.optimizers)}; pass the "
                "same optimizers on every rank"
            )
    keys = dict.fromkeys(key for part in parts for key in part.digests)
    for key in keys:
        others = [rank for rank, part in enumerate(parts) if part.digests.get(key) != first.digests.get(key)]
        if others:
            raise CheckpointError(
                f"{key} of {named_ranks(others)} is not that of rank 0; a checkpoint holds one value for all ranks, so "
                "that another number of ranks can load it"
            )
    _optimizers_of(parts)


def results_on_first(action: Callable[[], _T], group: dist.ProcessGroup, failed: str) -> list[_T]:
    """The results of all ranks' actions on the first rank. All ranks raise one `CheckpointError` with the errors.

    Collective. Other ranks get none: the chunks of many ranks are many megabytes.
    """
    result = failure = None
    try:
        result = action()
    except Exception as error:
        failure = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    texts = ranks_by(gather_objects(failure, group))
    texts.pop(None, None)
    if texts:
        shown = [f"{named_ranks(ranks)}: {text}" for text, ranks in list(texts.items())[:MAX_SHOWN]]
        raise CheckpointError(f"{failed}: {'; '.join(shown)}")
    every: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank() == 0 else None
    dist.gather_object(result, every, dst=0, group=group)
    return every or []
