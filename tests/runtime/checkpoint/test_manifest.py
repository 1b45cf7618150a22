"""Manifests are read back as they were written. Every other text is refused before a tensor is read."""

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.folder import StepFolder
from autopar.runtime.checkpoint.manifest import (
    FORMAT,
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    file_problems,
    read_manifest,
    write_manifest,
)
from autopar.runtime.checkpoint.storage import shares

FILE, OTHER = "rank-00000-000.safetensors", "rank-00001-000.safetensors"
CONTENTS = {FILE: b"x" * 40, OTHER: b"y" * 24}


def chunk(file: str, offset: int, size: int) -> Chunk:
    return Chunk(file=file, offsets=(offset, 0), sizes=(size, 2))


MANIFEST = Manifest(
    format=FORMAT,
    step=3,
    saved_at="2026-01-01T00:00:00+00:00",
    made_by={"autopar": "1", "ranks": "2"},
    files={name: FileEntry(bytes=len(one), sha256=sha256(one).hexdigest()) for name, one in CONTENTS.items()},
    tensors={
        "model/weight": TensorEntry(dtype="float32", shape=(5, 2), chunks=(chunk(FILE, 0, 3), chunk(OTHER, 3, 2)))
    },
    plain={"model": {"dict": [["steps", 3]]}, "values": [1.5, None, True]},
)


@pytest.fixture
def step(tmp_path: Path) -> StepFolder:
    write_manifest(tmp_path, MANIFEST)
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    return StepFolder(path=tmp_path, step=3)


def rewritten(step: StepFolder, change: Callable[[Any], object]) -> None:
    """Change the manifest and give it the hash of its new text, as an attacker would."""
    path = step.path / "manifest.json"
    held = json.loads(path.read_text())["manifest"]
    change(held)
    text = json.dumps(held, separators=(",", ":"))
    path.write_text(json.dumps({"sha256": sha256(text.encode()).hexdigest(), "manifest": held}))


def test_what_is_written_is_read(step: StepFolder) -> None:
    assert read_manifest(step) == MANIFEST
    assert MANIFEST.num_bytes == 64
    assert file_problems(step.path, MANIFEST, CONTENTS) == []


