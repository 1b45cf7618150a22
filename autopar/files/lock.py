"""The lock of a folder: one job uses it at a time.

The file `lock` names the process of the job's first rank. The lock of a process that has ended is stale and is taken
over. A process of this host is looked up by its number and start time. A process of another host renews the file every
few seconds, so a file that nobody renews is stale.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from weakref import finalize

from autopar.errors import InputError
from autopar.files.atomic import write_text
from autopar.files.plain_data import read_plain
from autopar.files.strict_text import read_json

LOCK = "lock"
RENEWED_S = 5.0
STALE_LOCK_S = 30.0
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds a lock: its host, that host's names for processes, its number and start, and a token."""

    host: str
    namespace: str
    pid: int
    started: str
    token: str

    @property
    def is_local(self) -> bool:
        """Whether the process is or was one of this host."""
        return (self.host, self.namespace) == (socket.gethostname(), _namespace())

    @property
    def is_this_process(self) -> bool:
        """Whether this process holds the lock."""
        return self.is_local and (self.pid, self.started) == (os.getpid(), _started(os.getpid()))


class FolderLock:
    """The lock of one folder, held until `release`, the end of this object, or the end of the process."""

    def __init__(self, root: Path, holder: Holder) -> None:
        self._path, self._holder = root / LOCK, holder
        ended = threading.Event()
        threading.Thread(target=_renew, args=(self._path, ended), daemon=True, name="autopar-lock").start()
        self.release = finalize(self, _release, self._path, holder, ended)

    def confirm(self) -> None:
        """Raise `InputError` if another job has taken the lock meanwhile."""
        held = read_holder(self._path.parent)
        if held != self._holder:
            by = "is gone" if held is None else f"is now held by process {held.pid} on {held.host}"
            raise InputError(f"the lock {self._path} {by}; let one job use a folder")


def take_lock(root: Path, *, again: bool = False, stale_s: float = STALE_LOCK_S) -> FolderLock:
    """Take the lock of a folder. Waits at most `stale_s` for another host; with `again` this process may hold it."""
    holder = Holder(
        host=socket.gethostname(),
        namespace=_namespace(),
        pid=os.getpid(),
        started=_started(os.getpid()),
        token=secrets.token_hex(8),
    )
    found = read_holder(root)
    if found is not None and not (found.is_this_process and again) and not _is_stale(root, found, stale_s):
        raise InputError(
            f"{root} is in use by process {found.pid} on {found.host}; name another folder, or end that job. If it has "
            f"ended, remove {root / LOCK}"
        )
    with _one_at_a_time(root):
        if read_holder(root) not in (found, None):
            raise InputError(f"{root} is in use: another job has just begun to use it")
        write_text(root / LOCK, json.dumps(asdict(holder)))
    return FolderLock(root, holder)


def read_holder(root: Path) -> Holder | None:
    """The process that holds the lock of a folder, or held it when it was killed. None without a lock."""
    if not os.path.lexists(root / LOCK):
        return None
    content, problems = read_json(root / LOCK, max_bytes=_MAX_BYTES)
    made: Holder | None = read_plain(Holder, content, problems) if not problems else None
    if made is None:
        if not os.path.lexists(root / LOCK):  # released meanwhile
            return None
        raise InputError(f"{root / LOCK} is no lock of a job; remove it if no job uses the folder", problems)
    return made


def is_alive(holder: Holder) -> bool | None:
    """Whether a process of this host runs. None for another host."""
    if not holder.is_local:
        return None
    return _started(holder.pid) == holder.started != ""


def _is_stale(root: Path, holder: Holder, stale_s: float) -> bool:
    alive = is_alive(holder)
    if alive is not None:
        return not alive
    with suppress(FileNotFoundError):
        first = (root / LOCK).stat().st_mtime_ns
        deadline = time.monotonic() + stale_s
        while time.monotonic() < deadline:
            time.sleep(min(0.2, stale_s / 10))
            if (root / LOCK).stat().st_mtime_ns != first:
                return False
    return True


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Keep other processes from taking the lock at the same time, where the file system can."""
    import fcntl

    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(f"{root} cannot be used: {error.strerror or error}; name a folder that exists") from error
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _renew(path: Path, ended: threading.Event) -> None:
    while not ended.wait(RENEWED_S):
        with suppress(OSError):
            os.utime(path)


def _release(path: Path, holder: Holder, ended: threading.Event) -> None:
    ended.set()
    with suppress(OSError, InputError):
        if holder.is_this_process and read_holder(path.parent) == holder:
            path.unlink()


def _namespace() -> str:
    """What tells apart containers of one host name: equal numbers there are different processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started, by the host's clock. Empty for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
