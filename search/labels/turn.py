"""One mesh dimension's turn, and its candidates: variants of operators, types of values that cross blocks."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.capture.analysis import Analysis
from autopar.errors import PlanError, Problem
from autopar.ir.degrees import EXCHANGE, GATHER, HEADS, QUERIES, RING, WHOLE
from autopar.ir.program import Program
from autopar.ir.sharding import I, R, S, Type, owned_by, splits_samples
from autopar.rules.routed import ORDER, PRODUCT, ROUTED
from autopar.rules.variants import Variant, may_be_uneven, rewrites_fit, variants
from autopar.search.labels.choices import ATTENTION, Boundary, BoundaryClass, Choice, NodeKey, paddable_axes
from autopar.search.labels.prices import Prices

_NEEDS: Mapping[str, str] = {  # of the operators that a way decides about
    HEADS: "heads that the degree divides",
    QUERIES: "scores without dropout, and as many queries as keys if attention is causal",
    RING: "full or causal attention without another mask, without dropout, and of as many queries as keys",
    EXCHANGE: "experts and tokens that the degree divides",
    GATHER: "experts that the degree divides",
    WHOLE: "tokens that the degree divides",
}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One mesh dimension's turn: everything that its labels depend on, behind the solved mesh dimensions."""

    program: Program
    analysis: Analysis
    boundary: Boundary = field(compare=False)  # the analysis decides it
    name: str
    degree: int
    index: int
    solved: tuple[Choice, ...] = field(hash=False)
    axes: frozenset[int]
    prices: Prices
    requires_sequence: bool
    accumulate: int
    regather: bool
    pinned: Mapping[str, tuple[Type, ...]] = field(hash=False)
    dispatch: str | None
    context: str | None


def variants_of(turn: Turn, relaxed: bool) -> dict[NodeKey, tuple[Variant, ...]]:
    """The variants of every operator. `relaxed` ones split axes that the degree does not divide."""
    program, analysis, name, index, degree = turn.program, turn.analysis, turn.name, turn.index, turn.degree
    solved, dispatch, context = turn.solved, turn.dispatch, turn.context
    paddable = paddable_axes(program, analysis, degree)
    ways = _ways(name, context)
    kept_variants: dict[NodeKey, tuple[Variant, ...]] = {}
    for i, bounds in enumerate(analysis.bounds):
        for node, bound in bounds.items():
            call = analysis.calls[i][node]
            flows = call.output.differentiable or any(o.differentiable for o in call.operands)
            outer, inner = ([s for s in solved if (s.index < index) is is_outer] for is_outer in (True, False))
            before, behind = ([s.variants[i, node] for s in side] for side in (outer, inner))
            degrees = [*(s.degree for s in outer), degree, *(s.degree for s in inner)]  # in the mesh's order
            kept = []
            for variant in variants(bound, 1):
                if variant.label == "R" and not flows:
                    continue  # without a cotangent R is I
                if variant.is_by_expert and owned_by(name) != "experts":
                    continue
                if variant.is_ring and owned_by(name) != "sequence":
                    continue
                if owned_by(name) == "experts" and not _is_dispatch(variant, call.target, dispatch):
                    continue
                if owned_by(name) == "sequence" and not _is_context(variant, call.target, ways):
                    continue
                if variant.factor:
                    axis, size = bound.factors[variant.factor][variant.axis]
                    padded = axis in paddable and may_be_uneven(bound, variant.factor)
                    if axis not in turn.axes or not (relaxed or size % degree == 0 or padded):
                        continue
                    if not rewrites_fit(bound, [*before, variant, *behind], degrees):
                        continue
                kept.append(variant)
            if not kept:
                word, way = ("dispatch", dispatch) if owned_by(name) == "experts" else ("context", context)
                rule = (
                    f"cannot run {node} of block {program.blocks[i].name} on {name}={degree}, because it needs "
                    f"{_NEEDS[way or HEADS]}"
                )
                hint = f"leave {word} out, or take another degree"
                raise PlanError("a way was asked for", [Problem(path=word, value=way, rule=rule, suggestion=hint)])
            kept_variants[i, node] = tuple(kept)
    return kept_variants


def types_of(turn: Turn, relaxed: bool) -> dict[str, tuple[Type, ...]]:
    """The types of every value between blocks. `relaxed` ones split axes that the degree does not divide."""
    paddable = None if relaxed else paddable_axes(turn.program, turn.analysis, turn.degree)
    return {c.name: tuple(_types_of(c, turn, paddable)) for c in turn.boundary.classes.values()}


def _is_dispatch(variant: Variant, target: Any, dispatch: str | None) -> bool:
    """Whether an operator may run so on `ep` under a way of dispatch."""
    if dispatch is None:
        return target is not PRODUCT or variant.is_by_expert
    if target not in ROUTED and not variant.is_by_expert:
        return True
    if dispatch == WHOLE:
        return not variant.is_by_expert
    if target is ORDER:
        return variant.factor != "" if dispatch == EXCHANGE else variant.factor == ""
    if target is PRODUCT or target not in ROUTED:
        return variant.is_by_expert
    return variant.factor != "" and variant.is_by_expert == (dispatch == GATHER)


def _ways(name: str, context: str | None) -> Collection[str]:
    """The ways of attention on a mesh dimension of `cp`; empty for any way."""
    if name == "cp0":
        return (QUERIES, RING) if context is None else (context,)
    return (HEADS,) if name == "cp1" else () if context is None else (context,)


def _is_context(variant: Variant, target: Any, ways: Collection[str]) -> bool:
    """Whether attention may run so on `cp`. Other operators may run in any way."""
    if not ways or target is not ATTENTION:
        return True
    way = RING if variant.is_ring else QUERIES if variant.factor == "q" else HEADS
    return variant.factor not in ("", "f") and way in ways  # f is the width of a head's values


def _types_of(c: BoundaryClass, turn: Turn, paddable: frozenset[int] | None) -> Iterator[Type]:
    """The types that a boundary class may have; none if training drops it. Any axis splits without `paddable`."""
    axes, degree, owned = turn.axes, turn.degree, owned_by(turn.name)
    pinned = frozenset(turn.pinned[member][turn.index] for member in c.members if member in turn.pinned)
    shards = [
        (S(d, p), axis)
        for d, (dim, sizes) in enumerate(zip(c.dims.axes, c.dims.sizes, strict=True))
        for p, (axis, size) in enumerate(zip(dim, sizes, strict=True))
        if axis in axes and (paddable is None or size % degree == 0 or axis in paddable)
    ]
    if c.free:
        return
    if c.role == "input":
        # the batch is cut before the model sees it, along its outermost axis
        yield from [t for t, _ in shards][:1] if splits_samples(turn.name) and shards else [I]
    elif c.fixed or c.role not in ("parameter", "value"):
        yield I
    elif c.role == "parameter" and pinned:
        yield from sorted(pinned)
    elif c.role == "parameter":
        split = [t for t, _ in shards] if owned in ("parameters", "experts") else []
        yield from [*([I] if owned == "parameters" else []), R, *split]
    else:
        sequence = [t for t, axis in shards if axis in turn.analysis.sequence_axes]
        is_required = (turn.requires_sequence and owned == "parameters") or owned == "sequence"
        if is_required and sequence and c.consumed and c.differentiable and not c.shared:
            yield from sequence
        else:
            yield from [I, *([R] if c.differentiable else []), *(t for t, _ in shards)]
