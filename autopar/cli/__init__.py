"""The command line. The console script is `autopar.cli:run`."""

import atexit
import gc
import os
import sys

OBJECTS_PER_COLLECTION = 5_000_000  # a capture makes a million that stay, and walking them once takes half a second


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
    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            status.append(ended.code or 0)
        raise


def _leave(status: list[int]) -> None:
    """End the process as it is: to take torch's modules and a capture apart first costs 0.15 s.

    Where no status is known, the interpreter ends it and says why.
    """
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0])
