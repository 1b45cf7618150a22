"""CONTRIBUTING names the place for everything that can be added, and every place and test that it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TO_ADD = (
    "an operator rule", "a device", "a cluster", "a model", "an engine", "a schedule", "a collective algorithm",
    "a search dimension",
)  # fmt: skip


def rows() -> dict[str, list[str]]:
    """What to add, and the paths that its row names."""
    lines = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| a")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: re.findall(r"`([\w./-]*/[\w./-]*|\w+\.(?:toml|txt))`", " ".join(rest)) for first, *rest in cells}


def test_every_place_is_named_once() -> None:
    assert set(TO_ADD) <= set(rows())
    for what in TO_ADD:
        places, tests = ([p for p in rows()[what] if p.startswith("tests/") is is_test] for is_test in (False, True))
        assert places and tests, what


def test_every_path_exists() -> None:
    missing = [path for paths in rows().values() for path in paths if not (ROOT / path).exists()]
    assert not missing
