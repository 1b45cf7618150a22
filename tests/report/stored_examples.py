"""Searches that are stored beside the tests; `make_examples.py` writes them."""

import json
from pathlib import Path
from typing import Any

NAMES = ("pipeline", "flat", "misfit")


def example(name: str) -> Any:
    """One as data."""
    return json.loads((Path(__file__).parent / "examples" / f"{name}.json").read_text())
