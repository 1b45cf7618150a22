"""The one place that states the version: the build reads it from here, and so does `autopar.__version__`."""

__version__ = "0.1.0.dev0"


def public_version(version: str) -> str:
    """A version without its build: 2.13.0 for 2.13.0+cpu and 2.13.0+cu130."""
    return version.partition("+")[0]
