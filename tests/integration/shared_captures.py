"""Programs that a test captures once: its ranks read what it wrote, and capture where nothing was written.

That every rank captures the same program by itself is what tests of `parallelize` show.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from autopar.ir.program import Program
from autopar.trace.program_bytes import from_bytes, to_bytes


def captured_once(key: object, capture: Callable[[], Program]) -> Program:
    """The program of a key, whose repr must tell everything that the capture depends on."""
    folder = os.environ.get("AUTOPAR_TEST_CAPTURES")
    if folder is None or not Path(folder).is_dir():
        return capture()
    path = Path(folder, hashlib.sha256(repr(key).encode()).hexdigest())
    if not path.exists():
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_bytes(to_bytes(capture()))
        whole.rename(path)
    return from_bytes(path.read_bytes())
