"""Print how large files, functions, rooms and the whole are, and fail past the limits.

Lines are physical lines, comments and docstrings included. A function's lines run from its `def` to its last
statement, functions inside it included. Lines of code are the others without comments, docstrings and imports.

``tools/sizes.json`` has the limits of rooms, of names and of prose. A number falls freely, and ``--lower`` writes the
smaller one. It rises by hand only, by the lines that an issue may add.
"""

import ast
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
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
NUM_LARGEST, MAX_WORDS = 5, 28
BESIDE = ("|", "#", "!", "<", ">>>", "    ")  # parts of a page or docstring that are no sentences
PRODUCT, BESIDE_PRODUCT = "the product", "tests, tools, benchmarks, examples"
LIMITS = Path(__file__).with_suffix(".json")
VAGUE = frozenset(["found", "one", "own", "how", "asked", "alike", "made", "again"])
PARTICIPLE = re.compile(
    r"(?!.*(Need|Speed|Seed|Feed)$)(_?[A-Z]\w*ed|.*(Built|Chosen|Drawn|Found|Given|Held|Kept|Known|Made|Sent|Taken|Ran))$"
)


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
    over += past_limits(json.loads(LIMITS.read_text()))
    if over:
        sys.exit("sizes: past the cap, split them:\n  " + "\n  ".join(over))


def past_limits(limits: dict[str, dict[str, int]]) -> list[str]:
    """Print the measured numbers beside their limits; the sentences about those that are past them."""
    measured = {
        "lines": rooms(lines_of),
        "lines of code": wholes(rooms(code_lines)),
        "names": names(),
        "prose": prose(),
    }
    over = list[str]()
    for kind, numbers in measured.items():
        print(f"\n{kind:38} {'now':>7} {'limit':>7}")
        for name in sorted(numbers.keys() | limits.get(kind, {}).keys()):
            number, limit = numbers.get(name, 0), limits.get(kind, {}).get(name)
            print(f"  {name:36} {number:7,} {'none' if limit is None else f'{limit:,}':>7}")
            if limit is None or number > limit:
                over.append(f"{kind} of {name}: {number:,}, at most {limit if limit is None else f'{limit:,}'}")
    if "--lower" in sys.argv[1:]:
        lower = {
            kind: {n: min(v, limits.get(kind, {}).get(n, v)) for n, v in ns.items()} for kind, ns in measured.items()
        }
        LIMITS.write_text(json.dumps(lower, indent=1, sort_keys=True) + "\n")
    return over


def sources(*folders: str) -> list[Path]:
    """The Python files of some folders, without those behind a link."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in paths if not any(part.is_symlink() for part in (path, *path.parents))]


def rooms(measure_file: Callable[[Path], int]) -> dict[str, int]:
    """A number of every room of the product, of the whole, and of everything beside it."""
    found = Counter[str]()
    for path in sources(*GROUPS["product"]):
        parts = path.relative_to(ROOT).parts[:-1]
        number = measure_file(path)
        found["/".join(parts[:2])] += number
        found[PRODUCT] += number
    found[BESIDE_PRODUCT] = sum(map(measure_file, sources(*GROUPS["tests"], *GROUPS["other"])))
    return dict(found)


def wholes(numbers: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in numbers.items() if name in (PRODUCT, BESIDE_PRODUCT)}


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def code_lines(path: Path) -> int:
    """Lines that are not blank, no comment, no docstring and no import."""
    text, apart = path.read_text(), set[int]()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Expr) and is_text):
            apart.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return sum(bool(line) and not line.startswith("#") and number not in apart for number, line in lines)


def names() -> dict[str, int]:
    """Public names with two homes, classes that are participles, and bindings of words that say nothing."""
    homes, participles, vague = defaultdict[str, set[Path]](set), 0, 0
    for path in sources(*GROUPS["product"]):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            targets = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            targets += [t.id for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []
            for name in targets:
                homes[name].add(path)
        for part in ast.walk(tree):
            participles += isinstance(part, ast.ClassDef) and PARTICIPLE.match(part.name) is not None
            vague += isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) and part.id in VAGUE
            vague += isinstance(part, ast.arg) and part.arg in VAGUE
    public = sum(len(files) > 1 for name, files in homes.items() if not name.startswith("_") and name != "main")
    return {"public names with two homes": public, "classes that are participles": participles, "vague bindings": vague}


def prose() -> dict[str, int]:
    """Sentences of pages and docstrings that are too long, and words of a hundred sentences."""
    pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    texts = [re.sub(r"```.*?```", "", path.read_text(), flags=re.S) for path in pages]
    for path in sources(*GROUPS["product"]):
        places = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts += [ast.get_docstring(n) or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, places)]
    paragraphs = [
        part for text in texts for part in re.split(r"\n\s*\n|\n\s*[-*] ", text) if not part.startswith(BESIDE)
    ]
    counts = []
    for paragraph in paragraphs:
        plain = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph.split())))
        counts += [
            len(re.findall(r"[A-Za-z][A-Za-z'’-]*", one)) for one in re.split(r"(?<=[.!?:;])\s+(?=[A-Z`\[])", plain)
        ]
    counts = [count for count in counts if count > 2]
    return {
        f"sentences of more than {MAX_WORDS} words": sum(count > MAX_WORDS for count in counts),
        "words of a hundred sentences": 100 * sum(counts) // len(counts),
    }


def measure(folders: Sequence[str]) -> tuple[list[Item], list[Item]]:
    """Files and functions under some folders; empty files (package markers) do not count."""
    files: list[Item] = []
    functions: list[Item] = []
    for path in sources(*folders):
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
