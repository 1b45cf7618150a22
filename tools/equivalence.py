"""Model families under many plans over gloo ranks against one device, in float64:

    python tools/equivalence.py [--family NAME] [--meshes] [--pipelines] [--mixtures] ...

A flag picks a table, and no flag picks all of them; `--fifth` picks single cells, as CI does. Each cell is the worst
error over loss, outputs, gradients, clip norm and weights after three AdamW steps. Each table is written into its
section of docs/equivalence.md, unless families or cells were picked. Worlds are reused; a rank that fails ends its
world, and the next cell starts another.
"""

import argparse
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from equivalence_plans import (
    CHUNK_PLANS,
    CONTEXT_FAMILIES,
    CONTEXT_PLANS,
    CONTEXT_WAY_FAMILIES,
    CONTEXT_WAYS,
    DENSE,
    EXPERT_PLANS,
    EXPERT_ROUTING_PLANS,
    MESHES,
    MIXTURE_PLANS,
    ODD_PLANS,
    OFFLOAD_PLANS,
    ONE_SEQUENCE_PLANS,
    PIPELINE_FAMILIES,
    PIPELINES,
    RECOMPUTATIONS,
    RECOMPUTED_FAMILIES,
    ROUTED,
    ROUTING_PLANS,
    Wish,
)
from fifths import FIFTHS, balanced, is_fifth

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "equivalence.md"
TOLERANCE = 1e-9
SPARSE = 4  # of so many cells of a row, and of a column, CI compares one
MADE_BY = "Written by `python tools/equivalence.py "
Cells = dict[str, set[tuple[str, str]]]  # families and plans of each table
Check = Callable[[Any, Sequence[Sequence[int]]], None]  # of a report, and of the rows of each expert in every product


def no_check(report: Any, loads: Sequence[Sequence[int]]) -> None:
    """The check of a table whose cells are compared and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of the page: families under plans."""

    heading: str  # of its section
    about: str
    families: tuple[str, ...]  # a module and a family: `zoo:llama`
    plans: Mapping[str, Wish]
    suffix: str = ""  # of every factory: the sizes and the routing
    micro_batch: int | None = None  # sequences of a micro-batch, instead of a number for all plans
    plans_are_rows: bool = False
    check: Check = no_check

    def spec(self, family: str, wish: Wish) -> str:
        """The factory of a cell."""
        if self.micro_batch is None:
            return f"{family}{self.suffix}"
        batch = self.micro_batch * wish.get("accumulate", 1) * wish.get("micro_batches", 1)
        return f"{family}_of_{batch}{self.suffix}"


def _recomputes(report: Any, loads: Sequence[Sequence[int]]) -> None:
    assert report.plan.degrees.recompute != "none", report.plan.degrees


def _has_empty_experts(report: Any, loads: Sequence[Sequence[int]]) -> None:
    assert loads and all(0 in load and sum(count > 0 for count in load) > 1 for load in loads), loads


def _has_one_expert(report: Any, loads: Sequence[Sequence[int]]) -> None:
    assert loads and all(sum(count > 0 for count in load) == 1 for load in loads), loads


def _has_one_sequence(report: Any, loads: Sequence[Sequence[int]]) -> None:
    assert report.plan.degrees.micro_batch == report.plan.batch == 1, report.plan.degrees


def _is_in_chunks(report: Any, loads: Sequence[Sequence[int]]) -> None:
    assert report.plan.degrees.loss_chunks > 1, report.plan.degrees
    assert not [note for note in report.plan.notes if "chunks" in note], report.plan.notes


def _is_offloaded(report: Any, loads: Sequence[Sequence[int]]) -> None:
    assert report.plan.degrees.offload != "none", report.plan.degrees


def _shares_sequences(report: Any, loads: Sequence[Sequence[int]]) -> None:
    assert report.plan.degrees.cp > 1, report.plan.degrees


def _splits_experts(report: Any, loads: Sequence[Sequence[int]]) -> None:
    assert report.plan.degrees.ep > 1, report.plan.degrees


def _leaves_experts_empty(report: Any, loads: Sequence[Sequence[int]]) -> None:
    _splits_experts(report, loads)
    _has_empty_experts(report, loads)


def _has_one_expert_of_many(report: Any, loads: Sequence[Sequence[int]]) -> None:
    _splits_experts(report, loads)
    _has_one_expert(report, loads)


