"""The manifest of a checkpoint: `manifest.json`, which lists every file and where every tensor lies.

It has a hash of its own text, and the size and SHA-256 of every file. Nothing else in a checkpoint's folder is read.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from autopar.errors import CheckpointError, Problem
from autopar.files.plain_data import read_plain
from autopar.files.strict_text import read_json
from autopar.runtime.checkpoint.folder import MANIFEST, StepFolder, write_durably

FORMAT = 1
MAX_MANIFEST_BYTES = 1 << 30
MAX_DEPTH = 100
DTYPES = {  # the bytes of an element, and the code in files of safetensors
    "complex128": (16, "F64"),  # as pairs of real numbers: the format has no code for it
    "float64": (8, "F64"),
    "float32": (4, "F32"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "complex64": (8, "C64"),
    "int64": (8, "I64"),
    "int32": (4, "I32"),
    "int16": (2, "I16"),
    "int8": (1, "I8"),
    "uint64": (8, "U64"),
    "uint32": (4, "U32"),
    "uint16": (2, "U16"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
}
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,60}\.safetensors")
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint: its size and hash."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor, and the file that holds it."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of the checkpoint: its dtype, its global shape, and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds. `plain` are its values that are no tensors, `made_by` is text for people."""

    format: int
    step: int
    saved_at: str
    made_by: Mapping[str, str]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    plain: Any

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def entry_key(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The name of a chunk in its file."""
    return f"{name}[{', '.join(f'{o}:{o + s}' for o, s in zip(offsets, sizes, strict=True))}]"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, durably."""
    content = asdict(manifest)
    text = json.dumps({"sha256": _hash_of(content), "manifest": content})
    write_durably(folder / MANIFEST, text.encode())


def read_manifest(folder: StepFolder) -> Manifest:
    """The manifest of a checkpoint, checked: its hash, its form, its step and the names of its files."""
    path = folder.path / MANIFEST
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link; a checkpoint holds its own files")
    content, problems = read_json(path, max_bytes=MAX_MANIFEST_BYTES)
    if problems:
        raise CheckpointError(f"the checkpoint {folder.path} cannot be read", problems)
    if not isinstance(content, dict) or content.keys() != {"sha256", "manifest"}:
        raise CheckpointError(f"{path} is no manifest of a checkpoint: it must have the keys sha256 and manifest")
    held = content["manifest"]
    if isinstance(held, dict) and isinstance(held.get("format"), int) and held["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {held['format']}; this version of autopar reads format {FORMAT}")
    try:
        if content["sha256"] != _hash_of(held):
            raise CheckpointError(f"{path} is damaged: its text does not have the hash that it states")
        manifest: Manifest | None = read_plain(Manifest, held, problems)
    except (RecursionError, ValueError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no manifest of a checkpoint: {str(error)[:200]}") from None
    if manifest is not None and not problems:
        problems += list(_problems(manifest, folder))
    if manifest is None or problems:
        raise CheckpointError(f"{path} is no valid manifest", problems)
    return manifest


def _hash_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def _problems(manifest: Manifest, folder: StepFolder) -> Iterable[Problem]:
    """What the types do not say: names without paths, and chunks that fill their tensors and fit their files."""
    if manifest.step != folder.step:
        yield Problem(path="step", rule=f"must be the step of the folder, {folder.step}", value=manifest.step)
    for name, file in manifest.files.items():
        if not _FILE.fullmatch(name):
            yield Problem(path="files", rule="must be plain names of .safetensors files", value=name)
        if file.bytes < 0:
            yield Problem(path=f"files.{name}.bytes", rule="must be at least 0", value=file.bytes)
    if _depth(manifest.plain) > MAX_DEPTH:
        yield Problem(path="plain", rule=f"must have at most {MAX_DEPTH} levels")
    in_files = dict.fromkeys(manifest.files, 0)
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in DTYPES:
            yield Problem(path=f"tensors.{name}", rule="has an unknown dtype", value=tensor.dtype)
            continue
        if min(tensor.shape, default=0) < 0 or not all(_is_inside(chunk, tensor.shape) for chunk in tensor.chunks):
            yield Problem(path=f"tensors.{name}", rule="has a chunk outside of its shape", value=tensor.shape)
            continue
        if sum(prod(chunk.sizes) for chunk in tensor.chunks) != prod(tensor.shape):
            yield Problem(path=f"tensors.{name}", rule="is not made up of its chunks", value=tensor.shape)
        for chunk in tensor.chunks:
            if chunk.file not in in_files:
                yield Problem(path=f"tensors.{name}", rule="names a file that is not listed", value=chunk.file)
            else:
                in_files[chunk.file] += prod(chunk.sizes) * DTYPES[tensor.dtype][0]
    for name, size in in_files.items():
        if size > manifest.files[name].bytes:
            yield Problem(path=f"files.{name}", rule=f"is too small for its {size} bytes of tensors")


def _depth(value: Any) -> int:
    """How deeply lists and objects are nested."""
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list))]
        level = [v for each in inner for v in each]
    return depth


def _is_inside(chunk: Chunk, shape: Sequence[int]) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    boxes = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    return all(offset >= 0 and size > 0 and offset + size <= whole for offset, size, whole in boxes)


def file_problems(folder: Path, manifest: Manifest, names: Iterable[str], *, hashes: bool = True) -> list[Problem]:
    """What is wrong with some files of a checkpoint: a missing file, a link, another size, another hash."""
    return [problem for name in names for problem in _of_file(folder / name, manifest.files[name], hashes)]


def _of_file(path: Path, entry: FileEntry, hashes: bool) -> list[Problem]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return [Problem(path=path.name, rule="is missing")]
    except OSError as error:
        is_link = path.is_symlink()
        return [Problem(path=path.name, rule="is a link" if is_link else f"cannot be opened: {error.strerror}")]
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return [Problem(path=path.name, rule="must be a regular file")]
        if status.st_size != entry.bytes:
            return [Problem(path=path.name, rule=f"must have {entry.bytes} bytes", value=status.st_size)]
        if not hashes:
            return []
        digest = hashlib.sha256()
        while piece := os.read(descriptor, _PIECE_BYTES):
            digest.update(piece)
    except OSError as error:
        return [Problem(path=path.name, rule=f"cannot be read: {error.strerror}")]
    finally:
        os.close(descriptor)
    if digest.hexdigest() == entry.sha256:
        return []
    return [Problem(path=path.name, rule="is damaged: its content does not have the SHA-256 of the manifest")]
