"""The share of a program's work that a labelling splits, and the cost of every operator that stays whole.

An operator is *split* on a mesh dimension if its label there names a factor, so that each rank does a part. It is
*whole* there if every rank of that dimension does the whole operator. The extent of the split over n ranks is

    (1 - work of one rank / work of the whole operator) / (1 - 1/n)

It is 1 if every rank does an n-th and 0 if every rank does everything. It is 0.86 if n = 8 ranks are 4 × 2 and only the
4 split the operator. Padding counts as work.

The covered share of FLOP is the mean over all operators, weighted by their FLOP. The covered share of bytes moved is
weighted by bytes. FLOP count the forward pass of the unsplit matrix products, attention and convolutions. Bytes count
operands and output; views move none. For an operator without a rule, FLOP are torch's own count
(`operator_cost.forward_flops`). If `tp` is two mesh dimensions, each has a share, and both together have one.

The price of a whole operator has two parts. The first is one rank's time for it in a step, forward and backward, at the
device's peak and memory bandwidth. The second is the bytes of the operands that the rank saves for the backward pass.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from autopar.capture.analysis import Analysis
from autopar.cost_model.work.operator_cost import (
    forward_flops,
    info_bytes,
    is_view,
    local_sizes,
    passes_of,
    saved_operands,
    target_name,
)
from autopar.ir.cluster import ClusterSpec, memory_bytes_per_s, peak_flops_per_s
from autopar.ir.degrees import Degrees
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Program
from autopar.rules.rule import Call, Rule, TensorInfo
from autopar.rules.variants import Variant, chosen_variants

_SUMS = ("num_calls", "num_without_rule", "flops", "num_bytes", "split_flops", "split_bytes", "seconds", "kept_bytes")
_NOTABLE = 1e-3  # a whole operator is listed from this share of a rank's seconds on


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWork:
    """One operator, or several that are alike: the whole work in one micro-batch, and one rank's part.

    The mesh dimensions in `split` split the operator. `split_flops` and `split_bytes` are the split parts of its FLOP
    and bytes, per name of `grouped_dims`. `seconds` count one rank and step, `kept_bytes` one rank and micro-batch.
    All count every call of the operator's block.
    """

    operator: str
    where: str
    num_calls: int
    num_without_rule: int  # of the calls
    flops: float
    num_bytes: float
    split: tuple[str, ...]
    split_flops: Mapping[str, float]
    split_bytes: Mapping[str, float]
    seconds: float
    kept_bytes: float
    mesh_dim: str = ""  # which an entry of `Coverage.whole` is about

    @property
    def has_rule(self) -> bool:
        return not self.num_without_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The split and whole operators of a labelling."""

    mesh: Mapping[str, int]  # mesh dimensions of size > 1
    operators: tuple[OperatorWork, ...]  # by name, wherever they are
    whole: tuple[OperatorWork, ...]  # by mesh dimension and place
    seconds: float  # one rank's work in a step

    def split_flops(self, mesh_dim: str) -> float:
        """The share of FLOP that is split on a mesh dimension, or on both dimensions of `tp`."""
        return _share(sum(o.split_flops[mesh_dim] for o in self.operators), sum(o.flops for o in self.operators))

    def split_bytes(self, mesh_dim: str) -> float:
        """The share of bytes moved that is split on a mesh dimension."""
        return _share(sum(o.split_bytes[mesh_dim] for o in self.operators), sum(o.num_bytes for o in self.operators))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        names = grouped_dims(self.mesh)
        shares = {name: {"flops": self.split_flops(name), "bytes": self.split_bytes(name)} for name in names}
        return {**asdict(self), "split": shares}


def grouped_dims(mesh: Mapping[str, int]) -> Mapping[str, tuple[str, ...]]:
    """Every mesh dimension by itself, preceded by `tp` if `tp` is a product of several."""
    tensor = tuple(name for name in mesh if name.startswith("tp"))
    return {**({"tp": tensor} if len(tensor) > 1 else {}), **{name: (name,) for name in mesh}}


def coverage(
    program: Program, analysis: Analysis, labels: Sequence[BlockLabels], degrees: Degrees, cluster: ClusterSpec
) -> Coverage:
    """The coverage of `labels` on the mesh of `degrees`. `analysis` must be made for that mesh."""
    mesh = {name: degree for name, degree in degrees.mesh.as_dict().items() if degree > 1}
    works = list(works_of(program, analysis, labels, degrees, cluster))
    total = sum(work.seconds for work in works)
    return Coverage(
        mesh=mesh,
        operators=_merged(works, lambda work: work.operator),
        whole=tuple(whole for name in mesh for whole in _whole(name, works, total)),
        seconds=total,
    )


