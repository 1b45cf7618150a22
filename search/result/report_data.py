"""What a report shows of a search beside its plans: costs rank by rank, a time line, candidates, curves, formulas.

Plain data of `autopar.search.result.result.SearchResult`, made by `autopar.search.explain.build_report_data` where a
search ends. Seconds, bytes; parts have the names of `autopar.search.result.result.PARTS` and
`autopar.cost_model.estimate.MEMORY`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WAITING = "waiting for other ranks"  # a part of a rank's seconds beside `PARTS`


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """One pipeline rank of a plan: its stages, its first and last block, seconds and bytes by part.

    `seconds` add up to the step: those of every other rank hold as "waiting for other ranks" what this one does not
    need. `bytes` add up to what the rank holds with the allocator's cache.
    """

    rank: int
    stages: tuple[int, ...]
    num_blocks: int
    has_first: bool
    has_last: bool
    seconds: Mapping[str, float] = field(hash=False)
    bytes: Mapping[str, float] = field(hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The replayed action list of one run of the schedule, of which a step makes `runs`.

    A pass is [rank, kind, stage, micro-batch, start, end], kinds as in `autopar.ir.schedules`; a message is [from rank,
    to rank, stage that sent, micro-batch, start, end]. Of long lists the first and the last passes are kept, `left_out`
    says how many are not, and `gap` from when to when.
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
    """Candidates in columns of one length: seconds (a lower bound, or the price of those that are `exact`), bytes of
    the fullest rank, degrees. `fitting` are all that may fit, of which these are some."""

    fitting: int
    columns: Mapping[str, tuple[Any, ...]] = field(hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A what-if: the best plan with one thing changed (None where it cannot be changed so, or does not fit), and the
    lower bound of every plan there (None where none fits)."""

    factor: float
    value: float
    step_s: float | None
    tokens_per_s: float | None
    fits: bool
    bound_s: float | None
    bound_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one thing changed; `held` says what stays as it is."""

    name: str
    unit: str
    held: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A number put into a formula."""

    symbol: str
    meaning: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One part of the best plan's step: a formula of Python's operators and ``sqrt``, ``log``, ``max``, the values put
    in, what it gives, and where it comes from."""

    part: str
    formula: str
    values: tuple[Value, ...]
    seconds: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the best plan reaches. Model and hardware FLOP utilisation as in `autopar.cost_model.estimate`; dollars of
    10^9 tokens where the cluster has a price."""

    tokens_per_s: float
    mfu: float
    hfu: float
    peak_flops_per_s: float
    usd_per_billion_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """The best plan in detail; `timeline` is None without a pipeline, or for more passes than are replayed."""

    rates: Rates
    ranks: tuple[RankCost, ...]
    timeline: Timeline | None
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """Operators of a block drawn as one box, or a collective. `kind` is "product", "attention", "other", "input",
    "output" or "collective"; `layer` is how far from the inputs it stands."""

    name: str
    kind: str
    label: str
    detail: str
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEdge:
    """A value from one node to another, by their positions, and how ranks hold it."""

    source: int
    target: int
    placement: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGraph:
    """A block as one rank runs it forward: what is computed, how values are placed, where ranks communicate."""

    name: str
    num_calls: int
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    weights: tuple[tuple[str, str, str], ...]  # name, shape, how it is split
