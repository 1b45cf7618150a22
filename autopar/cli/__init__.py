"""The command line. The console script is `autopar.cli:run`."""

import atexit
import gc
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

OBJECTS_PER_COLLECTION = 5_000_000  # a capture makes a million that stay, and walking them once takes half a second
INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    gc.set_threshold(OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
    from autopar.cli.app import app_of

    app = app_of(sys.argv[1:])  # its imports make many of those
    try:
        app()
    finally:
        gc.freeze()  # else the interpreter walks all of it once more before it ends


def run() -> None:
    """Run the command line as all that this process does."""
    status: list[int] = []
    atexit.register(_leave, status)  # the first that is registered is the last that is called
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, _end)
    try:
        main()
    except KeyboardInterrupt:  # while modules are imported; a command says so itself
        print("autopar: interrupted", file=sys.stderr)
        status.append(INTERRUPTED)
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            status.append(ended.code or 0)
        raise


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End as an error does, so that ranks are ended and folders are removed."""
    raise SystemExit(128 + number)


def _leave(status: list[int]) -> None:
    """End the process as it is, if a status is known: to take modules and a capture apart first costs 0.15 s."""
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0])
