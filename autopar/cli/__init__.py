"""The command line. The console script is `autopar.cli:main`."""

import gc

OBJECTS_PER_COLLECTION = 5_000_000  # a capture makes a million that stay, and walking them once takes half a second


def main() -> None:
    """Run the command line."""
    gc.set_threshold(OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
    from autopar.cli.app import app  # its imports make many of those

    try:
        app()
    finally:
        gc.freeze()  # else the interpreter walks all of it once more before it ends
