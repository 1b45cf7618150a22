"""Files that are kept for the next time, in a folder of the user's: written whole, the oldest dropped.

What is kept holds for one version of what made it: a hash of autopar's own source is part of every name.
"""

import hashlib
import os
from contextlib import suppress
from functools import cache
from importlib import metadata, resources
from pathlib import Path

MOST_BYTES = 1_000_000_000  # of one folder
_LIBRARIES = ("torch", "numpy", "optuna", "highspy", "sympy")
_SOURCE = (".py", ".yaml", ".json")


def keep(path: Path, text: str) -> None:
    """Write a file whole and drop the oldest beside it. What cannot be kept is only slower the next time."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
        drop_oldest(path.parent, MOST_BYTES)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def used(path: Path) -> None:
    """What is used is not the first to go, where that can be noted."""
    with suppress(OSError):
        os.utime(path)


def drop_oldest(folder: Path, most_bytes: int) -> None:
    """Delete the kept files that were not used for longest until the rest has at most so many bytes."""
    found = sorted((file.stat().st_mtime, str(file), file.stat().st_size) for file in folder.glob("*.json"))
    total = sum(size for _, _, size in found)
    for _, file, size in found:
        if total <= most_bytes:
            return
        Path(file).unlink(missing_ok=True)
        total -= size


@cache
def versions() -> dict[str, str]:
    """Of what captures, labels and prices: the libraries, and a hash of all of autopar's source and data."""
    return {"source": _source_hash()} | {name: metadata.version(name) for name in _LIBRARIES}


def _source_hash() -> str:
    digest = hashlib.sha256()
    with resources.as_file(resources.files("autopar")) as root:
        for folder, _, names in sorted(os.walk(root, followlinks=True)):
            for name in sorted(names):
                if name.endswith(_SOURCE):
                    digest.update(name.encode() + (Path(folder) / name).read_bytes())
    return digest.hexdigest()[:16]
