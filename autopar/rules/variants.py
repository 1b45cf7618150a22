"""Variants: the ways in which one operator can run on one mesh dimension, as types of its operands and output."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from autopar.ir.sharding import Dims, I, P, R, S, Type, chunk
from autopar.rules.rule import EXPERTS, RING, Rule, Spec

BY_EXPERT = ":experts"
WIDTH_OF_SUMS = 4  # bytes of an element, at least, in gradients that are summed on the way


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute an operator: its label, the types of its operands, and the type of its output.

    `label` is ``"I"``, ``"R"``, ``"P:k"`` (linear in the k-th set of operands) or ``"factor.axis"`` (that axis of the
    factor's product is split). In ``"factor.axis:experts"`` a rank has the sorted rows of its experts. In
    ``"factor.axis:ring"`` parts of other operands travel from rank to rank (`Rule.travels`). `share` is the fraction of
    the operator's work that one rank does, for rows of experts the expected one.
    """

    label: str
    operands: tuple[Type, ...]
    output: Type
    share: float
    factor: str = ""
    axis: int = -1

    @property
    def is_by_expert(self) -> bool:
        return self.label.endswith(BY_EXPERT)

    @property
    def is_ring(self) -> bool:
        return self.label.endswith(RING)

    @property
    def split_as(self) -> str:
        """The key of its mesh dimension in `Call.split`."""
        return EXPERTS if self.is_by_expert else self.factor + RING * self.is_ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A message of a rewrite to one other rank: the parts of some operands, -1 being the output."""

    collective: Literal["exchange", "shift"]
    operands: tuple[int, ...]
    is_forward: bool
    is_half: bool = False  # half of each part
    sums: bool = False  # at least `WIDTH_OF_SUMS` bytes for each element
    per_rank: int = 0  # on n ranks a pass has per_rank · n + more such messages
    more: int = 1
    is_beside: bool = False  # sent while the operator computes


def exchanges(rule: Rule, variant: Variant) -> tuple[Exchange, ...]:
    """The messages of the rewrite of an operator under a variant (`autopar.lowering.ring_attention`)."""
    mirrored = rule.exchanged.get(variant.factor, ())
    travelling: tuple[int, ...] = ()
    if variant.is_ring:
        factor = rule.travels[variant.factor]
        travelling = tuple(k for k, spec in enumerate(rule.inputs) if any(factor in dim for dim in spec))
    sent: list[Exchange] = []
    for is_forward in (True, False):
        halves: list[tuple[int, ...]] = [(k,) for k in mirrored]
        if mirrored and variant.is_ring:  # backward sends the result beside its gradient
            inputs = tuple(k for k in mirrored if k >= 0)
            halves = [(*inputs, *travelling), (-1,) if is_forward else (-1, -1)]
        sent += [Exchange(collective="exchange", operands=x, is_forward=is_forward, is_half=True) for x in halves]
    if travelling:
        shift = Exchange(collective="shift", operands=travelling, is_forward=True, per_rank=1, more=-1, is_beside=True)
        gradients = replace(shift, is_forward=False, sums=True)
        home = replace(gradients, per_rank=0, more=1, is_beside=False)
        sent += [shift, replace(shift, is_forward=False), gradients, home]
    return tuple(sent)


@dataclass(frozen=True, slots=True)
class Bound:
    """A rule bound to axes: sizes and identities of the atoms of every factor, and the dims of its values."""

    rule: Rule
    factors: dict[str, tuple[tuple[int, int], ...]]  # factor -> ((atom, size), ...)
    operands: tuple[Dims, ...]
    output: Dims
    zero_padded: frozenset[int] = frozenset()  # operands that are linear in a parameter: their padding is zero
    ragged: tuple[frozenset[int], ...] = ()  # dimensions of operands and output (`autopar.rules.routed`), if there are
    known: dict[int, tuple[Variant, ...]] = field(default_factory=dict, compare=False, repr=False)  # by degree

    def position(self, spec: Spec, factor: str, axis: int) -> tuple[int, int] | None:
        """Where an axis of a factor lies in an operand: (dimension, position), None if it has it not."""
        for d, dim in enumerate(spec):
            position = 0
            for name in dim:
                if name == factor:
                    return d, position + axis
                position += len(self.factors[name])
        return None


def split_variants(bound: Bound, degree: int) -> Iterator[Variant]:
    """Every variant that splits one axis of one factor over `degree` ranks.

    Variants differ between degrees in their share, and in whether they are legal; all are for one rank.
    """
    for v in variants(bound, 1) if degree != 1 else _splits_of_axes(bound):
        if v.factor:
            size = bound.factors[v.factor][v.axis][1]
            experts = bound.rule.sizes[bound.rule.expert] if v.is_by_expert and bound.rule.expert else 0
            is_even = size % degree == 0
            if experts % degree == 0 and (is_even or (not v.is_ring and may_be_uneven(bound, v.factor))):
                yield replace(v, share=chunk(size, degree) / size)


def _splits_of_axes(bound: Bound) -> Iterator[Variant]:
    rule = bound.rule
    for factor, atoms in bound.factors.items():
        if factor in rule.whole:
            continue
        for axis, (_, size) in enumerate(atoms):
            if not size:
                continue
            operands = tuple(_operand_type(bound, k, factor, axis) for k in range(len(rule.inputs)))
            where = bound.position(rule.output, factor, axis)
            output = S(*where) if where else (I if factor in rule.invariant else P)
            variant = Variant(f"{factor}.{axis}", operands, output, 1.0, factor, axis)
            yield variant
            if bound.ragged and (rows := _by_expert(bound, variant)) is not None:
                yield rows
            if factor in rule.travels and bound.factors[rule.travels[factor]] == atoms:
                yield _ring(bound, variant)


def _ring(bound: Bound, split: Variant) -> Variant:
    """The variant in which a rank also has only its part of the operands that travel."""
    other = bound.rule.travels[split.factor]
    operands = list(split.operands)
    for k, spec in enumerate(bound.rule.inputs):
        where = bound.position(spec, other, split.axis)
        if where is not None:
            operands[k] = S(*where)
    return replace(split, label=split.label + RING, operands=tuple(operands))


def _by_expert(bound: Bound, split: Variant) -> Variant | None:
    """The variant in which a rank has the sorted rows and the matrices of its experts; other values are whole."""
    rule = bound.rule
    if split.factor in rule.invariant | rule.outermost or split.factor in rule.exchanged:
        return None

    def of(place: int, t: Type, spec: Spec, whole: Type) -> Type | None:
        if t.kind == "S" and t.dim in bound.ragged[place]:
            return replace(t, by_expert=True)
        if rule.expert and (at := bound.position(spec, rule.expert, 0)) is not None:
            return S(*at)
        return None if t.kind == "S" and not rule.is_routed else whole

    operands = [of(k, t, spec, R) for k, (t, spec) in enumerate(zip(split.operands, rule.inputs, strict=True))]
    output = of(-1, split.output, rule.output, P)
    sorted_rows = [t for t in (*operands, output) if t is not None and t.by_expert]
    if output is None or None in operands or not sorted_rows:
        return None
    types = tuple(t for t in operands if t is not None)
    return replace(split, label=split.label + BY_EXPERT, operands=types, output=output)


def rewrites_fit(bound: Bound, chosen: Sequence[Variant], degrees: Sequence[int]) -> bool:
    """Whether what rewrites, which compute offsets, see as their part of a factor is one contiguous range of it."""
    rings = {v.factor for v in chosen if v.is_ring}
    if any(sum(v.factor == factor for v in chosen) > 1 for factor in rings):
        return False
    for factor in bound.rule.outermost:
        pairs = [(v.axis, degree) for v, degree in zip(chosen, degrees, strict=True) if v.factor == factor]
        if [axis for axis, _ in pairs] != list(range(len(pairs))):
            return False
        if any(bound.factors[factor][axis][1] != degree for axis, degree in pairs[:-1]):
            return False
    return True


def may_be_uneven(bound: Bound, factor: str) -> bool:
    """Whether a factor may be split into parts with padding in the last ones.

    Along a parallel factor, padding never meets data. Nothing reads its results, so its cotangent is zero. A reduced
    factor adds padding to data. A product may do so if one of its operands is zero there. Rewrites look up no ids in
    the padding.
    """
    rule = bound.rule
    if factor in rule.even:
        return False
    if factor not in rule.reduced or factor in rule.outermost:
        return True
    having = (k for k, spec in enumerate(rule.inputs) if any(factor in dim for dim in spec))
    return rule.flops is not None and any(k in bound.zero_padded for k in having)


def _operand_type(bound: Bound, index: int, factor: str, axis: int) -> Type:
    rule = bound.rule
    where = bound.position(rule.inputs[index], factor, axis)
    if where:
        return S(*where)
    if factor in rule.invariant:
        return I
    return P if factor in rule.reduced and index in rule.additive else R


def whole_variants(bound: Bound) -> list[Variant]:
    """The ways to compute an operator whole: invariant, replicate, and linear in partial operands."""
    count = len(bound.rule.inputs)
    result = [Variant("I", (I,) * count, I, 1.0), Variant("R", (R,) * count, R, 1.0)]
    for k, group in enumerate(bound.rule.linear):
        if all(index < count for index in group):
            result.append(Variant(f"P:{k}", tuple(P if i in group else R for i in range(count)), P, 1.0))
    return result


def variants(bound: Bound, degree: int) -> tuple[Variant, ...]:
    """All variants of a bound rule on a mesh dimension of the given degree, made when they are first asked for."""
    if degree not in bound.known:
        bound.known[degree] = (*whole_variants(bound), *split_variants(bound, degree))
    return bound.known[degree]


def chosen_variants(bound: Bound, labels: Sequence[str], degrees: Sequence[int]) -> tuple[Variant, ...]:
    """The variant of every mesh dimension. Raises the `KeyError` of `by_label`."""
    return tuple(by_label(variants(bound, n), label) for label, n in zip(labels, degrees, strict=True))


def by_label(options: Sequence[Variant], label: str) -> Variant:
    """The variant with a label. Raises `KeyError` naming the legal ones."""
    variant = next((option for option in options if option.label == label), None)
    if variant is None:
        raise KeyError(f"no variant {label!r}; there are {[option.label for option in options]}")
    return variant
