"""The gain of recomputation by stage if memory is tight: `python benchmarks/by_stage.py [WORD ...]`.

Every case, or every case whose line holds all words, has three times of a step:

- the best candidate: one number of recomputed blocks for all stages, and the cut with the fastest slowest stage;
- the search's plan, with its own number for every stage;
- the peer, an enumeration: every candidate that screening estimates at most `FAR` above the best one, with its own
  number for every stage. Candidates of all labelled tensor degrees count.
"""

import sys
import time

import numpy as np
from search_problem import Problem

from autopar.ir.cluster import ClusterSpec
from autopar.search.driver.search import SearchState, search_degrees
from autopar.search.pricing.exact import BY_STAGE

FAR = 0.07
GROUP = 64  # candidates that are priced together
CASES = (
    ("llama3-70b", 4096, "64xa100-40gb", 512),
    ("llama3-70b", 8192, "64xa100-80gb", 512),
    ("gpt3-175b", 2048, "128xa100-40gb", 1024),
    ("gpt3-175b", 2048, "128xa100-80gb", 1024),
    ("llama3-8b", 8192, "16xrtx4090", 128),
)


def enumerated(found: SearchState) -> tuple[float, int]:
    """The best value of candidates with recomputation by stage, and the number of candidates."""
    screened, candidates = found.screened, found.candidates
    mine = np.isin(candidates.tp, found.labelled) & (screened.level > 0) & (candidates.pp > 1)
    best = np.inf if found.proof.best is None else found.proof.best.value
    near = np.flatnonzero(mine & (screened.by_stage_seconds * (1 - FAR) < best)).tolist()
    for at in range(0, len(near), GROUP):
        found.together.price([(index, BY_STAGE) for index in near[at : at + GROUP]])
    every = [found.together.priced(index, BY_STAGE) for index in near]
    return min((one.seconds for one in every if one.fits), default=np.inf), len(near)


def main(*words: str) -> None:
    print(
        "| model | tokens | devices | batch | best candidate | own stages | gain | recomputed blocks | all | of | s |"
    )
    print("|" + " --- |" * 11)
    for model, sequence, cluster, batch in CASES:
        line = f"| {model} | {sequence:,} | {cluster} | {batch:,} |"
        if not all(word in line for word in words):
            continue
        problem = Problem(model=model, cluster=cluster, sequence=sequence, global_batch=batch)
        start = time.perf_counter()
        found = search_degrees(
            problem.works,
            ClusterSpec.preset(cluster),
            problem.constraints.narrowed({}),
            problem.on,
            most_exact=400,
            trials=80,
        )
        taken, best = time.perf_counter() - start, found.best
        if best is None or found.proof.best is None:
            print(f"{line} nothing fits |", flush=True)
            continue
        even, (least, count) = found.proof.best.value, enumerated(found)
        again = best.degrees.recompute_blocks
        print(
            f"{line} {even:.2f} | {best.seconds:.2f} | {1 - best.seconds / even:.1%} | {again} | {least:.2f} | "
            f"{count} | {taken:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
