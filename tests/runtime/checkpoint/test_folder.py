"""The folder of a run's checkpoints: which step is the latest, whatever a process that was killed has left."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from autopar.errors import CheckpointError
from autopar.ir.storage import buckets
from autopar.runtime.checkpoint.folder import (
    StepFolder,
    complete_steps,
    every_folder,
    folder_of,
    latest_folder,
    listed,
    new_partial,
    parsed,
    publish,
    remove_old,
    set_aside,
    step_name,
    write_durably,
)


def save(root: Path, step: int, keep_last: int | None = None) -> StepFolder:
    partial, final = new_partial(root, step)
    (partial / "file").write_text(f"{step}")
    publish(root, partial, final)
    current = parsed(final)
    assert current is not None
    remove_old(root, current, keep_last)
    return current


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("step", [0, 7, 99_999_999, 100_000_000, 10**17])
@pytest.mark.parametrize("replaced", [0, 3])
def test_names_are_read_as_they_are_written(step: int, replaced: int) -> None:
    path = Path("x") / step_name(step, replaced)
    assert parsed(path) == StepFolder(path=path, step=step, replaced=replaced)


@pytest.mark.parametrize(
    "name",
    ["step-1", "step-000000001", "step-00000001.0", "step-00000001.01", "step-00000001.", "step--0000001",
     "step-0000000a", ".step-00000001.partial", "step-00000001\n", "Step-00000001", "step-00000001.x", "latest"],
)  # fmt: skip
def test_other_names_are_no_steps(name: str) -> None:
    assert parsed(Path(name)) is None


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        assert latest_folder(root) is None and every_folder(root) == [] and set_aside(root) == []
        with pytest.raises(CheckpointError, match="holds no checkpoint: name the folder"):
            folder_of(root, None)
        with pytest.raises(CheckpointError, match="of step 3; the folder holds no complete checkpoint"):
            folder_of(root, 3)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory; name a folder"):
        every_folder(tmp_path / "file")


def test_saves_one_after_the_other(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["latest", "step-00000015", "step-00000020"]
    assert folder_of(tmp_path, None).step == 20 and folder_of(tmp_path, 15).step == 15
    with pytest.raises(CheckpointError, match="of step 10; load another step by its number; complete are 15, 20"):
        folder_of(tmp_path, 10)


def test_a_step_that_is_saved_again(tmp_path: Path) -> None:
    """The new folder is complete before the old one goes."""
    save(tmp_path, 5)
    partial, final = new_partial(tmp_path, 5)
    assert (partial.name, final.name) == (".step-00000005.1.partial", "step-00000005.1")
    assert complete_steps(tmp_path)[5].replaced == 0
    publish(tmp_path, partial, final)
    assert names(tmp_path) == ["latest", "step-00000005", "step-00000005.1"]
    found = complete_steps(tmp_path)[5]
    assert found.replaced == 1 and latest_folder(tmp_path) == found
    remove_old(tmp_path, found, None)
    assert names(tmp_path) == ["latest", "step-00000005.1"]
    assert save(tmp_path, 5).replaced == 2


def test_an_earlier_step_than_the_latest(tmp_path: Path) -> None:
    """A run that went back keeps later steps of the run before. `latest` names what was saved last."""
    for step in (5, 10, 15):
        save(tmp_path, step)
    save(tmp_path, 6, keep_last=1)
    assert names(tmp_path) == ["latest", "step-00000006", "step-00000010", "step-00000015"]
    latest = latest_folder(tmp_path)
    assert latest is not None and latest.step == 6


def test_what_a_killed_save_leaves(tmp_path: Path) -> None:
    save(tmp_path, 5)
    partial, _ = new_partial(tmp_path, 10)
    (partial / "half").touch()
    (tmp_path / ".step-00000001.removed").mkdir()
    latest = latest_folder(tmp_path)
    assert latest is not None and latest.step == 5 and list(complete_steps(tmp_path)) == [5]
    assert [path.name for path in set_aside(tmp_path)] == [".step-00000001.removed", ".step-00000010.partial"]
    save(tmp_path, 10)
    assert names(tmp_path) == ["latest", "step-00000005", "step-00000010"]
    empty = tmp_path / "empty"
    empty.mkdir()
    new_partial(empty, 1)
    with pytest.raises(CheckpointError, match="holds no checkpoint; a save did not end there"):
        folder_of(empty, None)


def test_a_save_that_was_killed_before_latest_moved(tmp_path: Path) -> None:
    """A first save without `latest` counts. A later one does not, until `latest` names it."""
    partial, final = new_partial(tmp_path, 5)
    partial.rename(final)
    first = latest_folder(tmp_path)
    assert first is not None and first.step == 5
    save(tmp_path, 10)
    partial, final = new_partial(tmp_path, 15)
    partial.rename(final)
    latest = latest_folder(tmp_path)
    assert latest is not None and latest.step == 10 and folder_of(tmp_path, 15).step == 15


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step-00000009\n", "names step-00000009, which is missing; .* complete are 5"),
        ("", "names no checkpoint: it holds ''"),
        ("../step-00000005", "names no checkpoint"),
        ("/step-00000005", "names no checkpoint"),
        ("x" * 300, "names no checkpoint: must be at most 256 bytes"),
        ("step-00000005\0", "names no checkpoint"),
    ],
)
def test_a_latest_that_names_nothing(text: str, says: str, tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "latest").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        latest_folder(tmp_path)
    assert folder_of(tmp_path, 5).step == 5


def test_links_and_files_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "step-00000007").symlink_to(tmp_path / "step-00000005")
    (tmp_path / "step-00000008").touch()
    assert list(complete_steps(tmp_path)) == [5]
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="names no checkpoint: no such file"):
        latest_folder(tmp_path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    write_durably(path, b"one")
    with (
        mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(OSError, match="No space left"),
    ):
        write_durably(path, b"another")
    assert names(tmp_path) == ["latest"] and path.read_bytes() == b"one"


def test_lists_and_parts() -> None:
    folders = {step: StepFolder(path=Path(str(step)), step=step) for step in range(12)}
    assert listed(folders) == "..., 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"
    assert list(buckets([], 8)) == []
    assert list(buckets([(size, None) for size in (9, 0, 8, 1)], 8)) == [[0], [1, 2], [3]]