def _experts(routed: tuple[str, ...], empty: str, one: str) -> dict[str, Table]:
    """The tables of expert parallelism."""
    few: Any = {"families": routed, "plans": EXPERT_ROUTING_PLANS, "plans_are_rows": True}
    return {
        "experts": Table(
            heading="Expert parallelism",
            about="plans whose ranks split experts",
            families=(*routed, "mixtures:llama4_text"),
            plans=EXPERT_PLANS,
            plans_are_rows=True,
            check=_splits_experts,
        ),
        "ranks-without-rows": Table(
            heading="Expert ranks without a row",
            about="expert ranks all of whose experts are empty",
            suffix=f"_{empty}",
            check=_leaves_experts_empty,
            **few,
        ),
        "one-rank-with-rows": Table(
            heading="All rows on one expert rank",
            about="expert ranks when all tokens choose the same expert",
            suffix=f"_{one}",
            check=_has_one_expert_of_many,
            **few,
        ),
        "odd-experts": Table(
            heading="Odd lengths on expert ranks",
            about="expert ranks with sequences and widths that degrees do not divide",
            suffix="_of_4_by_13",
            check=_splits_experts,
            **few,
        ),
    }


def _levers(dense: tuple[str, ...], routed: tuple[str, ...]) -> dict[str, Table]:
    """The tables of context parallelism, and of what trades time for memory."""
    return {
        "recomputation": Table(
            heading="Recomputation",
            about="selective and full recomputation",
            families=tuple(f"zoo:{f}" for f in RECOMPUTED_FAMILIES),
            plans=RECOMPUTATIONS,
            suffix="_of_12",
            plans_are_rows=True,
            check=_recomputes,
        ),
        "offload": Table(
            heading="Offload",
            about="plans that keep values in host memory",
            families=tuple(f"zoo:{f}" for f in ("llama", "gpt2", "phi3", "mixtral")),
            plans=OFFLOAD_PLANS,
            suffix="_of_12",
            plans_are_rows=True,
            check=_is_offloaded,
        ),
        "context": Table(
            heading="Context parallelism",
            about="plans whose ranks share each sequence",
            families=tuple(f"zoo:{f}" for f in CONTEXT_FAMILIES),
            plans=CONTEXT_PLANS,
            plans_are_rows=True,
            check=_shares_sequences,
        ),
        "context-ways": Table(
            heading="What attention sends",
            about="plans whose ranks share each sequence in a way that was asked for",
            families=tuple(f"zoo:{f}" for f in CONTEXT_WAY_FAMILIES),
            plans=CONTEXT_WAYS,
            plans_are_rows=True,
            check=_shares_sequences,
        ),
        "loss-in-chunks": Table(
            heading="Loss in chunks",
            about="logits and loss in chunks of tokens",
            families=(*dense, *routed[:2]),
            plans=CHUNK_PLANS,
            suffix="_of_6",
            check=_is_in_chunks,
        ),
    }


def tables() -> Mapping[str, Table]:
    """All tables, by their flags. Needs the folder of the families in `sys.path`."""
    import mixtures  # type: ignore[import-not-found]
    import zoo  # type: ignore[import-not-found]

    dense, routed = (tuple(f"zoo:{f}" for f in DENSE), tuple(f"mixtures:{f}" for f in ROUTED))
    return (
        {
            "meshes": Table(
                heading="Equivalence",
                about="every family on every mesh",
                families=tuple(f"zoo:{f}" for f in zoo.FAMILIES),
                plans=MESHES,
            ),
            "pipelines": Table(
                heading="Pipelines",
                about="plans with pipelines",
                families=tuple(f"zoo:{f}" for f in PIPELINE_FAMILIES),
                plans=PIPELINES,
                suffix="_of_12",
                plans_are_rows=True,
            ),
            "mixtures": Table(
                heading="Mixtures of experts",
                about="mixtures of experts",
                families=tuple(f"mixtures:{f}" for f in mixtures.FAMILIES),
                plans=MIXTURE_PLANS,
            ),
            "empty-experts": Table(
                heading="Empty experts",
                about="mixtures whose tokens leave experts without a row",
                families=routed,
                plans=ROUTING_PLANS,
                suffix=f"_{mixtures.EMPTY}",
                check=_has_empty_experts,
            ),
            "one-expert": Table(
                heading="All tokens to one expert",
                about="mixtures whose tokens all choose the same expert",
                families=routed,
                plans=ROUTING_PLANS,
                suffix=f"_{mixtures.ONE}",
                check=_has_one_expert,
            ),
            "odd-lengths": Table(
                heading="Odd lengths",
                about="sequences and widths that degrees do not divide",
                families=(*dense, *routed),
                plans=ODD_PLANS,
                suffix="_of_3_by_13",
            ),
            "one-sequence": Table(
                heading="One sequence",
                about="micro-batches of one sequence",
                families=(*dense, *routed),
                plans=ONE_SEQUENCE_PLANS,
                micro_batch=1,
                check=_has_one_sequence,
            ),
        }
        | _levers(dense, routed)
        | _experts(routed, mixtures.EMPTY, mixtures.ONE)
    )


