"""Losses as people write them, under many plans over gloo ranks, against the unmodified model on the whole batch:

    python tools/losses.py [--only TEXT]

A cell is the worst error of loss and gradients over two batches, of which one has almost no token that counts. The
table is written into docs/losses.md, unless some losses were picked. The losses are in `tests/tiny/usual_losses.py`.
"""

import argparse
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "tiny"), str(ROOT / "tools")]  # ranks inherit it

TARGET = ROOT / "docs" / "losses.md"
TOLERANCE = 1e-9
PLANS: Mapping[str, dict[str, Any]] = {
    "dp 2": {"dp": 2, "zero": 1},
    "accumulate 2": {"dp": 2, "zero": 2, "accumulate": 2},
    "tp 2, accumulate 2": {"tp": 2, "accumulate": 2},
    "pp 2": {"pp": 2, "micro_batches": 2},
}
REFUSED = "refused"


def errors_on_rank(rank: int, name: str, plan: Mapping[str, Any]) -> float | str:
    """The worst error of one loss under one plan on this rank, or the text of the refusal."""
    from usual_losses import usual_batch, usual_model

    import autopar
    from autopar.errors import PlanError

    plain, model = usual_model(name), usual_model(name)
    dp, worst = int(plan.get("dp", 1)), 0.0
    example = {n: t.chunk(dp)[0] if t.dim() else t for n, t in usual_batch().items()}
    try:
        parallel = autopar.parallelize(model, "2xcpu", example_inputs=example, plan=dict(plan))
    except PlanError as error:
        return str(error)
    for is_sparse in (False, True):
        batch = usual_batch(is_sparse=is_sparse)
        parallel.zero_grad()
        plain.zero_grad()
        loss, expected = parallel.forward_backward(parallel.local_batch(batch)), plain(**batch)
        expected.backward()
        worst = max(worst, _error(loss, expected))
        for parameter, own in parallel.named_parameters():
            reference = plain.get_parameter(parameter).grad
            if own.grad is None or reference is None:
                continue
            found = own.grad
            worst = max(worst, _error(found.full_tensor() if hasattr(found, "full_tensor") else found, reference))
    return worst


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.detach().norm())
    difference = float((found - expected).detach().norm())
    return difference / scale if scale > 1e-12 else difference


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare usual losses under plans with the unmodified model.")
    parser.add_argument("--only", help="losses whose name has this text; the page is not written")
    options = parser.parse_args()
    from usual_losses import EQUAL
    from usual_losses import REFUSED as MIXING

    from autopar.errors import RankError
    from autopar.runtime.distributed.launch import Ranks

    rows: list[str] = []
    failed: list[str] = []
    names = [n for n in (*EQUAL, *MIXING) if options.only is None or options.only in n]
    started, world = time.monotonic(), Ranks(2)
    for number, name in enumerate(names, 1):
        cells: list[str] = []
        for plan in PLANS.values():
            try:
                results = world.run("losses:errors_on_rank", name, plan)
            except RankError as failure:
                results, world = [f"failed: {failure}"], Ranks(2)
            text = next((r for r in results if isinstance(r, str)), None)
            worst = max((r for r in results if isinstance(r, float)), default=0.0)
            cells.append(f"{worst:.0e}" if text is None else REFUSED if " change the loss" in text else text[:60])
            if (text is not None) != (name in MIXING and ("accumulate" in plan or "pp" in plan)) or worst > TOLERANCE:
                failed.append(f"{name} under {plan}: {text or worst}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(f"[{number}/{len(names)}] {rows[-1]}", flush=True)
    world.close()
    if options.only is None:
        head = f"| loss | {' | '.join(PLANS)} |\n|---{'|---' * len(PLANS)}|"
        text = TARGET.read_text()
        table = f"<!-- table -->\n{head}\n" + "\n".join(rows) + "\n<!-- end -->"
        TARGET.write_text(re.sub(r"<!-- table -->.*<!-- end -->", lambda _: table, text, flags=re.DOTALL))
    print(f"{len(names)} losses in {time.monotonic() - started:.0f} s")
    if failed:
        sys.exit("\n".join(["these are wrong:", *failed]))


if __name__ == "__main__":
    main()
