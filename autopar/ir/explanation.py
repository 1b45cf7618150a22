"""What a plan says about itself: its summary, and the sections that print it, here and as tables of commands.

The counts and names of a `Summary` are written into the plan when it is made, and decide nothing. A plan without a
summary, written by hand, runs too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autopar.ir.degrees import Degrees
from autopar.ir.offload import HELD, NO_OFFLOAD
from autopar.ir.rank_order import ORDERS
from autopar.ir.schedules.registry import actions
from autopar.ir.sharding import Mesh
from autopar.words.numbers import readable_bytes, readable_seconds

_VERBS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
_VERBS |= {"all_to_all": "all-to-all", "exchange": "exchange", "shift": "shift"}


# ---- the summary ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The figures of a plan's `Estimate` that a run is compared with. MFU is a part of 1."""

    step_s: float
    step_interval_s: tuple[float, float]
    samples_per_s: float
    tokens_per_s: float | None  # None for a model without a sequence dimension
    mfu: float
    peak_bytes: float
    peak_interval_bytes: tuple[float, float]
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind on one mesh dimension in one pass of a block's call, with the bytes that a rank sends."""

    mesh_dim: str
    when: str  # "forward" or "backward"
    collective: str
    count: int
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveSummary:
    """Selective recomputation of one call of a block for a micro-batch, on one rank."""

    num_operators: int
    saved_bytes: float  # for the backward pass, without recomputation
    saved_selectively: float
    flops: float  # of the block, forward and backward
    more_flops: float  # of the recomputed operators

    @property
    def freed(self) -> float:
        """The freed part of the saved bytes."""
        return 1 - self.saved_selectively / self.saved_bytes if self.saved_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSummary:
    """A distinct block: its number of calls, its collectives per call, the types of its results, its recomputation."""

    name: str
    num_calls: int
    num_operators: int
    traffic: tuple[Traffic, ...]
    results: tuple[str, ...]
    selective: SelectiveSummary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSummary:
    """Parameters with the same split: a name with ``*`` for layer numbers, their number, the split per dimension."""

    name: str
    num_copies: int
    shape: tuple[int, ...]
    split: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutRule:
    """An operator that has no rule for its call. Every rank computes it whole."""

    operator: str
    where: str
    num_calls: int
    seconds: float  # of one rank in a step, forward and backward
    kept_bytes: int  # saved by one rank for the backward pass of a micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """A pipeline stage."""

    rank: int
    first: str  # its first block call
    last: str
    num_calls: int
    seconds: float  # of one rank and micro-batch, forward and backward
    num_parameters: int
    sent_bytes: int  # to the next stage, by one rank for a micro-batch
    recomputed: tuple[str, ...]  # values of earlier stages that this stage computes again


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything that `Plan.explain` says beyond the plan itself."""

    without_rule: tuple[WithoutRule, ...]
    parameters: tuple[ParameterSummary, ...]
    blocks: tuple[BlockSummary, ...]
    once_a_step: tuple[str, ...]
    stages: tuple[StageSummary, ...] = ()


# ---- the sections ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, lines of text, and a table. `is_warning` marks a section that a reader must not overlook."""

    title: str
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    is_warning: bool = False


def sections_of(summary: Summary, degrees: Degrees, recomputed: Sequence[Sequence[str]], order: bool) -> list[Section]:
    """The sections of a summary. `recomputed` has the operators of each block, and `order` adds the order of passes."""
    return [
        _without_rule(summary),
        *_stages(summary.stages, degrees, order),
        *_recomputed(summary, recomputed),
        _parameters(summary, degrees.mesh),
        *_traffic(summary),
        Section(title="Once per step or micro-batch", lines=summary.once_a_step or ("nothing",)),
    ]


def as_text(sections: Sequence[Section]) -> str:
    """Sections as plain text."""
    parts = []
    for section in sections:
        lines = [section.title, *(f"  {line}" for line in section.lines)]
        if section.rows:
            lines += [f"  {line}" for line in _aligned([section.columns, *section.rows])]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def sizes_in_words(degrees: Degrees) -> str:
    """``tp 2 × dp_shard 2 = 4 ranks, ZeRO-3``."""
    named = [
        ("pp", degrees.pp),
        ("tp", degrees.tp),
        ("cp", degrees.cp),
        ("dp_shard", degrees.dp_shard),
        ("dp_replicate", degrees.dp_replicate),
    ]
    experts = f" (ep {degrees.ep})" if degrees.ep > 1 else ""
    parts = [f"{name} {degree}" + experts * (name == "dp_shard") for name, degree in named if degree > 1]
    if degrees.cp_dims is not None:
        of_queries, of_heads = degrees.cp_dims
        parts[parts.index(f"cp {degrees.cp}")] += f" ({of_queries} of queries × {of_heads} of heads)"
    product = " × ".join(parts) or "no split"
    ranks = f"{degrees.world_size} rank{'s' * (degrees.world_size > 1)}"
    zero = f", ZeRO-{degrees.zero}" if degrees.data_ranks > 1 else ""
    order = f", rank order {degrees.order}" if degrees.order != ORDERS[0] else ""
    return f"{product} = {ranks}{zero}{order}" if degrees.world_size > 1 else f"one rank{zero}"


