"""Every plan of tests/integration/test_priced_is_run.py, priced and run on four gloo ranks:

    python tools/priced_is_run.py

Writes the table of docs/priced_is_run.md, and fails if a rank sent other bytes than the priced ones.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "priced_is_run.md"
TESTS = ROOT / "tests"
BEGIN, END = "<!-- written by tools/priced_is_run.py -->\n", "<!-- end -->\n"
KIB = 1024


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for folder in (TESTS / "tiny", TESTS / "integration", TESTS / "integration" / "ranks", ROOT):
        sys.path.insert(0, str(folder))
    from autopar.runtime.distributed.launch import Ranks

    models = import_module("priced_models")

    rows, failed = [], 0
    with Ranks(models.RANKS, timeout_s=300) as world:
        for one in models.CASES:
            cells, is_equal = row_of(one, world)
            rows.append(cells)
            failed += not is_equal
            print(" | ".join(cells), flush=True)
    text = TARGET.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    TARGET.write_text(text[:begin] + table(rows) + text[end:])
    return 1 if failed else 0


def row_of(one: Any, world: Any) -> tuple[list[str], bool]:
    """Cells of one plan, and whether every rank sent the priced bytes."""
    sends_of = import_module("step_traffic").sends_of

    from autopar.runtime.dry_run.memory import memory_of
    from autopar.runtime.dry_run.rank_view import rank_view

    tests = import_module("test_priced_is_run")
    program, plan = import_module("priced_models").planned_case(one)
    known = dict[object, object]()
    equal, worst, calls, size, saved = True, 0.0, 0, 0, (0, 0)
    for rank, (counts, memory) in enumerate(world.run("priced_ranks:measured_step", one, plan)):
        setting = rank_view(program, plan, rank)
        runs = tests.runs_of(setting, known)
        equal &= counts == tests.as_operators(sends_of(setting, runs))
        held = memory_of(setting, runs)
        own = (held.parameter_bytes, held.gradient_bytes, held.optimizer_bytes, held.saved_bytes)
        names = ("parameters", "gradients", "optimizer", "saved")
        worst = max(worst, *(abs(p - memory[n]) / max(1, memory[n]) for p, n in zip(own, names, strict=True)))
        calls, size = calls + sum(c for c, _ in counts.values()), size + sum(b for _, b in counts.values())
        saved = max(saved, (memory["saved"], held.saved_bytes))
    cells = [one.name, f"{calls}", f"{size / KIB:.1f}", "yes" if equal else "NO", f"{saved[0]:,}", f"{saved[1]:,}"]
    return [*cells, f"{100 * worst:.3f} %"], equal


def table(rows: Sequence[Sequence[str]]) -> str:
    head = ["plan", "calls", "KiB put in", "equal", "saved, run", "saved, priced", "largest difference"]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    sys.exit(main())
