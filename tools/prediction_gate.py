"""Compare the errors of predictions with the best ones so far, which ``benchmarks/accepted.json`` keeps:

    python tools/prediction_gate.py             print both, and fail if an error is more than 3 % above its best
    python tools/prediction_gate.py --accept    also write the errors that are smaller

An error is the median or the 90th percentile of a set of published runs (`audiences`). A coverage, the part of the runs
inside their 80 % interval, must be from 70 to 90 %. `exceptions` of the file names what may be worse, with the reason.
A better error is never replaced by a worse one.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from audiences import audiences

from autopar.cost_model.published.validation import RowComparison, measures

ACCEPTED = Path(__file__).resolve().parents[1] / "benchmarks" / "accepted.json"
WORSE = 1.03
COVERAGE = (0.70, 0.90)
LEAST_ROWS = 10  # a set of fewer runs has no coverage


def figures(rows: Sequence[RowComparison]) -> dict[str, float]:
    """The errors and coverages of a set, as fractions."""
    found = measures(rows)
    values: dict[str, float | None] = {}
    for name, errors, inside in (
        ("time", found.step_time, found.time_inside),
        ("memory", found.memory, found.memory_inside),
    ):
        values |= {f"{name} median": errors.median, f"{name} p90": errors.p90}
        values[f"{name} inside"] = inside / errors.n if errors.n >= LEAST_ROWS else None
    return {name: round(value, 4) for name, value in values.items() if value is not None}


def problems(
    now: Mapping[str, Mapping[str, float]], best: Mapping[str, Mapping[str, float]], exceptions: Mapping[str, str]
) -> list[str]:
    """What is worse than accepted, as sentences."""
    found = []
    for name, values in now.items():
        for figure, value in values.items():
            if f"{name}: {figure}" in exceptions:
                continue
            if figure.endswith("inside"):
                if not COVERAGE[0] <= value <= COVERAGE[1]:
                    found.append(f"{name}: {value:.0%} of the runs are inside the interval of {figure.split()[0]}")
            elif value > WORSE * best.get(name, {}).get(figure, value):
                found.append(f"{name}: {figure} is {value:.1%}, and was {best[name][figure]:.1%}")
    return found


def better(
    now: Mapping[str, Mapping[str, float]], best: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """The smallest error of every figure so far; coverages are of now."""
    return {
        name: {
            figure: value if figure.endswith("inside") else min(value, best.get(name, {}).get(figure, value))
            for figure, value in values.items()
        }
        for name, values in now.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", action="store_true", help="write the errors that are smaller than before")
    chosen = parser.parse_args(arguments)
    accepted: dict[str, Any] = json.loads(ACCEPTED.read_text()) if ACCEPTED.exists() else {"best": {}, "exceptions": {}}
    now = {name: figures(rows) for name, rows in audiences().items()}
    for name, values in now.items():
        best = accepted["best"].get(name, {})
        shown = (f"{figure} {value:.1%} (best {best.get(figure, value):.1%})" for figure, value in values.items())
        print(f"{name}: {', '.join(shown)}")
    worse = problems(now, accepted["best"], accepted["exceptions"])
    if chosen.accept:
        accepted["best"] = better(now, accepted["best"])
        ACCEPTED.write_text(json.dumps(accepted, indent=2) + "\n")
    for problem in worse:
        print(f"worse than accepted: {problem}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
