"""Captures of the models that autopar builds itself, kept in a folder: presets and transformers configs.

A file's name is a hash of all that a capture depends on: the config, what shrinks it, dtype, sequence length, mode, and
the versions of autopar, its capturing code, torch and transformers. A model that a user's function builds is never
kept, since its code may change. A file that cannot be read is passed over with a note and written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar._version import __version__
from autopar.errors import InputError
from autopar.files.kept import MOST_BYTES, drop_oldest, used
from autopar.models.load import checked_dtype, config_named, is_factory, resolve_model

if TYPE_CHECKING:
    from autopar.capture.captured import Capture
    from autopar.ir.program import Program
    from autopar.models.load import ResolvedModel

# A prime that few dimensions have, so that no dimension is that of the batch by chance.
CAPTURED_BATCH = 7
CAPTURING = ("_torch", "capture", "presets", "models", "rules/operators.py")  # source that decides what a capture is
_LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedModel:
    """A model captured for any batch. `local_batch` is that of a factory's own inputs, None for others.

    `digest` is a hash of the capture's record, None of a factory's and where there is no record. A kept capture is read
    by `read` when it is first asked for, which imports torch.
    """

    name: str
    digest: str | None
    read: Callable[[], Capture]
    local_batch: int | None
    notes: tuple[str, ...]

    @cached_property
    def capture(self) -> Capture:
        return self.read()


def cache_folder() -> Path:
    """``AUTOPAR_CACHE_DIR``, else ``autopar/captures`` in ``XDG_CACHE_HOME``, else that in ``~/.cache``."""
    own = os.environ.get("AUTOPAR_CACHE_DIR", "")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"  # as the XDG specification has it
    return root / "autopar" / "captures"


def captured_model(
    spec: str,
    *,
    folder: Path | None,
    layers: int | None = None,
    hidden: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    training: bool = True,
) -> CapturedModel:
    """The model that `spec` names, captured, or its capture of an earlier time in `folder` (None: keep nothing).

    Arguments and errors are those of `autopar.models.load.resolve_model` and `autopar.capture.any_size.capture`.
    """
    if is_factory(spec):
        return _captured_now(
            resolve_model(spec, layers=layers, hidden=hidden, seq_len=seq_len, dtype=dtype), None, training
        )

    def build(batch: int) -> ResolvedModel:
        return resolve_model(spec, layers=layers, hidden=hidden, seq_len=seq_len, batch=batch, dtype=dtype)

    def again(batch: int) -> Program:
        from autopar.capture.program import capture_program

        found = build(batch)
        return capture_program(found.model, found.example_inputs, training=training)

    config, name, _ = config_named(spec)
    asked = {
        "layers": layers,
        "hidden": hidden,
        "seq_len": seq_len,
        "dtype": checked_dtype(dtype),
        "training": training,
    }
    path = None if folder is None else folder / f"{_key(config, asked)}.json"
    noted: tuple[str, ...] = ()
    if path is not None and path.exists():
        from autopar.capture.record.file import open_capture

        try:
            header, read = open_capture(path)
        except InputError as error:
            noted = (f"captured anew: {error}",)
        else:
            used(path)

            def kept() -> Capture:
                return replace(read(), again=again)

            return CapturedModel(name=name, digest=header.sha256, read=kept, local_batch=None, notes=header.notes)
    made = _captured_now(build(CAPTURED_BATCH), CAPTURED_BATCH, training)
    if path is not None and made.capture.record is not None:
        noted += _kept(made, path, {"model": name, **{k: str(v) for k, v in asked.items() if v is not None}})
    return replace(made, notes=(*made.notes, *noted))


def _captured_now(found: ResolvedModel, batch: int | None, training: bool) -> CapturedModel:
    from autopar.capture.any_size import capture
    from autopar.capture.export.export import input_names
    from autopar.capture.program import batch_and_sequence
    from autopar.capture.record.file import digest_of

    local_batch, _ = batch_and_sequence(input_names(found.model, found.example_inputs))
    made = capture(found.model, found.example_inputs, batch=batch, training=training)
    from_factory = found.kind == "factory"
    digest = None if from_factory or made.record is None else digest_of(made.record)
    own = local_batch if from_factory else None
    return CapturedModel(name=found.name, digest=digest, read=lambda: made, local_batch=own, notes=found.notes)


def _kept(made: CapturedModel, path: Path, about: dict[str, str]) -> tuple[str, ...]:
    """Write a capture; what a user should be told where that fails."""
    from autopar.capture.record.file import save_capture

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_capture(made.capture, path, about=about | _versions(), notes=made.notes)
        drop_oldest(path.parent, MOST_BYTES)
    except OSError as error:
        return (f"the capture is not kept for the next time: {path.parent}: {error.strerror}",)
    return ()


def _key(config: dict[str, Any], asked: dict[str, Any]) -> str:
    text = json.dumps([config, asked, CAPTURED_BATCH, _versions()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@cache
def _versions() -> dict[str, str]:
    """Versions of what captures; of autopar a hash of its source too, which changes between releases."""
    found = {"autopar": __version__, "source": _source_hash()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _source_hash() -> str:
    digest = hashlib.sha256()
    for name in CAPTURING:
        with resources.as_file(resources.files("autopar") / name) as path:
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]
