"""The folder that `from_pretrained` of transformers loads: config, files of weights, and their index.

Names, shapes and places in the files are known before a weight is read. The first rank makes the files with their
headers. Then one tensor after the other is gathered, and the first rank that holds it writes it to its place.
"""

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from autopar.errors import CheckpointError, InputError
from autopar.ir.storage import buckets
from autopar.runtime.checkpoint.folder import sync_folder
from autopar.runtime.checkpoint.tensor_files import dtype_name, header_of, pieces_of, write_all
from autopar.runtime.parameters.transformers_names import is_pretrained, layout_on_disk, pieces_on_disk

_INDEX = "model.safetensors.index.json"


class Export:
    """The export of one model, whose tensors are `wholes` on meta by the model's names."""

    def __init__(self, model: Any, wholes: Mapping[str, torch.Tensor], root: Path, shard_bytes: int) -> None:
        if not is_pretrained(model):
            raise InputError(
                "export_hf needs a model of transformers itself, which has a config; use save for other models"
            )
        if shard_bytes < 1:
            raise InputError(f"max_shard_bytes must be at least 1; got {shard_bytes!r}")
        self._model, self._root = model, root
        self._partial = root.with_name(f".{root.name}.partial")
        for value in wholes.values():
            dtype_name(value.dtype)
        pieces = layout_on_disk(model, wholes)
        self._lay_out({name: t for each in pieces.values() for name, t in each.items()}, shard_bytes)
        self._dtype = next((t.dtype for t in wholes.values() if t.dtype.is_floating_point), torch.float32)

    def _lay_out(self, tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> None:
        """Decide the header and the size of each file, and the place of every tensor."""
        names, sizes = list(tensors), [t.nbytes for t in tensors.values()]
        parts = list(buckets(((size, None) for size in sizes), shard_bytes))
        self._headers, self._sizes = dict[str, bytes](), dict[str, int]()
        self._places = dict[str, tuple[str, int, int]]()  # the file of a tensor, its first byte, number of bytes
        self._num_bytes = sum(sizes)
        for number, part in enumerate(parts, 1):
            file = f"model-{number:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else "model.safetensors"
            here = {names[index]: tensors[names[index]] for index in part}
            self._headers[file], begins = header_of({n: (t.dtype, t.shape) for n, t in here.items()}, {"format": "pt"})
            self._places |= {name: (file, at, here[name].nbytes) for name, at in begins.items()}
            self._sizes[file] = len(self._headers[file]) + sum(t.nbytes for t in here.values())

    def begin(self) -> None:
        """Make all files without weights. The first rank calls it."""
        with self._writing():
            if self._root.exists() and (not self._root.is_dir() or any(self._root.iterdir())):
                raise InputError(f"{self._root} is not empty; name a new folder")
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
            self._write_config()
            for name, header in self._headers.items():
                with open(self._partial / name, "xb") as file:
                    file.write(header)
                    os.posix_fallocate(file.fileno(), 0, self._sizes[name])  # a full disk shows here
            if len(self._headers) > 1:
                weight_map = {name: file for name, (file, *_) in sorted(self._places.items())}
                content = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
                (self._partial / _INDEX).write_text(json.dumps(content, indent=2) + "\n")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self._root} cannot be written: {error.strerror or error}") from None

    def _write_config(self) -> None:
        config = copy.deepcopy(self._model.config)
        config.architectures = [type(self._model).__name__]
        config.dtype = str(self._dtype).removeprefix("torch.")
        config.save_pretrained(self._partial)
        if self._model.can_generate():
            self._model.generation_config.save_pretrained(self._partial)

    def write(self, tensors: Iterator[tuple[str, torch.Tensor | None]]) -> None:
        """Write tensors to their places; None is written by another rank. Gathering goes on after an error."""
        failure: CheckpointError | None = None
        for name, value in tensors:
            if value is None or failure is not None:
                continue
            try:
                with self._writing():
                    for piece_name, piece in pieces_on_disk(self._model, name, value).items():
                        self._write_one(*self._places[piece_name], piece)
            except CheckpointError as error:
                failure = error
        if failure is not None:
            raise failure

    def _write_one(self, file: str, at: int, num_bytes: int, value: torch.Tensor) -> None:
        assert value.nbytes == num_bytes, (file, value.shape, value.dtype)
        descriptor = os.open(self._partial / file, os.O_WRONLY)
        try:
            os.lseek(descriptor, at, os.SEEK_SET)
            for piece in pieces_of(value):
                write_all(descriptor, piece)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """Name the folder, when all ranks have written."""
        with self._writing():
            sync_folder(self._partial)
            if self._root.is_dir():
                self._root.rmdir()
            self._partial.rename(self._root)
            sync_folder(self._root.parent)

    def discard(self) -> None:
        """Remove what an export that failed has written."""
        with suppress(OSError):
            shutil.rmtree(self._partial)
