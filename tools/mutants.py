"""Plant faults into the product code one at a time, and see which tests catch each of them:

    python tools/mutants.py [--only NAME] [--fifth COMMIT] [--jobs N] [--results FILE] [--write]

The faults are data in tools/mutants.toml. A fault is planted into a copy of the tree, never into the checkout. The
short suite runs first, up to the first failure: the test that docs/mutants.md names, the test files nearest to the
fault, the others. A fault that the short suite misses meets the long tests too. Results are kept in a JSON file.
`--write` makes docs/mutants.md of them. With `--fifth` a fault meets only the test that docs/mutants.md names, which
takes seconds; a fault without such a test waits for a whole run.

A failing test counts only if it passes on the tree without the fault.
"""

import argparse
import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

from fifths import is_in_fifth

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tools" / "mutants.toml"
PAGE = ROOT / "docs" / "mutants.md"
SUITES = {"short": "not long", "long": "long"}  # the values of pytest's -m; the long suite has both
RUNS = (1, 6, 24)  # test files of the first runs; a run of few files begins sooner
SLOW_FOLDERS = ("integration", "examples", "families", "random_programs", "cli")  # behind others at the same distance
TIMEOUT_S = 3000
_RANK_FUNCTION = re.compile(r"^(\w+):\w+$")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)


class FaultError(ValueError):
    """A fault that cannot be planted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: `old` is text that `file` has exactly once, `new` stands in its place.

    `first` is a test file to begin with, of a fault whose tests no import leads to.
    """

    name: str
    area: str
    what: str
    file: str
    old: str
    new: str
    first: str = ""

    def planted(self, text: str) -> str:
        """`text` with the fault. Raises `FaultError` if the old text is not there exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise FaultError(f"{self.name}: {self.file} has the old text {count} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The first test of the short suite, or else of the long tests, that fails; "" if none does."""

    fault: Fault
    short: str
    long: str
    seconds: float

    @property
    def caught_by(self) -> str:
        return self.short or self.long


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """All faults, in the order of the file."""
    return [Fault(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]]


def problems(faults: Sequence[Fault], root: Path = ROOT) -> list[str]:
    """Why faults cannot be planted into the tree at `root`."""
    names = [fault.name for fault in faults]
    found = [f"{name}: there are two faults of this name" for name in sorted({n for n in names if names.count(n) > 1})]
    for fault in faults:
        try:
            if fault.old == fault.new:
                raise FaultError(f"{fault.name}: nothing changes")
            compile(fault.planted((root / fault.file).read_text(encoding="utf-8")), fault.file, "exec")
        except (FaultError, OSError, SyntaxError) as error:
            found.append(f"{fault.name}: {error}" if isinstance(error, (OSError, SyntaxError)) else str(error))
    return found


# ---- which tests run first ----


def nearest_tests(fault: Fault, root: Path = ROOT) -> list[str]:
    """All test files, by how many imports lie between them and the fault's module; `first` or its own test leads."""
    module = fault.file.removesuffix(".py").replace("/", ".")
    module = module if module.startswith("autopar.") else f"autopar.{module}"
    files = {path.stem: path for path in (root / "tests").rglob("*.py")}  # helpers are imported by their own names
    distance = _distances(module, root)

    def of_file(path: Path, seen: frozenset[str] = frozenset()) -> int:
        names = _imported(path)
        near = [distance[name] for name in names if name in distance]
        near += [1 + of_file(files[n], seen | {n}) for n in names if n in files and n not in seen and "." not in n]
        return min(near, default=99)

    own = fault.first or f"test_{Path(fault.file).stem}.py"

    def key(path: Path) -> tuple[bool, int, bool, int]:
        is_slow = path.relative_to(root / "tests").parts[0] in SLOW_FOLDERS
        return not path.as_posix().endswith(f"/{own}"), of_file(path) + is_slow, is_slow, path.stat().st_size

    # the test that every fault can be planted fails wherever one is
    every = [path for path in (root / "tests").rglob("test_*.py") if path.name != "test_mutants.py"]
    return [path.relative_to(root).as_posix() for path in sorted(every, key=key)]


