"""The folder of a run's checkpoints: one folder for each step, and a file `latest` that names one of them.

step-00000020            a complete checkpoint. The folder got this name when all of its files were durable
step-00000020.1          the checkpoint that replaces it, because the step was saved again
.step-00000030.partial   a save that did not end. It is never read, and the next save removes it
latest                   the name of the newest complete checkpoint
lock                     the job that saves here
"""

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import CheckpointError
from autopar.files.strict_text import read_text

MANIFEST, LATEST = "manifest.json", "latest"
_STEP = re.compile(r"step-(\d{8,18})(?:\.(\d{1,9}))?")
_ASIDE = re.compile(r"\.step-\d{8,18}(?:\.\d{1,9})?\.(?:partial|removed)")
_MAX_LATEST_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFolder:
    """A complete checkpoint: its folder and its step. `replaced` counts how often the step was saved before."""

    path: Path
    step: int
    replaced: int = 0


def step_name(step: int, replaced: int = 0) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}" + (f".{replaced}" if replaced else "")


def parsed(path: Path) -> StepFolder | None:
    """The step of a folder by its name. None for another name."""
    match = _STEP.fullmatch(path.name)
    if match is None or path.name != step_name(int(match[1]), int(match[2] or 0)):
        return None
    return StepFolder(path=path, step=int(match[1]), replaced=int(match[2] or 0))


def every_folder(root: Path) -> list[StepFolder]:
    """The complete checkpoints of a folder by step, replaced ones included. Links are left out."""
    try:
        entries = sorted(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{root} cannot be read: {error.strerror or error}; name a folder of checkpoints"
        ) from None
    folders = [parsed(entry) for entry in entries if entry.is_dir() and not entry.is_symlink()]
    return sorted((f for f in folders if f is not None), key=lambda f: (f.step, f.replaced))


def complete_steps(root: Path) -> dict[int, StepFolder]:
    """The folder of each step; of a step that was saved again, the newest."""
    return {f.step: f for f in every_folder(root)}


def set_aside(root: Path) -> list[Path]:
    """What saves or removals that did not end have left."""
    if not root.is_dir():
        return []
    return sorted(entry for entry in root.iterdir() if _ASIDE.fullmatch(entry.name))


def latest_folder(root: Path) -> StepFolder | None:
    """The checkpoint that `latest` names, without the file the newest one. None if the folder has no checkpoint."""
    steps = complete_steps(root)
    file = root / LATEST
    if not os.path.lexists(file):
        return steps[max(steps)] if steps else None
    text, problems = read_text(file, max_bytes=_MAX_LATEST_BYTES)
    named = None if text is None else parsed(root / text.strip().replace("/", "?"))
    if named is None:
        why = problems[0].rule if problems else f"it holds {(text or '')[:40]!r}"
        raise CheckpointError(f"{file} names no checkpoint: {why}; {_choose(steps)}")
    if named not in every_folder(root):
        raise CheckpointError(f"{file} names {named.path.name}, which is missing; {_choose(steps)}")
    return named


def folder_of(root: Path, step: int | None) -> StepFolder:
    """The checkpoint of a step, by default the latest."""
    if step is None:
        latest = latest_folder(root)
        if latest is None:
            aside = "; a save did not end there" if set_aside(root) else ""
            raise CheckpointError(f"{root} holds no checkpoint{aside}: name the folder that was saved to")
        return latest
    steps = complete_steps(root)
    if step not in steps:
        raise CheckpointError(f"{root} holds no checkpoint of step {step}; {_choose(steps)}")
    return steps[step]


def _choose(steps: dict[int, StepFolder]) -> str:
    if not steps:
        return "the folder holds no complete checkpoint"
    return f"load another step by its number; complete are {listed(steps)}"


def listed(steps: "dict[int, StepFolder]") -> str:
    """The last ten steps as text."""
    shown = sorted(steps)[-10:]
    return ("..., " if len(steps) > 10 else "") + ", ".join(map(str, shown))


# Writing.


def new_partial(root: Path, step: int) -> tuple[Path, Path]:
    """Make the folder that a save writes to. Gives it and the name that it will have."""
    for path in set_aside(root):
        shutil.rmtree(path)
    known = complete_steps(root).get(step)
    final = root / step_name(step, 0 if known is None else known.replaced + 1)
    partial = root / f".{final.name}.partial"
    partial.mkdir()
    return partial, final


def publish(root: Path, partial: Path, final: Path) -> None:
    """Give a complete checkpoint its name, and name it in `latest`. Its files are durable already."""
    sync_folder(partial)
    partial.rename(final)
    sync_folder(root)
    write_durably(root / LATEST, (final.name + "\n").encode())


def remove_old(root: Path, current: StepFolder, keep_last: int | None) -> None:
    """Remove the checkpoints that `current` replaces, and all but the last `keep_last` steps up to `current`."""
    every = every_folder(root)
    gone = [f for f in every if f.step == current.step and f.replaced < current.replaced]
    if keep_last is not None:
        steps = sorted({f.step for f in every if f.step <= current.step})[:-keep_last]
        gone += [f for f in every if f.step in steps]
    for old in gone:
        aside = root / f".{old.path.name}.removed"
        old.path.rename(aside)  # half of a removed checkpoint does not look complete
        shutil.rmtree(aside)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and return when it is on disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
