"""Seconds and memory of capture, analysis and labelling over the number of layers: python benchmarks/capture.py

Each row runs in a process of its own, so that its peak memory is its own. Analysis and labelling follow the number of
distinct blocks; capture follows the number of layers, because `torch.export` traces every one.
"""

import argparse
import resource
import subprocess
import sys
import time


def measure(preset: str, tp: int) -> None:
    """Print one row: layers, distinct blocks, seconds of each phase, peak memory of the process."""
    from autopar.capture.analysis import analyse
    from autopar.capture.request import Request
    from autopar.ir.cluster import ClusterSpec
    from autopar.ir.degrees import Degrees
    from autopar.models.load import resolve_model
    from autopar.planning.fixed import capture_for
    from autopar.search.labels.solve import label

    model = resolve_model(preset)
    degrees = Degrees(tp=tp, micro_batch=2)
    start = time.perf_counter()
    program = capture_for(Request.of(model.model, model.example_inputs), degrees)
    captured = time.perf_counter()
    analysis = analyse(program, degrees.mesh)
    analysed = time.perf_counter()
    found = label(program, analysis, degrees, ClusterSpec.preset(f"{tp}xh100"))
    labelled = time.perf_counter()
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    layers = (model.config or {}).get("num_hidden_layers") or (model.config or {}).get("n_layer")
    print(
        f"{preset:14s} {layers:>6} {len(found.blocks):>6} {captured - start:>9.2f} {analysed - captured:>10.3f} "
        f"{labelled - analysed:>11.3f} {peak_gb:>8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="*", default=["llama3-8b", "llama3-70b", "llama3-405b"])
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--row", action="store_true", help="measure in this process")
    arguments = parser.parse_args()
    if arguments.row:
        measure(arguments.presets[0], arguments.tp)
        return
    columns = ("layers", 6), ("blocks", 6), ("capture s", 9), ("analysis s", 10), ("labelling s", 11), ("peak GB", 8)
    print(f"{'model':14s}", *(f"{name:>{width}}" for name, width in columns))
    for preset in arguments.presets:
        sys.stdout.flush()
        subprocess.run([sys.executable, __file__, preset, "--row", "--tp", str(arguments.tp)], check=True)


if __name__ == "__main__":
    main()