def header(model: str, degrees: Degrees, sequence: int | None, *, regather: bool) -> Section:
    """The degrees of a plan and the decisions that they name, in words."""
    lines = [sizes_in_words(degrees)]
    if degrees.micro_batch is not None:
        tokens = f" of {sequence:,} tokens" if sequence else ""
        factors = [f"dp {degrees.dp}", f"micro-batch {degrees.micro_batch}"]
        factors += [f"micro-batches {degrees.micro_batches}"] * (degrees.pp > 1)
        factors += [f"accumulate {degrees.accumulate}"] * (degrees.accumulate > 1)
        lines.append(f"global batch: {degrees.global_batch:,} sequences{tokens} = {' × '.join(factors)}")
    if degrees.per_micro_batch and degrees.num_micro_batches > 1:
        lines.append("loss: the mean of the losses of the micro-batches (per_micro_batch)")
    chosen = {None: "where it is cheaper", True: "required", False: "not used"}[degrees.sequence_parallel]
    if degrees.tp > 1:
        lines.append(f"sequence parallelism on tp: {chosen}")
        if not regather:
            lines.append("gathered inputs of products are saved for backward, not gathered again (no regather)")
    if degrees.precision is not None:
        stored = "; parameters, gradients and optimizer state in fp32" if degrees.precision != "fp32" else ""
        lines.append(f"precision: {degrees.precision}{stored}")
    if degrees.precision is not None or degrees.reduce_dtype is not None:
        lines.append(f"gradients are summed over ranks in {degrees.reduce_dtype or 'fp32'}")
    if degrees.recompute != "none" and degrees.pp == 1:
        lines.append(f"recomputation: {recomputation_of(asdict(degrees))}")
    if degrees.loss_chunks > 1:
        lines.append(f"logits and loss: in {degrees.loss_chunks} chunks of tokens, computed again for backward")
    if degrees.offload != NO_OFFLOAD:
        lines.append(f"in host memory: {HELD[degrees.offload]}")
    computing = "in the dtype of the model" if degrees.precision is None else f"in {degrees.precision}"
    return Section(title=f"Plan for {model or 'a model'}, computing {computing}", lines=tuple(lines))


def _without_rule(summary: Summary) -> Section:
    if not summary.without_rule:
        return Section(title="Every operator has a rule.")
    return Section(
        title="Operators without a rule: computed whole on every rank, correct but slower",
        lines=("time: one rank in one step at the device's peak; memory: bytes saved for backward",),
        columns=("operator", "where", "times", "time", "memory"),
        rows=tuple(
            (w.operator, w.where, str(w.num_calls), readable_seconds(w.seconds), readable_bytes(w.kept_bytes))
            for w in summary.without_rule
        ),
        is_warning=True,
    )


def _recomputed(summary: Summary, recomputed: Sequence[Sequence[str]]) -> list[Section]:
    """The operators of selective recomputation, and their effect on one call of each block."""
    if not any(block.selective for block in summary.blocks):
        return []
    rows, lines = [], []
    for block, operators in zip(summary.blocks, recomputed, strict=True):
        if block.selective is None:
            continue
        s = block.selective
        freed = f"{readable_bytes(s.saved_bytes - s.saved_selectively)} ({s.freed:.0%})"
        flops = f"{s.more_flops:.3g} ({s.more_flops / s.flops:.1%})" if s.flops else "0"
        rows.append((block.name, str(s.num_operators), readable_bytes(s.saved_bytes), freed, flops))
        lines.append(f"{block.name}: {', '.join(operators)}")
    title = "Selective recomputation (one call of a block for a micro-batch, on one rank)"
    columns = ("block", "operators", "saved without it", "freed", "more FLOP (of forward and backward)")
    return [Section(title=title, lines=tuple(lines), columns=columns, rows=tuple(rows))]


def _parameters(summary: Summary, mesh: Mesh) -> Section:
    names = [name for name, degree in mesh.as_dict().items() if degree > 1]
    rows = []
    for p in summary.parameters:
        shape = " × ".join(f"{size:,}" for size in p.shape) or "scalar"
        rows.append((p.name, str(p.num_copies), shape, *(p.split.get(name, "whole") for name in names)))
    columns = ("parameter", "copies", "shape", *(f"on {name}" for name in names))
    return Section(title="How parameters are split", columns=columns, rows=tuple(rows))


def _traffic(summary: Summary) -> list[Section]:
    rows = []
    for block in summary.blocks:
        dims = list(dict.fromkeys(t.mesh_dim for t in block.traffic))
        for k, dim in enumerate(dims or ["-"]):
            first = (block.name, str(block.num_calls)) if k == 0 else ("", "")
            rows.append((*first, dim, _counts(block, dim, "forward"), _counts(block, dim, "backward")))
    columns = ("block", "calls", "mesh dimension", "forward", "backward")
    sent = "Collectives of one call of each block (bytes that one rank sends)"
    leaves = [(block.name, result) for block in summary.blocks for result in block.results]
    return [
        Section(title=sent, columns=columns, rows=tuple(rows)),
        Section(title="How values leave the blocks", columns=("block", "value"), rows=tuple(leaves)),
    ]


