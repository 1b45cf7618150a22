"""The command line. The console script is `autopar.cli:main`."""

import gc

OBJECTS_PER_COLLECTION = 1_000_000  # imports and captures make millions that stay, which Python would walk each 700


def main() -> None:
    """Run the command line."""
    gc.set_threshold(OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
    from autopar.cli.app import app  # its imports are among those millions

    try:
        app()
    finally:
        gc.freeze()  # else the interpreter walks all of it once more before it ends
