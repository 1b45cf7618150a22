"""Seconds of whole `autopar plan` commands: `python benchmarks/command_speed.py [CASE ...] [--rounds N]`.

A case is ``MODEL@CLUSTER``, with the batch of `benchmarks/search_speed.py`.

    cold   an empty cache: imports, capture, labels, search, printing
    warm   the capture and the labels are in the cache
    kept   the whole search is in the cache

Every command is a process of its own, timed by the clock, on a machine that does nothing else. Figures are medians of
the rounds. A first command that is not counted compiles the modules, as pip does for installed ones.

Two peers run in the same rounds. ``import torch`` is a lower bound for every command that reads a capture. The other
peer imports and exports the whole model (`benchmarks/export_alone.py`); "cold/x" and "warm/x" are relative to it. Peers
also compare machines: the targets belong to a machine that exports Llama of 32, 80 and 126 layers in 6.0, 9.4 and
13.4 s.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from search_speed import problem_of

# targets in seconds: cold and warm
TARGETS = {
    "llama3-8b@64xh100": (10, 3),
    "llama3-70b@1024xh100": (14, 3),
    "llama3-405b@16384xh100": (20, 3),
    "mixtral-8x22b@512xh100": (14, 3),
}
HEADS = ("cold", "target", "warm", "target", "kept", "torch", "export", "cold/x", "warm/x")
IMPORT = (sys.executable, "-c", "import torch")
EXPORT = (sys.executable, str(Path(__file__).with_name("export_alone.py")))


def command_of(case: str) -> list[str]:
    """The command line of a case."""
    problem = problem_of(case)
    options = {"--cluster": problem.cluster, "--seq-len": problem.sequence, "--global-batch": problem.global_batch}
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "-m", "autopar", "plan", problem.model, *words]


def seconds(command: Sequence[str], cache: Path) -> float:
    """Seconds of one command that uses a cache, by the clock."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["AUTOPAR_CACHE_DIR"] = str(cache)
    start = time.perf_counter()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return time.perf_counter() - start


def measure(case: str, rounds: int) -> tuple[float, ...]:
    """Medians: cold, warm, kept, importing torch, and imports with the whole model's export."""
    command, problem, found = command_of(case), problem_of(case), []
    export = (*EXPORT, problem.model, str(problem.sequence))
    with tempfile.TemporaryDirectory(prefix="autopar-cache-") as folder:
        cache = Path(folder) / "cache"
        seconds(command, cache)
        for _ in range(rounds):
            shutil.rmtree(cache, ignore_errors=True)
            cold = seconds(command, cache)
            shutil.rmtree(cache / "plans")
            warm = seconds(command, cache)
            kept = seconds(command, cache)
            found.append((cold, warm, kept, seconds(IMPORT, cache), seconds(export, cache)))
    return tuple(statistics.median(column) for column in zip(*found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(TARGETS))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{'case':24s}", *(f"{name:>7}" for name in HEADS), flush=True)
    for case in arguments.cases:
        cold, warm, kept, torch, export = measure(case, arguments.rounds)
        wanted = [str(target) for target in TARGETS.get(case, ("", ""))]
        row = f"{cold:>7.2f} {wanted[0]:>7} {warm:>7.2f} {wanted[1]:>7} {kept:>7.2f} {torch:>7.2f}"
        row += f" {export:>7.2f} {cold / export:>7.2f} {warm / export:>7.2f}"
        print(f"{case:24s} {row}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    print(f"largest memory of a command: {peak:.2f} GB")


if __name__ == "__main__":
    main()
