"""The policy for kept files, whatever they hold."""

import json
import os
from pathlib import Path

import pytest

from autopar.cache import store
from autopar.cache.captures import captured_model
from autopar.cache.store import KeptFile, drop_oldest, kept_file, versions
from autopar.capture.record.file import open_capture
from autopar.search.result.result import SearchResult


def loaded(path: Path) -> object:
    return json.loads(path.read_text())


def test_a_file_is_named_by_every_input(tmp_path: Path) -> None:
    first = kept_file(tmp_path, "search", {"a": 1, "b": 2}, [3])
    assert kept_file(tmp_path, "search", {"b": 2, "a": 1}, [3]) == first
    others = [kept_file(tmp_path, "search", *inputs) for inputs in (({"a": 1}, [3]), ({"a": 1, "b": 2}, [4]), ([3],))]
    others.append(kept_file(tmp_path, "labels", {"a": 1, "b": 2}, [3]))
    assert len({first.path, *(one.path for one in others)}) == 5


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file, notes = kept_file(tmp_path / "new" / "folder", "search", 1), list[str]()
    assert file.read(loaded, notes.append) is None and not notes
    file.write("[1, 2]", notes.append)
    assert file.read(loaded, notes.append) == [1, 2] and not notes
    assert list(file.path.parent.iterdir()) == [file.path]


def test_a_damaged_file_is_reported(tmp_path: Path) -> None:
    file, notes = KeptFile(path=tmp_path / "x.json", what="search"), list[str]()
    file.path.write_text("[1,")
    assert file.read(loaded, notes.append) is None
    assert notes == [
        f"the kept search {file.path} cannot be read and is made anew: Expecting value: line 1 column 4 (char 3)"
    ]


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file, notes = kept_file(tmp_path / "file" / "folder", "search", 1), list[str]()
    file.write("[]", notes.append)
    assert len(notes) == 1 and notes[0].startswith("the search is not kept for the next time: ")


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        file = tmp_path / f"{name}.json"
        file.write_text("x" * 100)
        os.utime(file, (1000 - age, 1000 - age))
    (tmp_path / "other.txt").write_text("x" * 1000)
    drop_oldest(tmp_path, 250)
    assert {file.name for file in tmp_path.iterdir()} == {"new.json", "middle.json", "other.txt"}


def test_reading_a_file_makes_it_the_last_to_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [kept_file(tmp_path, "search", number) for number in range(3)]
    for age, file in enumerate(files):
        file.write("[0]")
        os.utime(file.path, (1000 - age, 1000 - age))
    assert files[2].read(loaded, lambda _: None) == [0]
    monkeypatch.setattr(store, "MOST_BYTES", 6)
    kept_file(tmp_path, "search", 3).write("[0]")
    assert [file.path.exists() for file in files] == [False, False, True]


def test_versions_name_libraries_and_source() -> None:
    found = versions(("torch", "no-such-library"), ("errors.py",))
    assert found["no-such-library"] == "none" and found["torch"] != "none"
    assert found["source"] not in (versions((), ("ir",))["source"], versions(())["source"])


def test_a_capture_of_an_earlier_version_is_reported_and_made_anew(tmp_path: Path) -> None:
    sizes = {"layers": 1, "hidden": 64, "seq_len": 16}
    captured_model("gpt2", folder=tmp_path, **sizes)  # type: ignore[arg-type]
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(whole.replace('"version":3', '"version":0', 1))
    found = captured_model("gpt2", folder=tmp_path, **sizes)  # type: ignore[arg-type]
    assert [note for note in found.notes if "is a capture of version 0" in note and "made anew" in note]
    assert path.read_text() == whole
    assert open_capture(path)[0].version == 3


def test_a_search_of_an_earlier_version_is_reported(tmp_path: Path) -> None:
    file, notes = kept_file(tmp_path, "search", 1), list[str]()
    file.write('{"kind": "autopar search result", "version": 0}')
    assert file.read(lambda path: SearchResult.from_dict(loaded(path), str(path)), notes.append) is None
    assert "version 0, this autopar reads 2; search again" in notes[0]
