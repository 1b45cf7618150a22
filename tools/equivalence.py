"""Every family on every mesh over gloo ranks against one device, float64: python tools/equivalence.py [--family NAME]

Writes docs/equivalence.md unless families were picked. Each cell is the worst error over loss, outputs, gradients, clip
norm and weights after AdamW. Worlds are reused; a rank that fails ends its world, and the next cell starts another.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "equivalence.md"
TOLERANCE = 1e-9
MESHES: Mapping[str, Mapping[str, Any]] = {
    "tp=2": {"tp": 2},
    "tp=4": {"tp": 4},
    "tp=2 × dp=2, ZeRO 3, sequence": {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
    "dp_replicate=2 × dp_shard=2": {"dp_replicate": 2, "dp_shard": 2},
    "dp=2, accumulate 3": {"dp": 2, "accumulate": 3},
}


def world_size(wish: Mapping[str, Any]) -> int:
    """Ranks that a wish needs."""
    size: int = wish.get("tp", 1) * wish.get("dp", wish.get("dp_shard", 1)) * wish.get("dp_replicate", 1)
    return size


class Worlds:
    """One world of ranks per size, started when first needed and again after a failure."""

    def __init__(self) -> None:
        self._open: dict[int, Any] = {}

    def of(self, size: int) -> Any:
        """The world of `size` ranks."""
        from autopar.runtime.launch import Ranks

        if size not in self._open or not self._open[size].is_open:
            self._open[size] = Ranks(size)
        return self._open[size]

    def close(self) -> None:
        for world in self._open.values():
            world.close()


@contextlib.contextmanager
def worlds() -> Iterator[Worlds]:
    """Worlds that are gone afterwards."""
    found = Worlds()
    try:
        yield found
    finally:
        found.close()


def worst_error(family: str, wish: Mapping[str, Any], open_worlds: Worlds) -> float:
    """The worst error of a family under a wish. Raises `AutoparError` where the plan is refused or a rank fails.

    Sequence parallelism is left out for a model without a sequence.
    """
    from autopar.errors import PlanError
    from autopar.verification import verify

    size = world_size(wish)
    try:
        report = verify(f"zoo:{family}", world_size=size, degrees=wish, ranks=open_worlds.of(size))
    except PlanError as error:
        if "no input has a sequence" not in str(error):
            raise
        without = {name: value for name, value in wish.items() if name != "sequence_parallel"}
        return worst_error(family, without, open_worlds)
    # the comparison with the unmodified model is of float32 and has a tolerance of its own
    captured = [q for q in report.quantities if q.name.startswith("captured")]
    assert all(q.passed for q in captured), (family, captured)
    return max(float(q.max_error) for q in report.quantities if q not in captured)


def cell(family: str, wish: Mapping[str, Any], open_worlds: Worlds) -> tuple[str, bool]:
    """What the table says, and whether that is a failure."""
    from autopar.errors import AutoparError, PlanError

    try:
        error = worst_error(family, wish, open_worlds)
    except PlanError as refusal:
        return f"refused: {_reason(str(refusal))}", False
    except (AutoparError, AssertionError) as failure:
        return f"FAILED: {_reason(str(failure))}", True
    return (f"{error:.1e}", False) if error <= TOLERANCE else (f"DIFFERS: {error:.1e}", True)


def _reason(message: str) -> str:
    """What a message says is wrong, as one cell, without the remedies behind it."""
    return " ".join(message.split()).partition("; ")[0][:200].replace("|", "/")


def table(families: Sequence[str], say: Callable[[str], None]) -> tuple[list[str], int]:
    """Rows in Markdown, and how many cells failed."""
    rows = [f"| family | {' | '.join(MESHES)} |", "|---" * (len(MESHES) + 1) + "|"]
    failures = 0
    with worlds() as open_worlds:
        for family in families:
            started, texts = time.monotonic(), []
            for wish in MESHES.values():
                text, failed = cell(family, wish, open_worlds)
                failures += failed
                texts.append(text)
            rows.append(f"| {family} | {' | '.join(texts)} |")
            say(f"{rows[-1]} {time.monotonic() - started:.0f} s")
    return rows, failures


PAGE = """# Equivalence

Three AdamW steps of every family on gloo ranks against one device, in float64 with random weights. Each cell is the
worst error of loss, outputs, every gradient, clip norm and weights, by the measure of [semantics](semantics.md); the
tolerance is {tolerance:.0e}. Models are the presets of each family shrunk to two layers, and plain torch networks
(`tests/families`). Errors near 1e-10 are of the biases of attention's keys, whose gradients are zero but for rounding.
A refusal is what a user would be told.

{rows}

Written by `make verify-all` (`python tools/equivalence.py`), torch {torch} on CPU, {day}.
"""


def document(rows: Sequence[str]) -> str:
    """The page."""
    import torch

    day = time.strftime("%-d %B %Y")
    return PAGE.format(tolerance=TOLERANCE, rows="\n".join(rows), torch=torch.__version__, day=day)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", help="only this one, printed and not written; may be repeated")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_LOGS", "-dtensor")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "families")]
    import zoo  # type: ignore[import-not-found]

    rows, failures = table(options.family or list(zoo.FAMILIES), lambda text: print(text, flush=True))
    if not options.family:
        TARGET.write_text(document(rows), encoding="utf-8")
    print(f"{failures} of {(len(rows) - 2) * len(MESHES)} cells failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
