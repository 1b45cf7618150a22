"""Saving: a copy of this rank's state, its files, and the manifest that makes them a checkpoint.

Every rank writes its chunks into a folder that is set aside. When all files are on disk, the first rank writes the
manifest, names the folder, and moves `latest`. An asynchronous save does all of this in a thread with a process group
of its own. The step waits for the copy only.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from autopar._version import __version__
from autopar.errors import CheckpointError, InputError
from autopar.files.lock import FolderLock, take_lock
from autopar.runtime.checkpoint.folder import new_partial, parsed, publish, remove_old
from autopar.runtime.checkpoint.known_chunks import HostCopies, KnownChunks
from autopar.runtime.checkpoint.manifest import FORMAT, Manifest, write_manifest
from autopar.runtime.checkpoint.optimizers import SavedOptimizer, merged
from autopar.runtime.checkpoint.storage import Contents, ManifestWriter
from autopar.runtime.checkpoint.tensor_files import pieces_of
from autopar.runtime.distributed.mesh import named_ranks
from autopar.runtime.parameters.flat_shards import FlatShards

GROUP_TIMEOUT = timedelta(hours=1)  # ranks write for different times
MAX_SHOWN = 3
_logger = logging.getLogger("autopar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one rank saves.

    `tensors` are its chunks by name. `common` is plain data that is equal on all ranks, and `plain_tensors` are its
    tensors. `optimizers` are this rank's parts. `finite` names the tensors in which NaN and infinity are refused.
    """

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
    """What the first rank gets of each rank: the digests of what must be equal, and the optimizers."""

    where: str
    step: int
    digests: Mapping[str, str]
    optimizers: Sequence[SavedOptimizer]


class Saver:
    """The saves of one model: one after the other, perhaps in a thread."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._locks: dict[Path, FolderLock] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autopar-save")  # starting a thread would wait for it
        self._pending: Future[None] | None = None
        self._failure: CheckpointError | None = None
        self._copies = HostCopies()
        self.known = KnownChunks()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of saves and loads, over gloo. Collective when it is first asked for."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        return self._group

    @property
    def has_failed(self) -> bool:
        """Whether an asynchronous save failed whose error was not raised yet."""
        return self._failure is not None

    def finish(self) -> None:
        """Wait for the asynchronous save, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def save(self, snapshot: Snapshot, *, asynchronous: bool) -> None:
        """Save. An earlier save must have been finished. Collective."""
        group = self.group
        if not asynchronous:
            self._write(snapshot, group)
            return
        copied = replace(
            snapshot,
            tensors=self._copies.of(snapshot.tensors),
            plain_tensors={name: tensor.clone() for name, tensor in snapshot.plain_tensors.items()},
        )
        self._pending = self._thread.submit(self._write_in_thread, copied, group)

    def _write_in_thread(self, snapshot: Snapshot, group: dist.ProcessGroup) -> None:
        try:
            with suppress(RuntimeError):  # of a rank that is gone, which the save meets too
                dist.barrier(group)  # writing would take processors from ranks that still copy
            self._write(snapshot, group)
        except CheckpointError as error:
            self._failure = error
            _logger.error("%s", error)

    def _write(self, snapshot: Snapshot, group: dist.ProcessGroup) -> None:
        target = _Target(self, snapshot)
        tensors: dict[str, Any] = dict(snapshot.tensors)
        tensors |= {name: tensor for name, tensor in snapshot.plain_tensors.items() if tensor.numel()}
        rank = dist.get_rank()
        try:
            part = _part_of(snapshot)
            writer = ManifestWriter(part, target.begin, target.end, _refusal(snapshot, rank), rank=rank)
            planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            save(tensors, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            target.discard()
            causes = {rank: cause_text(cause) for rank, (cause, _) in error.failures.items()}
            raise CheckpointError(f"the checkpoint was not saved: {failures_text(causes)}") from None
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


class _Target:
    """The folder of one checkpoint on the first rank."""

    def __init__(self, saver: Saver, snapshot: Snapshot) -> None:
        self._saver, self._snapshot = saver, snapshot
        self._partial: Path | None = None
        self._final: Path | None = None
        self._optimizers: list[SavedOptimizer] = []

    def begin(self, parts: Sequence[_Part]) -> Path:
        """Compare the ranks' parts, and make the folder."""
        _refuse_differences(parts)
        snapshot = self._snapshot
        self._optimizers = [merged(every) for every in zip(*(p.optimizers for p in parts), strict=True)]
        try:
            snapshot.root.mkdir(parents=True, exist_ok=True)
            self._saver.lock(snapshot.root)
            self._partial, self._final = new_partial(snapshot.root, snapshot.step)
        except OSError as error:
            raise CheckpointError(
                f"{snapshot.root} cannot be written: {error.strerror or error}; name a folder that you may write to"
            ) from None
        return self._partial

    def end(self, contents: Contents) -> None:
        """Write the manifest, name the folder, move `latest`, and remove old checkpoints."""
        snapshot = self._snapshot
        assert self._partial is not None and self._final is not None
        manifest = Manifest(
            format=FORMAT,
            step=snapshot.step,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            made_by={"autopar": __version__, "torch": torch.__version__, **snapshot.made_by},
            files=contents.files,
            tensors=contents.tensors,
            plain={**snapshot.common, "optimizers": [asdict(o) for o in self._optimizers]},
        )
        current = parsed(self._final)
        assert current is not None
        try:
            write_manifest(self._partial, manifest)
            self._saver.lock(snapshot.root)
            publish(snapshot.root, self._partial, self._final)
            self._partial = None
            remove_old(snapshot.root, current, snapshot.keep_last)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or snapshot.root} cannot be written: {error.strerror or error}"
            ) from None

    def discard(self) -> None:
        """Remove the files of a save that failed, above all from a full disk."""
        if self._partial is not None:
            with suppress(OSError):
                shutil.rmtree(self._partial)


def _part_of(snapshot: Snapshot) -> _Part:
    texts = {key: json.dumps(value) for key, value in snapshot.common.items() if key != "extra"}
    extra: Mapping[str, Any] = dict(snapshot.common["extra"]["dict"])
    texts |= {f"extra[{key!r}]": json.dumps(value) for key, value in extra.items()}
    digests = {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}
    for name, tensor in snapshot.plain_tensors.items():
        digest = hashlib.sha256()
        for piece in pieces_of(tensor):
            digest.update(piece)
        digests[name.replace("/", ".")] = digest.hexdigest()
    return _Part(where=str(snapshot.root), step=snapshot.step, digests=digests, optimizers=snapshot.optimizers)


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


def _refusal(snapshot: Snapshot, rank: int) -> Any:
    def refusal(name: str, value: torch.Tensor) -> str | None:
        has_infinity = value.is_floating_point() or value.is_complex()
        if name not in snapshot.finite or not has_infinity or bool(torch.isfinite(value).all()):
            return None
        parameter = name.partition("/")[2]
        return (
            f"the parameter {parameter} holds NaN or infinity on rank {rank}; the checkpoints before are as they were: "
            "load one of them"
        )

    return refusal


def cause_text(error: BaseException) -> str:
    """An error of one rank for the message that all ranks raise."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def failures_text(failures: Mapping[int, str]) -> str:
    """The errors of the ranks that failed, the first ones. `failures` are texts by rank."""
    texts: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        texts.setdefault(text, []).append(rank)
    shown = [f"{named_ranks(ranks)}: {text}" for text, ranks in list(texts.items())[:MAX_SHOWN]]
    return "; ".join(shown)
