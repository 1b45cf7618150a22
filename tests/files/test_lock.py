"""One job uses a folder. The lock of a process that has ended, here or on another host, is taken over."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import InputError
from autopar.files.lock import LOCK, is_alive, read_holder, take_lock

PROGRAM = """
import sys, time
from pathlib import Path
from autopar.files.lock import take_lock
lock = take_lock(Path(sys.argv[1]))
print("taken", flush=True)
time.sleep(100)
"""


def started(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "taken\n"
    return process


def written(folder: Path, **changes: Any) -> None:
    """The lock of this process, as it would be with other values."""
    lock = take_lock(folder)
    content = json.loads((folder / LOCK).read_text())
    lock.release()
    (folder / LOCK).write_text(json.dumps(content | changes))


def test_a_second_job_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    process = started(tmp_path)
    try:
        with pytest.raises(InputError, match=f"is in use by process {process.pid} on .*name another folder"):
            take_lock(tmp_path)
        holder = read_holder(tmp_path)
        assert holder is not None and holder.pid == process.pid and is_alive(holder)
    finally:
        process.kill()
        process.wait()
    assert is_alive(holder) is False
    take_lock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_job_may_take_its_own_lock_again_if_it_says_so(tmp_path: Path) -> None:
    first = take_lock(tmp_path)
    with pytest.raises(InputError, match=f"process {os.getpid()} "):
        take_lock(tmp_path)
    second = take_lock(tmp_path, again=True)
    first.release()
    second.confirm()
    with pytest.raises(InputError, match="let one job use a folder"):
        first.confirm()
    second.release()
    second.release()
    assert read_holder(tmp_path) is None


def test_a_number_that_another_process_has_now(tmp_path: Path) -> None:
    written(tmp_path, started="1")
    take_lock(tmp_path).release()


def test_another_host_is_given_time_to_renew_its_lock(tmp_path: Path) -> None:
    written(tmp_path, host="elsewhere")
    holder = read_holder(tmp_path)
    assert holder is not None and is_alive(holder) is None
    process = subprocess.Popen(
        [sys.executable, "-c", "import os, sys, time\nwhile True: os.utime(sys.argv[1]); time.sleep(0.05)",
         str(tmp_path / LOCK)]
    )  # fmt: skip
    try:
        with pytest.raises(InputError, match=f"on elsewhere; .*remove {tmp_path / LOCK}"):
            take_lock(tmp_path, stale_s=20)
    finally:
        process.kill()
        process.wait()
    take_lock(tmp_path, stale_s=0.3).release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', '{"pid": NaN}', "x" * 10_000])
def test_a_file_that_is_no_lock(content: str, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(content)
    with pytest.raises(InputError, match="is no lock of a job; remove it"):
        take_lock(tmp_path)
    assert (tmp_path / LOCK).read_text() == content


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name a folder that exists"):
        take_lock(tmp_path / "missing")