def _distances(module: str, root: Path) -> dict[str, int]:
    """How many imports lie between each module of the package and `module`."""
    importers: dict[str, set[str]] = {}
    for top in ("autopar", "cost_model", "search", "runtime"):
        for path in (root / top).rglob("*.py"):
            own = path.relative_to(root).as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            own = own if top == "autopar" else f"autopar.{own}"
            for name in _imported(path):
                importers.setdefault(name, set()).add(own)
    found, edge = {module: 0}, {module}
    while edge:
        step = 1 + found[next(iter(edge))]
        edge = {user for name in edge for user in importers.get(name, ())} - found.keys()
        found |= dict.fromkeys(edge, step)
    return found


@cache  # faults change no import
def _imported(path: Path) -> set[str]:
    """The modules that a file imports, inside functions too, and those that it names as ``module:function``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(_RANK_FUNCTION.findall(node.value))
    return found - {"autopar"}  # the public face imports everything when it is asked for


def last_caught_by(fault: Fault, root: Path = ROOT) -> list[str]:
    """The test that docs/mutants.md names for a fault, if there is such a test."""
    row = re.escape(f"| {fault.area} | {fault.what} | caught | `")
    found = re.search(rf"^{row}((.*)::(\w+))`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    path = root / (found[2] if found else "")
    return [found[1]] if found and path.is_file() and f"def {found[3]}(" in path.read_text(encoding="utf-8") else []


# ---- running them ----


def copy_tree(target: Path) -> None:
    """The files that git knows, as they are in the checkout now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file() or source.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


class Bench:
    """A tree with the fault and a tree without it; runs tests in both."""

    def __init__(self, folder: Path) -> None:
        self.mutant, self.pristine = folder / "mutant", folder / "pristine"
        for tree in (self.mutant, self.pristine):
            copy_tree(tree)
        self.sound: dict[str, bool] = {}

    def result(self, fault: Fault, is_brief: bool = False) -> Result:
        """Which tests catch a fault. A brief run meets the named test alone."""
        path, started = self.mutant / fault.file, time.monotonic()
        text = path.read_text(encoding="utf-8")
        path.write_text(fault.planted(text), encoding="utf-8")
        try:
            files = nearest_tests(fault, self.pristine)
            edges = [0, *accumulate(RUNS), len(files)]
            groups = [last_caught_by(fault, self.pristine), *(files[start:stop] for start, stop in pairwise(edges))]
            runs = (self._first_failure(group, "short") for group in groups[: 1 if is_brief else None])
            short = next(filter(None, runs), "")
            long = "" if short or is_brief else self._first_failure(files, "long")
        finally:
            path.write_text(text, encoding="utf-8")
        return Result(fault=fault, short=short, long=long, seconds=time.monotonic() - started)

    def _first_failure(self, files: Sequence[str], suite: str) -> str:
        """The first test that fails with the fault and passes without it; "" if there is none."""
        unsound: list[str] = []
        while files:
            failed = _failing(self.mutant, files, SUITES[suite], unsound)
            if not failed or self._is_sound(failed, SUITES[suite]):
                return failed
            unsound.append(failed)
        return ""

    def _is_sound(self, test: str, selected: str) -> bool:
        if not test.startswith("tests/"):  # pytest itself ended, or gave no answer
            return True
        if test not in self.sound:
            self.sound[test] = not _failing(self.pristine, [test], selected, [])
        return self.sound[test]


def _failing(tree: Path, tests: Sequence[str], selected: str, left_out: Iterable[str]) -> str:
    """The first of some tests that fails in a tree, in their order."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", selected, "-rfE", *tests]
    command += [f"--deselect={test}" for test in left_out]
    environment = os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "1000", "CI": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer in {TIMEOUT_S} s"
    if done.returncode in (0, 5):  # passed, or no test selected
        return ""
    found = _FAILED.search(done.stdout)
    return found[1] if found else f"pytest ended with status {done.returncode}"


# ---- results ----


def kept_results(path: Path, faults: Sequence[Fault]) -> dict[str, Result]:
    """Results of an earlier run by name, of the faults that have not changed since."""
    if not path.is_file():
        return {}
    known = {fault.name: fault for fault in faults}
    read = [Result(**entry | {"fault": Fault(**entry["fault"])}) for entry in json.loads(path.read_text("utf-8"))]
    return {one.fault.name: one for one in read if known.get(one.fault.name) == one.fault}


def table(results: Sequence[Result]) -> str:
    """The results in Markdown."""
    rows = ["| area | fault | short suite | caught by |", "|---|---|---|---|"]
    for one in results:
        by = f"`{one.caught_by.partition('[')[0]}`" if one.caught_by else "no test"
        rows.append(f"| {one.fault.area} | {one.fault.what} | {'caught' if one.short else 'missed'} | {by} |")
    return "\n".join(rows)


def page(results: Sequence[Result], num_faults: int) -> str:
    """docs/mutants.md."""
    import torch

    short, long = sum(bool(one.short) for one in results), sum(bool(one.caught_by) for one in results)
    return PAGE_TEXT.format(
        all=num_faults,
        num=len(results),
        short=short,
        long=long,
        table=table(results),
        machine=f"{os.cpu_count()} {platform.machine()} cores",
        versions=f"Python {platform.python_version()}, torch {torch.__version__}",
        day=time.strftime("%-d %B %Y"),
    )


PAGE_TEXT = """# Planted faults

