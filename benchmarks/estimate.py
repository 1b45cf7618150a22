"""Seconds of one estimate of a captured model: `python benchmarks/estimate.py [PRESET] [CLUSTER]`.

Prints seconds of building and capturing on meta, and of the first estimate (labels, expressions, their functions). Then
it prints the median and largest process time of the next estimates. Degrees are tensor 8, pipeline 16, the rest
data-parallel.
"""

import logging
import statistics
import sys
import time

import autopar
from autopar.capture.request import Request
from autopar.ir.cluster import ClusterSpec
from autopar.models.load import resolve_model
from autopar.planning.degrees import resolve_degrees
from autopar.planning.fixed import capture_for

REPEATS = 9


def main(preset: str = "llama3-405b", cluster: str = "16384xh100") -> None:
    logging.disable(logging.WARNING)
    spec = ClusterSpec.parse(cluster)
    wish = {"tp": 8, "pp": 16, "zero": 1, "micro_batch": 1, "micro_batches": 16}
    degrees = resolve_degrees(wish, spec.num_devices)
    start = time.perf_counter()
    found = resolve_model(preset, seq_len=8192, batch=degrees.num_micro_batches, dtype="bfloat16")
    program = capture_for(Request.of(found.model, found.example_inputs), degrees)
    print(f"{preset}: built and captured in {time.perf_counter() - start:.1f} s")
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.process_time()
        made = autopar.estimate(program, spec, wish)
        seconds.append(time.process_time() - start)
    later = seconds[1:]
    median, most = statistics.median(later) * 1e3, max(later) * 1e3
    print(f"first estimate {seconds[0]:.2f} s; then {median:.1f} ms, at most {most:.1f}")
    print(f"{len(made.degrees['cuts']) + 1} stages, step {made.step_s:.2f} s, MFU {made.mfu:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