def world_size(wish: Wish) -> int:
    """Ranks that a wish needs."""
    names = ("pp", "tp", "cp", "dp", "dp_shard", "dp_replicate")
    size: int = prod(wish.get(name, 1) for name in names) * prod(wish.get("cp_dims", ()))
    return size


class Worlds:
    """One world of ranks per size, started when first needed and again after a failure."""

    def __init__(self, is_checked: bool) -> None:
        self._open: dict[int, Any] = {}
        self._is_checked = is_checked

    def of(self, size: int) -> Any:
        """The world of `size` ranks."""
        from autopar.runtime.distributed.launch import Ranks

        if size not in self._open or not self._open[size].is_open:
            self._open[size] = Ranks(size, checked=self._is_checked)
        return self._open[size]

    def close(self) -> None:
        for world in self._open.values():
            world.close()


@contextlib.contextmanager
def worlds(is_checked: bool = True) -> Iterator[Worlds]:
    """Worlds that are gone afterwards. Checked ones compare collectives before they run, and take a third longer."""
    found = Worlds(is_checked)
    try:
        yield found
    finally:
        found.close()


@contextlib.contextmanager
def counted_rows() -> Iterator[list[list[int]]]:
    """The rows of each expert in every product that this process computes meanwhile: the steps on one device."""
    import torch
    from torch.overrides import TorchFunctionMode

    from autopar.rules.routed import PRODUCT

    found: list[list[int]] = []

    class Counter(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is PRODUCT and type(args[2]) is torch.Tensor and not args[2].is_meta:  # else nothing is computed
                found.append(torch.bincount(args[2], minlength=args[1].shape[0]).tolist())
            return func(*args, **(kwargs or {}))

    with Counter():
        yield found


def worst_error(model: str, wish: Wish, open_worlds: Worlds, check: Check = no_check) -> float:
    """The worst error of a factory under a wish. A name without a module is one of the zoo.

    Sequence parallelism is left out for a model without a sequence. Raises `AutoparError` if the plan is refused or a
    rank fails, and `AssertionError` if the run is not what the `check` of its table asks for.
    """
    from autopar.commands.verify import verify
    from autopar.errors import PlanError

    size = world_size(wish)
    spec = model if ":" in model else f"zoo:{model}"
    try:
        with counted_rows() as loads:
            report = verify(spec, world_size=size, degrees=wish, ranks=open_worlds.of(size))
    except PlanError as error:
        has_none = any(words in str(error) for words in ("no input has a sequence", "at another length"))
        if not has_none or "sequence_parallel" not in wish:
            raise
        without = {name: value for name, value in wish.items() if name != "sequence_parallel"}
        return worst_error(model, without, open_worlds, check)
    # the comparison with the unmodified model is of float32 and has a tolerance of its own
    captured = [q for q in report.quantities if q.name.startswith("captured")]
    assert all(q.passed for q in captured), (model, captured)
    check(report, loads)
    return max(float(q.scaled_error) for q in report.quantities if q not in captured)


def cell(spec: str, wish: Wish, open_worlds: Worlds, check: Check = no_check) -> tuple[str, bool]:
    """The text of a cell, and whether it is a failure."""
    from autopar.errors import AutoparError, PlanError

    try:
        error = worst_error(spec, wish, open_worlds, check)
    except PlanError as refusal:
        return f"refused: {_reason(str(refusal))}", False
    except (AutoparError, AssertionError) as failure:
        return f"FAILED: {_reason(str(failure))}", True
    return (f"{error:.1e}", False) if error <= TOLERANCE else (f"DIFFERS: {error:.1e}", True)


def _reason(message: str) -> str:
    """The problem of a message as one cell, without the remedies behind it."""
    return " ".join(message.split()).partition("; ")[0][:200].replace("|", "/")


def cells_of_fifth(every: Mapping[str, Table], commit: str, halves: Container[int] = (0, 1)) -> Cells:
    """Families and plans of each table that CI compares for a commit, in two processes.

    The square of a table has each of its families and plans. A family is in one fifth, where it is captured once.
    """
    square = {
        flag: [(f, p) for i, f in enumerate(one.families) for j, p in enumerate(one.plans) if (i + j) % SPARSE == 0]
        for flag, one in every.items()
    }
    count = Counter(family for cells in square.values() for family, _ in cells)
    tenths = balanced(count, 2 * FIFTHS)
    return {
        flag: {(f, p) for f, p in cells if is_fifth(tenths[f], commit) and tenths[f] // FIFTHS in halves}
        for flag, cells in square.items()
    }


def rows_of(
    table: Table, say: Callable[[str], None], picked: Collection[tuple[str, str]] | None = None
) -> tuple[list[str], int]:
    """The rows of a table in Markdown, and how many cells failed. Cells that are not `picked` stay empty."""
    names = {family: family.partition(":")[2] for family in table.families}
    first, columns = ("plan", list(names.values())) if table.plans_are_rows else ("family", list(table.plans))
    rows = [f"| {first} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    failures = 0
    with worlds(is_checked=picked is None) as open_worlds:
        for label, cells in _cells_by_row(table, names):
            started, texts = time.monotonic(), []
            for family, plan in cells:
                text, failed, wish = "", False, table.plans[plan]
                if picked is None or (family, plan) in picked:
                    text, failed = cell(table.spec(family, wish), wish, open_worlds, table.check)
                failures += failed
                texts.append(text)
            if not any(texts):
                continue
            rows.append(f"| {label} | {' | '.join(texts)} |")
            say(f"{rows[-1]} {time.monotonic() - started:.0f} s")
    return rows, failures


def _cells_by_row(table: Table, names: Mapping[str, str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    if table.plans_are_rows:
        yield from ((plan, [(family, plan) for family in names]) for plan in table.plans)
    else:
        yield from ((name, [(family, plan) for plan in table.plans]) for family, name in names.items())


def with_table(page: str, heading: str, rows: Sequence[str], source: str) -> str:
    """The page with a new table in the section of a heading, and with the table's source below it."""
    lines = page.split("\n")
    try:
        section = next(i for i, line in enumerate(lines) if line.lstrip("#") == f" {heading}")
        begin = next(i for i in range(section, len(lines)) if lines[i].startswith("|"))
    except StopIteration:
        raise ValueError(f"{TARGET.name} needs the heading {heading!r} and a table below it") from None
    end = next(i for i in range(begin, len(lines)) if not lines[i].startswith("|"))
    old = end + 1 if lines[end + 1 : end + 2] and lines[end + 1].startswith(MADE_BY) else None
    rest = lines[old + 1 :] if old is not None else lines[end:]
    return "\n".join([*lines[:begin], *rows, "", source, *rest])


def main(arguments: Sequence[str] | None = None) -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "families")]
    sys.path.append(str(ROOT / "tests" / "tiny"))
    from kept_captures import FOLDER, keeping  # type: ignore[import-not-found]

    every = tables()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", help="only this one, printed and not written; may be repeated")
    parser.add_argument("--fifth", metavar="COMMIT", help="the cells that the hash of this commit chooses, printed")
    parser.add_argument("--half", action="append", type=int, choices=(0, 1), help="one half of these cells")
    for flag, table in every.items():
        parser.add_argument(f"--{flag}", action="append_const", const=flag, dest="tables", help=table.about)
    options = parser.parse_args(arguments)
    os.environ.setdefault(FOLDER, str(Path.home() / ".cache" / "autopar-tests"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_LOGS", "-dtensor")
    import torch

    count = failures = 0
    for flag in options.tables or every:
        table = every[flag]
        if options.family:
            table = replace(table, families=tuple(f for f in table.families if f.partition(":")[2] in options.family))
        picked = cells_of_fifth(every, options.fifth, options.half or (0, 1))[flag] if options.fifth else None
        with keeping() if options.fifth else contextlib.nullcontext():
            rows, failed = rows_of(table, partial(print, flush=True), picked)
        count += len(table.families) * len(table.plans) if picked is None else len(picked)
        failures += failed
        if not options.family and not options.fifth:
            made = f"{MADE_BY}--{flag}`, torch {torch.__version__} on CPU, {time.strftime('%-d %B %Y')}."
            page = TARGET.read_text(encoding="utf-8")
            TARGET.write_text(with_table(page, table.heading, rows, made), encoding="utf-8")
    print(f"{failures} of {count} cells failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