def works_of(
    program: Program, analysis: Analysis, labels: Sequence[BlockLabels], degrees: Degrees, cluster: ClusterSpec
) -> Iterator[OperatorWork]:
    """Every operator of every distinct block under `labels`."""
    mesh = degrees.mesh
    bandwidth = memory_bytes_per_s(cluster)
    for index, block in enumerate(program.blocks):
        times = len(program.uses_of_block(index))
        for node in block.operators:
            bound, call = analysis.bounds[index][node.name], analysis.calls[index][node.name]
            each = chosen_variants(bound, labels[index].labels[node.meta["key"]], mesh.degrees)
            chosen = dict(zip(mesh.names, each, strict=True))
            infos = () if is_view(call) else (*call.operands, call.output)
            held = [_held_bytes(info, k, chosen.values()) for k, info in enumerate((*call.operands, call.output))]
            flops, num_bytes = _flops(bound.rule, call, ()), sum(info_bytes(info) for info in infos)
            passes = passes_of(call, bound.rule)
            seconds = _flops(bound.rule, call, chosen.values()) / peak_flops_per_s(cluster, call.output.dtype)
            seconds += sum(held) / bandwidth if infos else 0.0
            extents = dict(_extents(bound.rule, call, chosen, mesh.as_dict()))
            path = node.meta["key"].partition(":")[0] if node.meta["key"].count(":") > 1 else ""
            yield OperatorWork(
                operator=target_name(call.target),
                where=".".join(part for part in (block.name, path) if part),
                num_calls=times,
                num_without_rule=0 if bound.rule.known else times,
                flops=times * flops,
                num_bytes=times * num_bytes,
                split=tuple(name for name, v in chosen.items() if v.factor),
                split_flops={name: times * flops * extent for name, extent in extents.items()},
                split_bytes={name: times * num_bytes * extent for name, extent in extents.items()},
                seconds=times * degrees.num_micro_batches * passes * seconds,
                kept_bytes=times * sum(held[k] for k in saved_operands(call, bound.rule)),
            )


def _extents(
    rule: Rule, call: Call, chosen: Mapping[str, Variant], mesh: Mapping[str, int]
) -> Iterator[tuple[str, float]]:
    """The extent of an operator's split, from 0 to 1, per name of `grouped_dims`, measured in FLOP if it has any."""
    whole = _flops(rule, call, ())
    for name, dims in grouped_dims({n: degree for n, degree in mesh.items() if degree > 1}).items():
        variants_there = [chosen[dim] for dim in dims]
        local = _flops(rule, call, variants_there) / whole if whole else prod(v.share for v in variants_there)
        yield name, (1 - local) / (1 - 1 / prod(mesh[dim] for dim in dims))


def _flops(rule: Rule, call: Call, chosen: Iterable[Variant]) -> float:
    """Forward FLOP of one rank under the chosen variants. Without variants, forward FLOP of the whole operator."""
    if rule.known and rule.flops is None:  # known to multiply nothing
        return 0.0
    return float(forward_flops(rule, call, local_sizes(rule, _degrees(chosen))))


def whole_on_every_rank(works: Sequence[OperatorWork]) -> tuple[OperatorWork, ...]:
    """Operators without a rule by place: no mesh dimension splits them."""
    return _merged([w for w in works if not w.has_rule], _place)


def _whole(mesh_dim: str, works: Sequence[OperatorWork], total_s: float) -> Iterator[OperatorWork]:
    """Operators whole on a mesh dimension that do products, have no rule or take notable time; slowest first."""
    merged = _merged([w for w in works if mesh_dim not in w.split], _place)
    for w in sorted(merged, key=lambda w: -w.seconds):
        if w.flops or not w.has_rule or w.seconds >= _NOTABLE * total_s:
            yield replace(w, mesh_dim=mesh_dim)


def _place(work: OperatorWork) -> tuple[str, str, bool]:
    return work.operator, work.where, work.has_rule


def _merged(works: Sequence[OperatorWork], key: Callable[[OperatorWork], Any]) -> tuple[OperatorWork, ...]:
    """One entry for the operators of each key, with the sums of their numbers."""
    groups: dict[Any, list[OperatorWork]] = {}
    for work in works:
        groups.setdefault(key(work), []).append(work)
    return tuple(
        replace(group[0], **{name: _sum([getattr(w, name) for w in group]) for name in _SUMS})
        for group in groups.values()
    )


def _sum(values: Sequence[Any]) -> Any:
    """The sum of numbers, or of mappings name by name."""
    return {name: sum(v[name] for v in values) for name in values[0]} if isinstance(values[0], dict) else sum(values)


def _degrees(chosen: Iterable[Variant]) -> dict[str, float]:
    """The divisor of each split factor."""
    divisors: dict[str, float] = {}
    for variant in chosen:
        if variant.factor:
            divisors[variant.factor] = divisors.get(variant.factor, 1.0) / variant.share
    return divisors


def _held_bytes(info: TensorInfo, position: int, chosen: Iterable[Variant]) -> float:
    """One rank's bytes of an operand, or of the output: the position behind the last operand."""
    return info_bytes(info) * prod(v.share for v in chosen if (*v.operands, v.output)[position].kind == "S")


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
