"""Every family on every mesh, six of them in pipelines, and mixtures of experts, over gloo ranks against one device:

    python tools/equivalence.py [--family NAME] [--pipelines] [--mixtures]

All are in float64.

Writes docs/equivalence.md unless families were picked. Each cell is the worst error over loss, outputs, gradients, clip
norm and weights after AdamW. Worlds are reused; a rank that fails ends its world, and the next cell starts another.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "equivalence.md"
TOLERANCE = 1e-9
MESHES: Mapping[str, Mapping[str, Any]] = {
    "tp=2": {"tp": 2},
    "tp=4": {"tp": 4},
    "tp=2 × dp=2, ZeRO 3, sequence": {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
    "dp_replicate=2 × dp_shard=2": {"dp_replicate": 2, "dp_shard": 2},
    "dp=2, accumulate 3": {"dp": 2, "accumulate": 3},
}

# At least four blocks with parameters, two stages of a rank, six micro-batches: legal for every schedule.
PIPELINE_FAMILIES = ("llama", "gpt2", "bert", "t5", "vit", "mixtral")
PIPELINE_BATCH = 12
PIPELINES: Mapping[str, Mapping[str, Any]] = {
    "pp=2": {"pp": 2, "micro_batches": 3},
    "pp=4": {"pp": 4, "micro_batches": 3},
    "pp=2, gpipe": {"pp": 2, "schedule": "gpipe", "micro_batches": 6},
    "pp=2, interleaved-1f1b": {"pp": 2, "schedule": "interleaved-1f1b", "micro_batches": 6},
    "pp=2, interleaved-zero-bubble": {
        "pp": 2,
        "schedule": "interleaved-zero-bubble",
        "virtual_stages": 2,
        "micro_batches": 6,
    },
    "pp=2, zbv-zero-bubble": {"pp": 2, "schedule": "zbv-zero-bubble", "micro_batches": 6},
    "pp=2, dualpipev": {"pp": 2, "schedule": "dualpipev", "micro_batches": 6},
    "pp=2, 3 micro-batches twice": {"pp": 2, "micro_batches": 3, "accumulate": 2},
    "tp=2 × pp=2": {"tp": 2, "pp": 2, "micro_batches": 3},
    "pp=2 × dp=2, ZeRO 1": {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 3},
    "pp=2 × dp=2, ZeRO 2": {"pp": 2, "dp": 2, "zero": 2, "micro_batches": 3},
    "pp=2 × dp=2, ZeRO 3": {"pp": 2, "dp": 2, "zero": 3, "micro_batches": 3},
    "tp=2 × pp=2 × dp=2, ZeRO 3, sequence, recompute": {
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "zero": 3,
        "sequence_parallel": True,
        "recompute": "full",
        "micro_batches": 2,
    },
}

# Of mixtures of experts. A data-parallel rank has 4 sequences.
MIXTURE_PLANS: Mapping[str, Mapping[str, Any]] = {
    "tp=2": {"tp": 2},
    "tp=4": {"tp": 4},
    "dp=4, ZeRO 3": {"dp": 4, "zero": 3},
    "tp=2 × dp=2": {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
    "pp=2 × dp=2": {"pp": 2, "dp": 2, "micro_batches": 2},
    "dp=2, accumulate 2, ZeRO 3": {"dp": 2, "accumulate": 2, "zero": 3},
    "dp=2, recompute": {"dp": 2, "recompute": "full"},
}


def world_size(wish: Mapping[str, Any]) -> int:
    """Ranks that a wish needs."""
    size: int = (
        wish.get("pp", 1) * wish.get("tp", 1) * wish.get("dp", wish.get("dp_shard", 1)) * wish.get("dp_replicate", 1)
    )
    return size


class Worlds:
    """One world of ranks per size, started when first needed and again after a failure."""

    def __init__(self) -> None:
        self._open: dict[int, Any] = {}

    def of(self, size: int) -> Any:
        """The world of `size` ranks."""
        from autopar.runtime.distributed.launch import Ranks

        if size not in self._open or not self._open[size].is_open:
            self._open[size] = Ranks(size)
        return self._open[size]

    def close(self) -> None:
        for world in self._open.values():
            world.close()


@contextlib.contextmanager
def worlds() -> Iterator[Worlds]:
    """Worlds that are gone afterwards."""
    found = Worlds()
    try:
        yield found
    finally:
        found.close()


def worst_error(model: str, wish: Mapping[str, Any], open_worlds: Worlds) -> float:
    """The worst error of a factory under a wish. A name without a module is one of the zoo.

    Sequence parallelism is left out for a model without a sequence. Raises `AutoparError` if the plan is refused or a
    rank fails.
    """
    from autopar.commands.verify import verify
    from autopar.errors import PlanError

    size = world_size(wish)
    try:
        report = verify(
            model if ":" in model else f"zoo:{model}", world_size=size, degrees=wish, ranks=open_worlds.of(size)
        )
    except PlanError as error:
        if "no input has a sequence" not in str(error):
            raise
        without = {name: value for name, value in wish.items() if name != "sequence_parallel"}
        return worst_error(model, without, open_worlds)
    # the comparison with the unmodified model is of float32 and has a tolerance of its own
    captured = [q for q in report.quantities if q.name.startswith("captured")]
    assert all(q.passed for q in captured), (model, captured)
    return max(float(q.scaled_error) for q in report.quantities if q not in captured)


def cell(model: str, wish: Mapping[str, Any], open_worlds: Worlds) -> tuple[str, bool]:
    """The text of a cell, and whether it is a failure."""
    from autopar.errors import AutoparError, PlanError

    try:
        error = worst_error(model, wish, open_worlds)
    except PlanError as refusal:
        return f"refused: {_reason(str(refusal))}", False
    except (AutoparError, AssertionError) as failure:
        return f"FAILED: {_reason(str(failure))}", True
    return (f"{error:.1e}", False) if error <= TOLERANCE else (f"DIFFERS: {error:.1e}", True)


def _reason(message: str) -> str:
    """The problem of a message as one cell, without the remedies behind it."""
    return " ".join(message.split()).partition("; ")[0][:200].replace("|", "/")


def table(
    families: Sequence[str],
    say: Callable[[str], None],
    plans: Mapping[str, Mapping[str, Any]] = MESHES,
    module: str = "zoo",
) -> tuple[list[str], int]:
    """Rows in Markdown, and how many cells failed."""
    rows = [f"| family | {' | '.join(plans)} |", "|---" * (len(plans) + 1) + "|"]
    failures = 0
    with worlds() as open_worlds:
        for family in families:
            started, texts = time.monotonic(), []
            for wish in plans.values():
                text, failed = cell(f"{module}:{family}", wish, open_worlds)
                failures += failed
                texts.append(text)
            rows.append(f"| {family} | {' | '.join(texts)} |")
            say(f"{rows[-1]} {time.monotonic() - started:.0f} s")
    return rows, failures


def pipeline_table(families: Sequence[str], say: Callable[[str], None]) -> tuple[list[str], int]:
    """Rows of plans with pipelines, a column for each family, and how many cells failed."""
    rows = [f"| plan | {' | '.join(families)} |", "|---" * (len(families) + 1) + "|"]
    failures = 0
    with worlds() as open_worlds:
        for name, wish in PIPELINES.items():
            started, texts = time.monotonic(), []
            for family in families:
                text, failed = cell(f"{family}_of_{PIPELINE_BATCH}", wish, open_worlds)
                failures += failed
                texts.append(text)
            rows.append(f"| {name} | {' | '.join(texts)} |")
            say(f"{rows[-1]} {time.monotonic() - started:.0f} s")
    return rows, failures


PAGE = """# Equivalence

