"""The command line. The console script is `autopar.cli:main`."""

from autopar.cli.app import main

__all__ = ["main"]
