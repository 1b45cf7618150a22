"""Print how large files and functions are, and fail past the caps.

Lines are physical lines, comments and docstrings included. A function's lines run from its `def` to its last
statement, functions inside it included.
"""

import ast
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS = {
    "product": ("autopar", "cost_model", "search", "runtime"),
    "tests": ("tests",),
    "other": ("tools", "examples", "benchmarks", "experiments"),
}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 80
AIM_FILE_MEDIAN, AIM_FUNCTION_P90 = 180, 40
NUM_LARGEST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A file or a function."""

    where: str
    lines: int
    unannotated: bool = False  # a function without a return annotation


def main() -> None:
    over: list[str] = []
    row = "{:8} {:10} {:>6} {:>7} {:>5} {:>5}   {}".format
    print(row("group", "what", "count", "median", "p90", "max", "no return annotation"))
    largest: dict[str, list[Item]] = {"files": [], "functions": []}
    for group, folders in GROUPS.items():
        files, functions = measure(folders)
        for what, items, cap in (("files", files, MAX_FILE_LINES), ("functions", functions, MAX_FUNCTION_LINES)):
            missing = sum(item.unannotated for item in items) if what == "functions" else ""
            print(row(group, what, *summary([item.lines for item in items]), missing))
            over += [f"{item.where}: {item.lines} lines, at most {cap}" for item in items if item.lines > cap]
            largest[what] += items
    for what, items in largest.items():
        print(f"\nlargest {what}")
        for item in sorted(items, key=by_size)[:NUM_LARGEST]:
            print(f"  {item.lines:5}  {item.where}")
    print(f"\ncaps: file {MAX_FILE_LINES}, function {MAX_FUNCTION_LINES} lines; aims in product code:", end=" ")
    print(f"median file {AIM_FILE_MEDIAN}, 90th percentile of functions {AIM_FUNCTION_P90}")
    if over:
        sys.exit("sizes: past the cap, split them:\n  " + "\n  ".join(over))


def measure(folders: Sequence[str]) -> tuple[list[Item], list[Item]]:
    """Files and functions under some folders; empty files (package markers) do not count."""
    files: list[Item] = []
    functions: list[Item] = []
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        if any(parent.is_symlink() for parent in path.parents):
            continue
        text, name = path.read_text(), path.relative_to(ROOT).as_posix()
        if not text:
            continue
        files.append(Item(where=name, lines=len(text.splitlines())))
        for node in ast.walk(ast.parse(text, filename=name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                where = f"{name}:{node.lineno} {node.name}"
                functions.append(Item(where=where, lines=num_lines, unannotated=node.returns is None))
    return files, functions


def summary(lines: Sequence[int]) -> tuple[int, int, int, int]:
    """Count, median, 90th percentile and maximum."""
    return len(lines), quantile(lines, 0.5), quantile(lines, 0.9), max(lines, default=0)


def quantile(values: Sequence[int], fraction: float) -> int:
    """The smallest value with at least that fraction of the values at or below it."""
    return sorted(values)[max(math.ceil(fraction * len(values)) - 1, 0)] if values else 0


def by_size(item: Item) -> tuple[int, str]:
    return -item.lines, item.where


if __name__ == "__main__":
    main()
