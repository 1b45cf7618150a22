"""The data of a report beside the plans: costs rank by rank, a time line, candidates, curves, formulas.

`autopar.search.explain.build_report_data` makes this plain data at the end of a search. Times are in seconds, memory in
bytes. Parts have the names of `autopar.search.result.result.PARTS` and `autopar.cost_model.parts.MEMORY`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WAITING = "waiting for other ranks"  # a part of a rank's seconds beside `PARTS`


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """One pipeline rank of a plan: its stages, its first and last block, seconds and bytes by part."""

    rank: int
    stages: tuple[int, ...]
    num_blocks: int
    has_first: bool
    has_last: bool
    seconds: Mapping[str, float] = field(hash=False)  # add up to the step time, with `WAITING`
    bytes: Mapping[str, float] = field(hash=False)  # add up to the rank's memory with the allocator's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The replayed action list of one run of the schedule. A step makes `runs` runs.

    A pass is [rank, kind, stage, micro-batch, start, end], with the kinds of `autopar.ir.schedules`. A message is [from
    rank, to rank, sending stage, micro-batch, start, end]. A long list keeps its first and its last passes. `left_out`
    is the number of dropped passes, `gap` the time between the two parts.
    """

    num_ranks: int
    num_stages: int
    micro_batches: int
    runs: int
    seconds: float
    passes: tuple[tuple[int, str, int, int, float, float], ...]
    messages: tuple[tuple[int, int, int, int, float, float], ...]
    left_out: int
    gap: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Candidates in columns of one length: seconds, bytes of the fullest rank, degrees."""

    fitting: int  # all candidates that may fit; the columns hold some of them
    columns: Mapping[str, tuple[Any, ...]] = field(hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The effect of one change: the step time of the changed best plan, and a lower bound of every plan."""

    factor: float
    value: float
    step_s: float | None  # None if the plan cannot be changed so, or does not fit
    tokens_per_s: float | None
    fits: bool
    bound_s: float | None  # None if no plan fits
    bound_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one changed thing. `held` says what stays the same."""

    name: str
    unit: str
    held: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaValue:
    """A number put into a formula."""

    symbol: str
    meaning: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaTerm:
    """One part of the best plan's step: a formula, its values, its result and its source.

    The formula has Python's operators and ``sqrt``, ``log``, ``max``.
    """

    part: str
    formula: str
    values: tuple[FormulaValue, ...]
    seconds: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of the best plan."""

    tokens_per_s: float
    mfu: float
    hfu: float
    peak_flops_per_s: float
    usd_per_billion_tokens: float | None  # if the cluster has a price


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """The best plan in detail. `timeline` is None without a pipeline, or if there are too many passes to replay."""

    rates: Rates
    ranks: tuple[RankCost, ...]
    timeline: Timeline | None
    terms: tuple[FormulaTerm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """A box of the drawing: operators of a block, or a collective."""

    name: str
    kind: str  # "product", "attention", "other", "input", "output" or "collective"
    label: str
    detail: str
    layer: int  # the distance from the inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEdge:
    """A value from one node to another, by their positions, and how ranks hold it."""

    source: int
    target: int
    placement: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGraph:
    """The forward pass of a block on one rank: operators, placements of values, and collectives."""

    name: str
    num_calls: int
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    weights: tuple[tuple[str, str, str], ...]  # name, shape, how it is split
