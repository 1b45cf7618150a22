"""Share of FLOP split under tp for every preset at its published size: python benchmarks/coverage.py [MODEL ...]

Models are built on meta and captured once each, at micro-batch 2 and the context length (at most 4096), or `--seq-len`.
What is refused says why; what stays whole is named with its share of the FLOP.
"""

import argparse
import os
import time
from collections.abc import Sequence

DEGREES = (4, 8)
AIM = 0.95
MAX_NAMED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="presets (default: all)")
    parser.add_argument("--seq-len", type=int, default=None)
    options = parser.parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from autopar.presets.models import model_presets

    print(f"| model | {' | '.join(f'tp={degree}' for degree in DEGREES)} | whole at tp={DEGREES[-1]} | s |")
    print("|---" * (len(DEGREES) + 3) + "|")
    missed = 0
    for name in options.models or model_presets():
        started = time.monotonic()
        shares, whole = shares_of(name, options.seq_len)
        missed += any(share is None or share < AIM for share in shares)
        cells = ["refused" if share is None else f"{share:.1%}" for share in shares]
        print(f"| {name} | {' | '.join(cells)} | {whole} | {time.monotonic() - started:.0f} |", flush=True)
    print(f"\n{missed} models below {AIM:.0%}")
    return 0


def shares_of(name: str, seq_len: int | None) -> tuple[list[float | None], str]:
    """Split shares of FLOP per degree, None where there is no plan, and what is whole at the last degree."""
    from autopar.cost_model.coverage import coverage
    from autopar.errors import AutoparError
    from autopar.ir.cluster import ClusterSpec
    from autopar.ir.plan import Degrees
    from autopar.models import resolve_model
    from autopar.search.labels import label
    from autopar.trace.analysis import analyse
    from autopar.trace.trace import trace

    try:
        found = resolve_model(name, seq_len=seq_len)
        program = trace(found.model, found.example_inputs)
    except AutoparError as error:
        return [None] * len(DEGREES), _short(error)
    shares: list[float | None] = []
    whole = ""
    for degree in DEGREES:
        degrees, cluster = Degrees(tp=degree), ClusterSpec.preset(f"{degree}xh100")
        try:
            analysis = analyse(program, degrees.mesh)
            covered = coverage(program, analysis, label(program, analysis, degrees, cluster).blocks, degrees, cluster)
        except AutoparError as error:
            shares.append(None)
            whole = _short(error)
            continue
        shares.append(covered.split_flops("tp"))
        total = sum(operator.flops for operator in covered.operators)
        left = sorted((w for w in covered.whole if w.flops), key=lambda w: -w.flops)[:MAX_NAMED]
        whole = ", ".join(f"{w.operator} in {w.where} {w.flops / total:.1%}" for w in left)
    return shares, whole


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160].replace("|", "/")


if __name__ == "__main__":
    raise SystemExit(main())