`autopar verify MODEL --world-size 4 --tp 2 --dp 2` makes such a comparison for your model. Here are all families of
the tests.

Each family runs three AdamW steps in float64, with random weights, on gloo ranks and on one device. A cell is the
worst error of loss, outputs, gradients, clip norm and weights, by the measure of [semantics](semantics.md). The
tolerance is {tolerance:.0e}. The models are presets shrunk to two layers, and plain torch networks
(`tests/families`). Errors near 1e-10 belong to the biases of attention keys: their gradients are zero except for
rounding. A refusal is the message that a user gets.

{rows}

## Pipelines

The same for plans with stages. A data-parallel rank has {batch} sequences. The schedule is `1f1b` if no other is
named. `tests/integration/test_pipelines.py` and `test_pipeline_checkpoints.py` compare uneven cuts, short batches,
checkpoints and evaluation in stages, and tied, frozen, unused and empty parameters.

{pipelines}

## Mixtures of experts

Experts by sorted tokens, as [experts](experts.md) describes. A data-parallel rank has 4 sequences. `llama4_text`
computes every expert for every token.

{mixtures}

Written by `make verify-all` (`python tools/equivalence.py`), torch {torch} on CPU, {day}.
"""


def document(rows: Sequence[str], pipelines: Sequence[str], mixtures: Sequence[str]) -> str:
    """The page."""
    import torch

    day = time.strftime("%-d %B %Y")
    return PAGE.format(
        tolerance=TOLERANCE,
        rows="\n".join(rows),
        pipelines="\n".join(pipelines),
        mixtures="\n".join(mixtures),
        batch=PIPELINE_BATCH,
        torch=torch.__version__,
        day=day,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", help="only this one, printed and not written; may be repeated")
    parser.add_argument("--pipelines", action="store_true", help="only the plans with pipelines, printed")
    parser.add_argument("--mixtures", action="store_true", help="only the mixtures of experts, printed")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_LOGS", "-dtensor")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "families")]
    import mixtures  # type: ignore[import-not-found]
    import zoo  # type: ignore[import-not-found]

    def say(text: str) -> None:
        print(text, flush=True)

    wanted = options.family or list(zoo.FAMILIES)
    routed = [family for family in mixtures.FAMILIES if not options.family or family in options.family]
    everything = not options.family and not options.pipelines and not options.mixtures
    meshes = [family for family in wanted if family in zoo.FAMILIES and not options.mixtures]
    rows, failures = table(meshes, say) if meshes and not options.pipelines else ([], 0)
    staged = [family for family in PIPELINE_FAMILIES if family in meshes]
    pipelines, more = pipeline_table(staged, say) if staged else ([], 0)
    by_experts, others = ([], 0) if options.pipelines else table(routed, say, MIXTURE_PLANS, "mixtures")
    if everything:
        TARGET.write_text(document(rows, pipelines, by_experts), encoding="utf-8")
    count = max(0, len(rows) - 2) * len(MESHES) + len(staged) * len(PIPELINES)
    count += max(0, len(by_experts) - 2) * len(MIXTURE_PLANS)
    failed = failures + more + others
    print(f"{failed} of {count} cells failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