def _counts(block: BlockSummary, dim: str, when: str) -> str:
    traffic = [t for t in block.traffic if (t.mesh_dim, t.when) == (dim, when)]
    if not traffic:
        return "nothing"
    words = [f"{t.count} {_VERBS.get(t.collective, t.collective)}{'s' * (t.count > 1)}" for t in traffic]
    return f"{', '.join(words)} ({readable_bytes(sum(t.sent_bytes for t in traffic))})"


MAX_RANKS, MAX_ACTIONS = 8, 24  # whose order is shown, and how much of it


def _stages(stages: Sequence[StageSummary], degrees: Degrees, with_order: bool) -> list[Section]:
    """The stages of a pipeline, and the order in which the ranks run them."""
    if degrees.pp == 1:
        return []
    rows = []
    for number, stage in enumerate(stages):
        calls = stage.first if stage.num_calls == 1 else f"{stage.first} … {stage.last}"
        rows.append(
            (
                str(number),
                str(stage.rank),
                f"{stage.num_calls}: {calls}",
                f"{stage.num_parameters:,}",
                readable_seconds(stage.seconds),
                readable_bytes(stage.sent_bytes) if number < len(stages) - 1 else "",
                ", ".join(stage.recomputed),
            )
        )
    columns = ("stage", "pp rank", "blocks", "parameters", "time", "sends", "computes again")
    title = "Pipeline stages (time: one micro-batch on one rank, forward and backward, at the device's peak)"
    recomputed = f", {recomputation_of(asdict(degrees))}" if degrees.recompute != "none" else ""
    count = degrees.micro_batches
    lines = [f"schedule {degrees.schedule}, {count} micro-batch{'es' * (count > 1)}{recomputed}"]
    for rank, order in enumerate(
        actions(degrees.schedule, degrees.pp, degrees.virtual_stages, degrees.micro_batches)
        if with_order and degrees.pp <= MAX_RANKS
        else ()
    ):
        shown = " ".join(str(action) for action in order[:MAX_ACTIONS])
        lines.append(f"rank {rank}: {shown}{' …' * (len(order) > MAX_ACTIONS)}")
    return [Section(title=title, lines=(lines[0],), columns=columns, rows=tuple(rows))] + [
        Section(title="Order of actions (stage, pass, micro-batch)", lines=tuple(lines[1:]))
    ] * (len(lines) > 1)


def recomputation_of(degrees: Mapping[str, Any]) -> str:
    """The recomputation of degrees in words, such as ``every block is recomputed selectively``."""
    kind, blocks, pp = degrees.get("recompute"), degrees.get("recompute_blocks"), degrees.get("pp", 1)
    selective = degrees.get("selective_blocks")
    words = recomputation_in_words(blocks, pp)
    if kind == "auto" and blocks is None and selective is None:
        return "the least recomputation that fits"
    if kind == "auto" and not _any(blocks):
        return f"{recomputation_in_words(selective, pp)} selectively"
    if kind == "auto" and selective is None and blocks is not None:
        return f"{words}, and the other blocks selectively"
    if kind == "auto" and _any(selective):
        return f"{words}; selectively, {recomputation_in_words(selective, pp)}"
    return f"{words} selectively" if kind == "selective" else words


def _any(blocks: int | Sequence[int] | None) -> bool:
    return blocks is None or (blocks > 0 if isinstance(blocks, int) else any(blocks))


def recomputation_in_words(blocks: int | Sequence[int] | None, pp: int) -> str:
    """The recomputed blocks: `blocks` is the number of every stage, or one number per stage; None means all blocks."""
    if blocks is None:
        return "every block is recomputed"
    if isinstance(blocks, int):
        counted = f"{blocks} block{'s' * (blocks > 1)}"
        return (
            f"every stage recomputes {counted}" if pp > 1 else f"{counted} {'are' if blocks > 1 else 'is'} recomputed"
        )
    some = [count for count in blocks if count]
    if not some:
        return "no stage recomputes a block"
    of_all = f"all {len(blocks)}" if len(some) == len(blocks) else f"{len(some)} of {len(blocks)}"
    stages = f"{of_all} stages recompute{'s' * (len(some) == 1)}"
    each = " each" * (len(some) > 1)
    if min(some) == max(some):
        return f"{stages} {some[0]} block{'s' * (some[0] > 1)}{each}"
    return f"{stages} {min(some)} to {max(some)} blocks{each}, {sum(some)} in all"


def bare(labels: Sequence[tuple[str, Mapping[str, tuple[str, ...]]]]) -> Section:
    """The labels of a plan written by hand, by block: how often each label occurs."""
    lines = ["this plan has no summary; write it with `autopar plan` to see collectives and parameters in words"]
    for name, of_block in labels:
        whole = sum(all(label in ("I", "R") for label in each) for each in of_block.values())
        lines.append(f"{name}: {len(of_block)} operators, {len(of_block) - whole} split")
    return Section(title="Labels", lines=tuple(lines))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
