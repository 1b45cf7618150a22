"""How much of a program's work a labelling splits, and what every operator that stays whole costs.

An operator is *split* on a mesh dimension if its label there names a factor, so that a rank does a part of it; it is
*whole* there if every rank of that dimension does all of it. The covered share of FLOP on a mesh dimension is

    sum of FLOP of the operators that are split there  /  sum of FLOP of all operators

and likewise of bytes moved. FLOP are those of matrix products, attention and convolutions, forward, of the unsplit
operator; bytes are operands and output, views moving none. Operators without a rule count: their FLOP are torch's own
count (`unruled_flops`).

The price of being whole is what one rank spends on the operator in one step, forward and backward, at the device's
peak and memory bandwidth, and the bytes of operands that it keeps for the backward pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from autopar.cost_model.compute import (
    PASSES,
    is_view,
    local_flops,
    memory_bytes_per_s,
    operator_name,
    peak_flops_per_s,
    saved_operands,
    unruled_flops,
)
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import BlockLabels, Degrees
from autopar.ir.program import Program
from autopar.rules.rule import TensorInfo
from autopar.rules.variants import Variant, by_label, variants
from autopar.trace.analysis import Analysis

NOTABLE = 1e-3  # an operator that is whole is listed from this share of a rank's seconds on


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One operator of one distinct block: its whole work in one micro-batch, and what one rank has of it.

    `split` are the mesh dimensions that split it. `seconds` are of one rank and step, `kept_bytes` of one rank and
    micro-batch, over all calls of the block.
    """

    operator: str
    where: str
    num_calls: int
    has_rule: bool
    flops: float
    num_bytes: float
    split: frozenset[str]
    seconds: float
    kept_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCoverage:
    """All calls of one operator in one micro-batch; `split_flops` and `split_bytes` are per mesh dimension."""

    operator: str
    num_calls: int
    num_without_rule: int
    flops: float
    num_bytes: float
    split_flops: Mapping[str, float]
    split_bytes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOperator:
    """An operator at one place that is whole on a mesh dimension, and its price on one rank."""

    mesh_dim: str
    operator: str
    where: str
    num_calls: int
    has_rule: bool
    flops: float
    seconds: float
    kept_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What a labelling splits. `mesh` holds the mesh dimensions of size > 1; `seconds` is one rank's work in a step."""

    mesh: Mapping[str, int]
    operators: tuple[OperatorCoverage, ...]
    whole: tuple[WholeOperator, ...]
    seconds: float

    def split_flops(self, mesh_dim: str) -> float:
        """The share of FLOP that is split on a mesh dimension, 1 where there are none."""
        return _share(sum(o.split_flops[mesh_dim] for o in self.operators), sum(o.flops for o in self.operators))

    def split_bytes(self, mesh_dim: str) -> float:
        """The share of bytes moved that is split on a mesh dimension."""
        return _share(sum(o.split_bytes[mesh_dim] for o in self.operators), sum(o.num_bytes for o in self.operators))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        shares = {name: {"flops": self.split_flops(name), "bytes": self.split_bytes(name)} for name in self.mesh}
        return {**asdict(self), "split": shares}


def coverage(
    program: Program, analysis: Analysis, labels: Sequence[BlockLabels], degrees: Degrees, cluster: ClusterSpec
) -> Coverage:
    """What `labels` split on the mesh of `degrees`. `analysis` must be of that mesh."""
    mesh = {name: degree for name, degree in degrees.mesh.as_dict().items() if degree > 1}
    works = list(works_of(program, analysis, labels, degrees, cluster))
    total = sum(work.seconds for work in works)
    groups = _grouped(works, lambda work: (work.operator,)).items()
    return Coverage(
        mesh=mesh,
        operators=tuple(_operator(name, group, mesh) for (name,), group in groups),
        whole=tuple(whole for name in mesh for whole in _whole(name, works, total)),
        seconds=total,
    )


