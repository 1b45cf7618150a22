"""Files of safetensors: written whole, hashed on the way and durable; read in parts.

The format (huggingface/safetensors): eight bytes with the length of the header, the header as JSON, the bytes of the
tensors without gaps. Wider elements come first, so that every tensor is aligned.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.manifest import DTYPES, FileEntry

_PIECE_BYTES = 1 << 22
_ALIGNMENT = 8


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as manifests name it."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"checkpoints cannot hold {name}; convert such parameters and buffers to another dtype")
    return name


def header_of(
    entries: Mapping[str, tuple[torch.dtype, Sequence[int]]], about: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file with tensors of given dtypes and shapes, and where in the file each tensor begins."""
    content: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    begins, at = dict[str, int](), 0
    for name, (dtype, shape) in sorted(entries.items(), key=lambda item: -item[1][0].itemsize):
        size = torch.Size(shape).numel() * dtype.itemsize
        pair = [2] if dtype is torch.complex128 else []
        code = DTYPES[dtype_name(dtype)][1]
        content[name] = {"dtype": code, "shape": [*shape, *pair], "data_offsets": [at, at + size]}
        begins[name] = at
        at += size
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write a new file, and return when it is on disk."""
    header, begins = header_of({name: (t.dtype, t.shape) for name, t in tensors.items()}, {})
    digest, size = hashlib.sha256(header), len(header)
    with open(path, "xb", buffering=0) as file:
        write_all(file.fileno(), memoryview(header))
        for name in begins:
            for piece in pieces_of(tensors[name]):
                write_all(file.fileno(), piece)
                digest.update(piece)
                size += len(piece)
        os.fsync(file.fileno())
    return FileEntry(bytes=size, sha256=digest.hexdigest())


def pieces_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in its own order, a few megabytes at a time."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        whole = flat.view(torch.uint8).numpy().data
        for start in range(0, len(whole), _PIECE_BYTES):
            yield whole[start : start + _PIECE_BYTES]


def write_all(descriptor: int, content: memoryview) -> None:
    """Write bytes where an open file is."""
    while content:
        content = content[os.write(descriptor, content) :]


Part = tuple[str, torch.dtype, Sequence[int], tuple[slice, ...]]  # a tensor, its dtype and sizes, and a part of it


def parts_in_file(path: Path, parts: Iterable[Part]) -> Iterator[torch.Tensor]:
    """Parts of the tensors of a file, which must have these dtypes and sizes. They lie in its memory: copy them."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = frozenset(file.keys())
            for name, dtype, sizes, part in parts:
                if name not in names:
                    raise CheckpointError(f"{path} does not hold {name}, as the manifest says")
                whole: torch.Tensor = file.get_tensor(name)
                if dtype is torch.complex128 and whole.dtype is torch.float64 and whole.shape[-1:] == (2,):
                    whole = torch.view_as_complex(whole)
                if whole.dtype is not dtype or tuple(whole.shape) != tuple(sizes):
                    raise CheckpointError(
                        f"{name} in {path} has dtype {whole.dtype} and shape {tuple(whole.shape)}, but the manifest "
                        f"says {dtype} and {tuple(sizes)}"
                    )
                yield whole[part]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