Do the tests find errors? This page answers by experiment. `tools/mutants.toml` lists {all} faults: a wrong factor, a
dropped sum, a wrong order, a wrong bound. The tool plants each fault into a copy of the code and runs the tests.

```sh
python tools/mutants.py --only clip-norm-tied    # one fault; the name is in tools/mutants.toml
python tools/mutants.py --jobs 2 --write         # all faults, and this page
```

{num} of the faults were planted for the table below:

- The short suite (`make test`) catches {short} of {num}.
- The short suite and the long tests (`make test-all`) together catch {long} of {num}.

The short suite runs first. It begins with the test that this page names, then come the test files nearest to the fault.
The run ends at the first test that fails. "Caught by" names this test. A test counts only if it passes without the
fault. The long tests run only for a fault that the short suite misses.

To add a fault, append it to `tools/mutants.toml`. The old text must stand exactly once in its file.
`tests/test_mutants.py` checks this for every fault.

{table}

Written by `python tools/mutants.py --write` on {machine}, {versions}, {day}.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="the name of a fault; may be repeated")
    parser.add_argument(
        "--fifth", metavar="COMMIT", help="the faults that the hash of this commit chooses, by their own tests"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many faults are tested at once")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "mutants.json", help="a JSON file to go on with"
    )
    parser.add_argument("--write", action="store_true", help="write docs/mutants.md")
    options = parser.parse_args(arguments)
    faults = read_faults()
    unknown = sorted(set(options.only or ()) - {fault.name for fault in faults})
    wrong = [*problems(faults), *(f"{name}: no fault of this name" for name in unknown)]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    kept = kept_results(options.results, faults)
    todo = [f for f in faults if (f.name in options.only if options.only else f.name not in kept)]
    if options.fifth:
        todo = [fault for fault in todo if is_in_fifth(fault.name, options.fifth) and last_caught_by(fault)]
    _run(todo, kept, options.results, options.jobs, is_brief=bool(options.fifth))
    results = [kept[fault.name] for fault in (todo if options.fifth else faults) if fault.name in kept]
    print(table([one for one in results if not options.only or one.fault.name in options.only]))
    if options.write:
        PAGE.write_text(page(results, len(faults)), encoding="utf-8")
    return int(not all(one.short for one in results))  # the short suite misses a fault


def _run(todo: Sequence[Fault], kept: dict[str, Result], path: Path, jobs: int, is_brief: bool) -> None:
    """Test every fault; results are added to `kept` and to the file as they come."""
    lock, benches = Lock(), SimpleQueue[Bench]()
    with tempfile.TemporaryDirectory(prefix="autopar-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        for number in range(min(jobs, len(todo))):
            benches.put(Bench(Path(folder, str(number))))

        def run(fault: Fault) -> None:
            bench = benches.get()
            try:
                found = bench.result(fault, is_brief)
            finally:
                benches.put(bench)
            with lock:
                kept[fault.name] = found
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps([asdict(one) for one in kept.values()], indent=1), encoding="utf-8")
                where = found.short or (f"only {found.long}" if found.long else "no test")
                print(f"{fault.name}: {where} ({found.seconds:.0f} s)", flush=True)

        for _ in pool.map(run, todo):
            pass


if __name__ == "__main__":
    sys.exit(main())