def works_of(
    program: Program, analysis: Analysis, labels: Sequence[BlockLabels], degrees: Degrees, cluster: ClusterSpec
) -> Iterator[Work]:
    """Every operator of every distinct block under `labels`."""
    mesh = degrees.mesh
    for index, block in enumerate(program.blocks):
        calls = len(program.uses_of_block(index))
        for node in block.graph.nodes:
            if node.op != "call_function":
                continue
            bound, call = analysis.bounds[index][node.name], analysis.calls[index][node.name]
            chosen = [
                by_label(variants(bound, degree), label)
                for label, degree in zip(labels[index].labels[node.meta["key"]], mesh.degrees, strict=True)
            ]
            flops, local = bound.rule.factor_flops(), local_flops(bound.rule, _degrees(chosen))
            if not bound.rule.known:
                flops = local = unruled_flops(call)
            infos = (*call.operands, call.output)
            held = [_held_bytes(info, k, chosen) for k, info in enumerate(infos)]
            moved = 0.0 if is_view(call) else sum(held)
            passes = PASSES if call.output.differentiable else 1.0
            seconds = local / peak_flops_per_s(cluster, call.output.dtype) + moved / memory_bytes_per_s(cluster)
            path = node.meta["key"].partition(":")[0] if node.meta["key"].count(":") > 1 else ""
            yield Work(
                operator=operator_name(call.target),
                where=".".join(part for part in (block.name, path) if part),
                num_calls=calls,
                has_rule=bound.rule.known,
                flops=calls * flops,
                num_bytes=0.0 if is_view(call) else calls * sum(_bytes(info) for info in infos),
                split=frozenset(name for name, v in zip(mesh.names, chosen, strict=True) if v.factor),
                seconds=calls * degrees.accumulate * passes * seconds,
                kept_bytes=calls * sum(held[k] for k in saved_operands(call, bound.rule)),
            )


def whole_on_every_rank(works: Sequence[Work]) -> tuple[WholeOperator, ...]:
    """Operators without a rule by place: no mesh dimension splits them."""
    return tuple(_merged("", group) for group in _grouped([w for w in works if not w.has_rule], _place).values())


def _operator(name: str, works: Sequence[Work], mesh: Mapping[str, int]) -> OperatorCoverage:
    return OperatorCoverage(
        operator=name,
        num_calls=sum(w.num_calls for w in works),
        num_without_rule=sum(w.num_calls for w in works if not w.has_rule),
        flops=sum(w.flops for w in works),
        num_bytes=sum(w.num_bytes for w in works),
        split_flops={m: sum(w.flops for w in works if m in w.split) for m in mesh},
        split_bytes={m: sum(w.num_bytes for w in works if m in w.split) for m in mesh},
    )


def _whole(mesh_dim: str, works: Sequence[Work], total_s: float) -> Iterator[WholeOperator]:
    """What is whole on a mesh dimension and does products, has no rule, or takes notable time; dearest first."""
    groups = _grouped([w for w in works if mesh_dim not in w.split], _place).values()
    merged = sorted((_merged(mesh_dim, group) for group in groups), key=lambda w: -w.seconds)
    yield from (w for w in merged if w.flops or not w.has_rule or w.seconds >= NOTABLE * total_s)


def _merged(mesh_dim: str, works: Sequence[Work]) -> WholeOperator:
    first = works[0]
    return WholeOperator(
        mesh_dim=mesh_dim,
        operator=first.operator,
        where=first.where,
        num_calls=sum(w.num_calls for w in works),
        has_rule=first.has_rule,
        flops=sum(w.flops for w in works),
        seconds=sum(w.seconds for w in works),
        kept_bytes=sum(w.kept_bytes for w in works),
    )


def _place(work: Work) -> tuple[str, str, bool]:
    return work.operator, work.where, work.has_rule


def _grouped(works: Sequence[Work], key: Callable[[Work], Any]) -> dict[Any, list[Work]]:
    groups: dict[Any, list[Work]] = {}
    for work in works:
        groups.setdefault(key(work), []).append(work)
    return groups


def _degrees(chosen: Sequence[Variant]) -> dict[str, float]:
    """By how much each factor is divided."""
    found: dict[str, float] = {}
    for variant in chosen:
        if variant.factor:
            found[variant.factor] = found.get(variant.factor, 1.0) / variant.share
    return found


def _held_bytes(info: TensorInfo, position: int, chosen: Sequence[Variant]) -> float:
    """Bytes of an operand, or of the output behind the last operand, that one rank has."""
    types = ((*v.operands, v.output)[position] for v in chosen)
    return _bytes(info) * prod(v.share for v, t in zip(chosen, types, strict=True) if t.kind == "S")


def _bytes(info: TensorInfo) -> float:
    return float(prod(info.shape) * info.dtype.itemsize)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
