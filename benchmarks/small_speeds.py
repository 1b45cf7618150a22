"""Small things that must not become slow: `python benchmarks/small_speeds.py [--rounds N]`.

Each alternates with a peer that does a part of the same work:

- the replay of a pipeline, with a replay that looks up each pass when it meets it;
- reading published runs, with `csv.DictReader` alone;
- reading a cluster file, with ruamel.yaml's parser alone.

Prints milliseconds of process time and their ratio, medians of the rounds. Tests count work that must hold on any
machine (`tests/tiny/work.py`).
"""

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Callable
from math import isclose
from pathlib import Path

from ruamel.yaml import YAML

from autopar.cost_model.pipeline.simulator import Orders, StageSeconds, replay_of, run_seconds, simulate
from autopar.cost_model.published.row import read_rows
from autopar.ir.cluster import ClusterSpec
from autopar.ir.schedules.registry import actions

RUNS = Path(__file__).parent / "data" / "published_runs.csv"
RANKS, MICRO_BATCHES = 64, 512


def naive_step_s(orders: Orders, seconds: StageSeconds) -> float:
    """Seconds of a step: every rank runs what it can, rank after rank, until all lists are empty."""
    ends, free, done = dict[tuple[int, str, int], float](), [0.0] * len(orders), [0] * len(orders)
    last = seconds.num_stages - 1
    while any(position < len(order) for position, order in zip(done, orders, strict=True)):
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                stage, kind, i = order[done[rank]]
                forward = kind == "F"
                if stage == (0 if forward else last):
                    needed, late = (None if forward else (stage, "F", i)), 0.0
                else:
                    needed, late = (stage - 1 if forward else stage + 1, kind, i), seconds.forward_message_s[0]
                if needed is not None and needed not in ends:
                    break
                start = max(free[rank], ends[needed] + late if needed else 0.0)
                free[rank] = start + (seconds.forward_s if forward else seconds.backward_s)[stage]
                ends[stage, kind, i] = free[rank]
                done[rank] += 1
    return max(free)


def replays() -> tuple[Callable[[], object], Callable[[], object], Callable[[], object]]:
    """Replays of 64 ranks × 512 micro-batches × F and B: once, again with other seconds, and naively.

    Messages never queue, so all three results are equal.
    """
    orders, kept = actions("1f1b", RANKS, 1, MICRO_BATCHES), replay_of("1f1b", RANKS, 1, MICRO_BATCHES)
    backward, messages = [2.0] * RANKS, [2.0**-10] * (RANKS - 1)
    seconds = StageSeconds(
        forward_s=[1.0] * RANKS,
        backward_s=backward,
        input_s=backward,
        weight_s=[0.0] * RANKS,
        forward_message_s=messages,
        backward_message_s=messages,
    )
    expected = naive_step_s(orders, seconds)
    assert all(isclose(one, expected) for one in (simulate(orders, seconds).step_s, run_seconds(kept, seconds)[0]))
    return lambda: simulate(orders, seconds), lambda: run_seconds(kept, seconds), lambda: naive_step_s(orders, seconds)


def rows_alone() -> None:
    with RUNS.open(newline="") as file:
        list(csv.DictReader(file))


def process_s(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(name: str, own: Callable[[], object], peer: Callable[[], object], rounds: int) -> None:
    """One line: medians of both, and of their ratio, after a first round that is left out."""
    found = [(process_s(own), process_s(peer)) for _ in range(rounds + 1)][1:]
    ours, theirs = (statistics.median(column) * 1e3 for column in zip(*found, strict=True))
    ratio = statistics.median(one / other for one, other in found)
    print(f"{name:42}{ours:9.1f}{theirs:9.1f}{ratio:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print(f"{'process time':42}{'ms':>9}{'peer ms':>9}{'ratio':>8}")
    first, again, naive = replays()
    measure("replay of 65,536 passes / naive replay", first, naive, rounds)
    measure("the same with other seconds", again, naive, rounds)
    measure("878 published runs / csv.DictReader", lambda: read_rows(RUNS), rows_alone, rounds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        ClusterSpec.preset("16384xh100").dump(path)
        parser_alone = YAML(typ="safe", pure=True)
        measure("cluster file / ruamel.yaml", lambda: ClusterSpec.load(path), lambda: parser_alone.load(path), rounds)


if __name__ == "__main__":
    main()