@given(st.data())
def test_every_flipped_byte_is_found(data: st.DataObject) -> None:
    """Of the manifest and of each file."""
    with tempfile.TemporaryDirectory() as folder:
        step = StepFolder(path=Path(folder), step=3)
        write_manifest(step.path, MANIFEST)
        for name, content in CONTENTS.items():
            (step.path / name).write_bytes(content)
        name = data.draw(st.sampled_from(["manifest.json", *CONTENTS]))
        content = bytearray((step.path / name).read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        (step.path / name).write_bytes(content)
        if name == "manifest.json":
            with suppress(CheckpointError):  # white space may differ
                assert read_manifest(step) == MANIFEST, at
        else:
            (problem,) = file_problems(step.path, MANIFEST, CONTENTS)
            assert problem.path == name and "is damaged" in problem.rule


def tensor(**changes: Any) -> Callable[[Any], object]:
    return lambda held: held["tensors"]["model/weight"].update(changes)


def one(**changes: Any) -> dict[str, Any]:
    return {"file": FILE, "offsets": [0, 0], "sizes": [5, 2], **changes}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.update(step=4), "must be the step of the folder, 3"),
        (lambda held: held.update(format=FORMAT + 1), "this version of autopar reads format"),
        (lambda held: held.update(format="1"), "format"),
        (lambda held: held.update(step=True), "step"),
        (lambda held: held.update(code="import os"), "code: is not a known key"),
        (lambda held: held.pop("files"), "files: is required"),
        (lambda held: held["files"][FILE].update(bytes=-1), "must be at least 0"),
        (lambda held: held["files"][FILE].update(bytes=8), "is too small for its 24 bytes"),
        (lambda held: held["files"].update({"../x.safetensors": held["files"][FILE]}), "must be plain names"),
        (lambda held: held["files"].update({".x.safetensors": held["files"][FILE]}), "must be plain names"),
        (lambda held: held["files"].update({"x.pt": held["files"][FILE]}), "must be plain names"),
        (lambda held: held.update(plain=json.loads("[" * 101 + "]" * 101)), "must have at most 100 levels"),
        (tensor(dtype="object"), "has an unknown dtype"),
        (tensor(shape=[-5, -2]), "has a chunk outside of its shape"),
        (tensor(shape=[6, 2]), "is not made up of its chunks"),
        (tensor(shape=[5]), "has a chunk outside of its shape"),
        (tensor(shape=[10**12, 10**12]), "is not made up of its chunks"),
        (tensor(chunks=[]), "is not made up of its chunks"),
        (tensor(chunks=[one(file="other.safetensors")]), "names a file that is not listed"),
        (tensor(chunks=[one(offsets=[1, 0])]), "has a chunk outside of its shape"),
        (tensor(chunks=[one(offsets=[-1, 0])]), "has a chunk outside of its shape"),
        (tensor(chunks=[one(), one(sizes=[0, 2])]), "has a chunk outside of its shape"),
    ],
)
def test_hostile_manifests(change: Callable[[Any], object], says: str, step: StepFolder) -> None:
    rewritten(step, change)
    with pytest.raises(CheckpointError, match=says):
        read_manifest(step)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"sha256": "0"}', '{"sha256": "", "manifest": NaN}', "\x00", "[" * 5000]
)
def test_texts_that_are_no_manifest(text: str, step: StepFolder) -> None:
    (step.path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_manifest(step)


def test_a_manifest_that_is_a_link(step: StepFolder) -> None:
    path = step.path / "manifest.json"
    path.rename(step.path / "real")
    path.symlink_to(step.path / "real")
    with pytest.raises(CheckpointError, match="is a link"):
        read_manifest(step)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: os.truncate(path, 39), "must have 40 bytes"),
        (lambda path: os.truncate(path, 2**40), "must have 40 bytes"),
        (lambda path: path.write_bytes(b"z" * 40), "is damaged"),
        (lambda path: (path.rename(path.with_suffix(".x")), path.symlink_to(path.with_suffix(".x"))), "is a link"),
        (lambda path: (path.unlink(), path.mkdir()), "must be a regular file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "must be a regular file"),
    ],
)
def test_damaged_files(damage: Callable[[Path], object], says: str, step: StepFolder) -> None:
    damage(step.path / FILE)
    (problem,) = file_problems(step.path, MANIFEST, CONTENTS)
    assert problem.path == FILE and re.search(says, problem.rule)


def test_a_disk_that_fails(step: StepFolder) -> None:
    """The error of one rank is a problem like others. Else the other ranks would wait for it."""
    with mock.patch.object(os, "read", side_effect=OSError(errno.EIO, "Input/output error")):
        (problem,) = file_problems(step.path, MANIFEST, [FILE])
    assert problem.path == FILE and problem.rule == "cannot be read: Input/output error"


def test_sizes_alone(step: StepFolder) -> None:
    (step.path / FILE).write_bytes(b"z" * 40)
    assert file_problems(step.path, MANIFEST, CONTENTS, hashes=False) == []


@given(sizes=st.lists(st.integers(0, 100), max_size=20), count=st.integers(1, 6))
def test_shares_are_balanced(sizes: list[int], count: int) -> None:
    """Every file once, and no rank has more than the mean and the largest file."""
    files = dict(enumerate(sorted(sizes, reverse=True)))
    parts = shares([files] * count)
    assert sorted(name for part in parts for name in part) == sorted(files)
    loads = [sum(files[name] for name in part) for part in parts]
    assert len(loads) == count and max(loads) <= sum(sizes) / count + max(sizes, default=0)
