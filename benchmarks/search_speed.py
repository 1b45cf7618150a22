"""Seconds of the search over models, devices and layers: `python benchmarks/search_speed.py [CASE ...] [--rounds N]`.

A case is ``MODEL@CLUSTER``, or ``MODEL@CLUSTER:LAYERS`` with another number of layers. Every case runs in a process of
its own, and its peak memory is the process's. A search begins with a capture, as in `autopar plan`: it chooses labels,
screens and prices candidates, varies cuts, and makes the plan.

The first search of a process also imports modules and prepares expressions. The median is of `rounds` further searches,
which share only expressions and action lists. Captures are kept in the cache of `autopar plan`: "capture" is the
seconds of capturing, or of loading. With ``--cold`` nothing is kept, and "whole s" is what a first user waits for: the
capture and the first search.

"cpu s" is the median of the process's own seconds, which other work on the machine does not lengthen.

The peer is full enumeration: the processor seconds of exact prices of all candidates, estimated from a sample, over the
seconds of the search. The sample is priced in the same process, and together, as in the search. It has no context and
no expert ranks.
"""

import argparse
import logging
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from search_problem import Problem

from autopar.cache.captures import captured_model
from autopar.cache.store import cache_folder
from autopar.capture.any_size import Capture
from autopar.planning.captured_search import search_captured
from autopar.planning.options import PlanOptions
from autopar.search.pricing.batch import Together
from autopar.search.pricing.exact import AS_IT_IS
from autopar.search.pricing.objective import Goal, Part
from autopar.search.result.result import SearchResult
from autopar.search.space.candidates import Split, candidates

# targets on an idle machine, in seconds of a search
TARGETS = {
    "llama3-8b@64xh100": 0.5,
    "llama3-70b@1024xh100": 1.5,
    "llama3-405b@16384xh100": 5.0,
    "mixtral-8x22b@512xh100": 2.0,
    "deepseek-v3@2048xh800": 8.0,
}
DEVICES = tuple(f"llama3-8b@{count}xh100" for count in (8, 512, 4096))
LAYERS = tuple(f"llama3-8b@64xh100:{layers}" for layers in (8, 16, 64))
CASES = (*TARGETS, *DEVICES, *LAYERS)
SEQUENCE = 8192
OWN_SIZES = {"deepseek-v3": (4096, 15_360)}  # tokens of a sequence and sequences of a step, as its makers trained it
TENSOR = (1, 2, 4, 8)  # degrees of the peer's sample
SAMPLE, GROUP = 96, 24  # candidates of the sample, and how many are priced together


def problem_of(case: str) -> Problem:
    """The problem of a case. A step has 512 sequences, or one for every 8 devices if that is more.

    A model in `OWN_SIZES` has its own sizes.
    """
    model, _, where = case.partition("@")
    cluster, _, layers = where.partition(":")
    batch = max(512, int(cluster.partition("x")[0]) // 8)
    sequence, batch = OWN_SIZES.get(model, (SEQUENCE, batch))
    return Problem(
        model=model, cluster=cluster, sequence=sequence, global_batch=batch, layers=int(layers) if layers else None
    )


def measure(case: str, rounds: int, folder: Path) -> None:
    """Print one row. Captures are kept in a folder."""
    logging.disable(logging.WARNING)
    problem = problem_of(case)
    start = time.perf_counter()
    captured = captured_model(
        problem.model, folder=folder, layers=problem.layers, seq_len=problem.sequence, dtype="bfloat16"
    ).capture
    loading = time.perf_counter() - start
    first, found = searched(problem, captured)
    own = [searched(problem, captured)[0] for _ in range(rounds)]
    median, busy = (statistics.median(column) for column in zip(*own, strict=True))
    ratio = seconds_of_a_price(problem) * found.counted.candidates / busy
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    target = f"{TARGETS[case]:.1f}" if case in TARGETS else ""
    proven = "yes" if found.is_proven else f"{found.gap:.1%}"
    counted = f"{found.counted.candidates:>10,} {found.counted.priced:>6} {proven:>6}"
    took = f"{loading:>7.2f} {first[0]:>7.2f} {loading + first[0]:>7.2f} {median:>7.2f} {busy:>7.2f} {target:>6}"
    print(f"{case:24s} {counted} {took} {ratio:>6.0f} {peak_gb:>5.2f}", flush=True)


def searched(problem: Problem, captured: Capture) -> tuple[tuple[float, float], SearchResult]:
    """Seconds of one search, by the clock and of the processor, and its result."""
    asked = PlanOptions(global_batch=problem.global_batch, fix={}, forbid={})
    start, used = time.perf_counter(), time.process_time()
    found = search_captured(captured, problem.spec, asked, name=problem.model, on_progress=lambda _: None)
    return (time.perf_counter() - start, time.process_time() - used), found


def seconds_of_a_price(problem: Problem) -> float:
    """Processor seconds of one exact price, the mean over a sample of candidates of some tensor degrees."""
    found = candidates(problem.constraints.narrowed({"tp": TENSOR}))
    works = {Split(tp): problem.works(tp) for tp in TENSOR}
    part = Part(cluster=problem.spec, on=problem.on, weight=1.0)
    sample = random.Random(0).sample(range(len(found)), min(SAMPLE, len(found)))
    prices = Together(found, works, Goal(objective="time", parts={problem.spec.num_devices: part}))
    start = time.process_time()
    for at in range(0, len(sample), GROUP):
        prices.price([(index, AS_IT_IS) for index in sample[at : at + GROUP]])
    return (time.process_time() - start) / len(sample)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--row", action="store_true", help="measure in this process")
    parser.add_argument("--cold", action="store_true", help="capture every model again")
    arguments = parser.parse_args()
    if arguments.row:
        with tempfile.TemporaryDirectory() as empty:
            folder = Path(empty) if arguments.cold else cache_folder()
            measure(arguments.cases[0], arguments.rounds, folder)
        return
    counted, took = ("candidates", "priced", "proven"), ("capture", "first s", "whole s", "median", "cpu s", "target")
    widths = (10, 6, 6, 7, 7, 7, 7, 7, 6, 6, 5)
    heads = zip((*counted, *took, "x enum", "GB"), widths, strict=True)
    print(f"{'case':24s}", *(f"{name:>{width}}" for name, width in heads), flush=True)
    for case in arguments.cases:
        given = ["--rounds", str(arguments.rounds), *(["--cold"] if arguments.cold else [])]
        subprocess.run([sys.executable, __file__, case, "--row", *given], check=True)


if __name__ == "__main__":
    main()
