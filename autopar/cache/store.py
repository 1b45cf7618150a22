"""The one policy for files that autopar keeps for the next time: captures, labels and searches.

    folder      `cache_folder`, with a sub-folder for labels and one for searches
    name        a hash of every input, and of the versions and source code that made the content (`versions`)
    write       whole or not at all; a file that cannot be written costs time the next time, and no result
    limit       `MOST_BYTES` a folder; the files that were not used for longest are deleted
    damage      a file that cannot be read is reported and written anew, as is a file of an earlier format

Another version of the code looks for another name, so the files of earlier versions are never read. They are deleted
once the folder is full.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any, TypeVar

from autopar._version import __version__
from autopar.errors import InputError
from autopar.files.atomic import write_text

MOST_BYTES = 1_000_000_000  # of one folder
_CAPTURING = ("_torch", "capture", "presets", "models", "rules/operators.py")  # its source decides a capture
_LIBRARIES = ("torch", "transformers")  # that a capture depends on
SEARCHING = ("torch", "numpy", "optuna", "highspy", "sympy")  # libraries that labels and searches depend on
_SOURCE = (".py", ".yaml", ".json")

_T = TypeVar("_T")


def cache_folder() -> Path:
    """``AUTOPAR_CACHE_DIR``, else ``autopar/captures`` in ``XDG_CACHE_HOME``, else the same in ``~/.cache``."""
    given = os.environ.get("AUTOPAR_CACHE_DIR", "")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"  # as the XDG specification has it
    return root / "autopar" / "captures"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """One file of a cache folder. `what` names the content in messages: "capture", "labels", "search"."""

    path: Path
    what: str

    def read(self, parse: Callable[[Path], _T], on_note: Callable[[str], None]) -> _T | None:
        """The content as `parse` reads it. None without a file, or if `parse` raises; `on_note` is then told why."""
        if not self.path.is_file():
            return None
        try:
            value = parse(self.path)
        except Exception as error:  # whatever damaged values cause
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            on_note(f"the kept {self.what} {self.path} cannot be read and is made anew: {reason}")
            return None
        with suppress(OSError):
            os.utime(self.path)  # `_drop_oldest` deletes by this time
        return value

    def write(self, text: str, on_note: Callable[[str], None] = lambda _: None) -> None:
        """Write the file and delete the oldest ones beside it. `on_note` is told if that fails."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, text)
            drop_oldest(self.path.parent, MOST_BYTES)
        except (OSError, InputError) as error:
            on_note(f"the {self.what} is not kept for the next time: {error}")


def kept_file(folder: Path, what: str, *inputs: Any) -> KeptFile:
    """The file of `what` that depends on `inputs`, plain data for JSON, versions included."""
    digest = hashlib.sha256(json.dumps([what, *inputs], sort_keys=True).encode())
    return KeptFile(path=folder / f"{digest.hexdigest()[:40]}.json", what=what)


def drop_oldest(folder: Path, most_bytes: int) -> None:
    """Delete the kept files that were not used for longest until the others have at most `most_bytes`."""
    files = sorted((file.stat().st_mtime, str(file), file.stat().st_size) for file in folder.glob("*.json"))
    total = sum(size for _, _, size in files)
    for _, file, size in files:
        if total <= most_bytes:
            return
        Path(file).unlink(missing_ok=True)
        total -= size


def capture_versions() -> dict[str, str]:
    """The versions on which a kept capture depends."""
    return {"autopar": __version__} | versions(_LIBRARIES, _CAPTURING)


@cache
def versions(libraries: Sequence[str], source: Sequence[str] = ("",)) -> dict[str, str]:
    """The version of each library, and as "source" a hash of autopar's files on which a kept content depends."""
    return {"source": _source_hash(source)} | {name: _version_of(name) for name in libraries}


def _version_of(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "none"


def _source_hash(source: Sequence[str]) -> str:
    digest = hashlib.sha256()
    with resources.as_file(resources.files("autopar")) as root:
        for name in source:
            top = root / name
            for folder, _, names in sorted(os.walk(top, followlinks=True)) if top.is_dir() else [(root, (), (name,))]:
                for each in sorted(names):
                    if each.endswith(_SOURCE):
                        digest.update(each.encode() + (Path(folder) / each).read_bytes())
    return digest.hexdigest()[:16]
