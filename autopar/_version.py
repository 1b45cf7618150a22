"""The one place that states the version: the build reads it from here, and so does `autopar.__version__`."""

__version__ = "0.1.0.dev0"
