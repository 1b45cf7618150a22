"""Share of FLOP split under tp for every preset at its published size: python benchmarks/coverage.py [MODEL ...]

Models are built on meta and captured once each, at micro-batch 2 and the context length (at most 4096), or `--seq-len`.
A refused model is listed with the reason, and a whole operator with its share of the FLOP. `--markdown` prints
docs/coverage.md.
"""

import argparse
import datetime
import os
import time
from collections.abc import Sequence
from pathlib import Path

DEGREES = (4, 8)
AIM = 0.95
MAX_NAMED = 3
NOTABLE = 5e-4
DOCS = Path(__file__).parents[1] / "docs" / "coverage.md"
MARK = "<!-- census -->"  # of tools/operator_census.py
PAGE = """# What tensor parallelism splits

`autopar coverage MODEL --tp N` prints the share of the work that `tp` splits, and every operator behind it. This
table has the share for every preset at its published size: all layers, two sequences of the context length (at most
{longest:,} tokens), captured on meta.

The share is of the FLOP in matrix products, attention and convolutions. An operator counts with `(1 - work of one
rank / work of the operator) / (1 - 1/tp)`: 1 if every rank does its tp-th part, 0 if every rank does everything.
Padding counts as work. If heads do not divide, `tp` is the product of two mesh dimensions, shown behind the share
([labelling](labelling.md)). At 4 × 2 an operator that only the first one splits counts as 0.86.

Written by `python benchmarks/coverage.py --markdown` on {date} with torch {torch} and transformers {transformers}.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="presets (default: all)")
    parser.add_argument("--seq-len", type=int, default=None)
    parser.add_argument("--layers", type=int, default=None, help="fewer layers, for a quick look")
    parser.add_argument("--markdown", action="store_true", help="print a page, without the time that it took")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from autopar.presets.models import model_presets

    if options.markdown:
        print(_page())
    columns = ["model", *(f"tp={degree}" for degree in DEGREES), f"not or partly split at tp={DEGREES[-1]}"]
    columns += [] if options.markdown else ["s"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    missed = []
    for name in options.models or model_presets():
        started = time.monotonic()
        cells, reached = cells_of(name, options.seq_len, options.layers)
        if not reached:
            missed.append(name)
        cells = [name, *cells, *([] if options.markdown else [f"{time.monotonic() - started:.0f}"])]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nBelow {AIM:.0%}: {', '.join(missed) or 'none'}.")
    if options.markdown:
        print(kept_section(DOCS.read_text(encoding="utf-8")), end="")
    return 0


def kept_section(page: str) -> str:
    """The part of the page that another tool writes: from the heading before its mark to the end. Empty without it."""
    before, mark, _ = page.partition(MARK)
    return page[before.rindex("\n## ") :] if mark else ""


def cells_of(name: str, seq_len: int | None, layers: int | None) -> tuple[list[str], bool]:
    """The share per degree, the operators that stay whole at the last degree, and whether every share reaches `AIM`."""
    from autopar.capture.program import capture_program
    from autopar.cost_model.work.coverage import coverage
    from autopar.errors import AutoparError
    from autopar.ir.cluster import ClusterSpec
    from autopar.ir.degrees import Degrees
    from autopar.models.load import resolve_model
    from autopar.planning.fixed import choose_labels

    try:
        found = resolve_model(name, seq_len=seq_len, layers=layers)
        program = capture_program(found.model, found.example_inputs)
    except AutoparError as error:
        return ["refused"] * len(DEGREES) + [_short(error)], False
    cells, left, reached = [], "", True
    for degree in DEGREES:
        cluster = ClusterSpec.preset(f"{degree}xh100")
        try:
            degrees, analysis, labelled = choose_labels(program, cluster, Degrees(tp=degree))
        except AutoparError as error:
            cells.append("refused")
            left, reached = _short(error), False
            continue
        covered = coverage(program, analysis, labelled.blocks, degrees, cluster)
        share = covered.split_flops("tp")
        cells.append(f"{share:.1%}" + (f" ({' × '.join(map(str, degrees.tp_dims))})" if degrees.tp_dims else ""))
        reached = reached and share >= AIM
        total = sum(operator.flops for operator in covered.operators)
        whole = sorted((w for w in covered.whole if w.flops >= NOTABLE * total), key=lambda w: -w.flops)[:MAX_NAMED]
        left = ", ".join(f"`{w.operator}` in `{w.where}` on {w.mesh_dim} ({w.flops / total:.1%})" for w in whole)
    return [*cells, left], reached


def _page() -> str:
    import torch
    import transformers

    from autopar.models.example_inputs import MAX_DEFAULT_SEQ_LEN

    date = datetime.datetime.now(tz=datetime.UTC).date()
    return PAGE.format(
        longest=MAX_DEFAULT_SEQ_LEN,
        date=date,
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
    )


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160].replace("|", "/")


if __name__ == "__main__":
    raise SystemExit(main())
