"""A module whose import fails on rank 1."""

import os

if os.environ.get("RANK") == "1":
    raise RuntimeError("planted")
