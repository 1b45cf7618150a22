"""Operators that move dimensions without changing elements. All are linear."""

from collections.abc import Sequence
from math import prod

import torch

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.ir.sharding import common_cuts
from autopar.rules.families._notation import broadcast, dim_index, dim_indices, dims, emit_reshape, rule_from
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Rule, Step


def spans(left: Sequence[int], right: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of dimensions of two shapes that cover the same elements; dimensions of size 1 left out."""
    pairs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left) or j < len(right):
        a: list[int] = []
        b: list[int] = []
        a_size = b_size = 1
        while not a or a_size != b_size:
            if a_size <= b_size and i < len(left):
                a_size *= left[i]
                a.append(i)
                i += 1
            elif j < len(right):
                b_size *= right[j]
                b.append(j)
                j += 1
            else:
                break
        pairs.append(([d for d in a if left[d] != 1], [d for d in b if right[d] != 1]))
    return [(a, b) for a, b in pairs if a or b]


def _take(cuts: list[int], names: list[str], size: int) -> Dim:
    """The leading factors whose product is `size`, removed from the lists."""
    taken: list[str] = []
    while prod(cuts[: len(taken)]) != size:
        taken.append(names[len(taken)])
    del cuts[: len(taken)], names[: len(taken)]
    return tuple(taken)


def reshape_rule(call: Call) -> Rule:
    """Factors are the common refinement of both shapes; where two factorisations cross, that span is whole."""
    source, target = call.operands[0].shape, call.output.shape
    left: list[Dim] = [()] * len(source)
    right: list[Dim] = [()] * len(target)
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    for a, b in _equal_ends(source, target) if 0 in source else spans(source, target):
        is_crossed = 0 in source and len(a) != 1
        cuts = None if is_crossed else common_cuts([source[d] for d in a], [target[d] for d in b])
        if cuts is None:
            for shape, spec, prefix, group in ((source, left, "x", a), (target, right, "y", b)):
                for d in group:
                    spec[d] = (f"{prefix}{d}",)
                    sizes[f"{prefix}{d}"] = shape[d]
                    whole.add(f"{prefix}{d}")
            continue
        names = [f"r{len(sizes) + n}" for n in range(len(cuts))]
        sizes |= dict(zip(names, cuts, strict=True))
        for shape, spec, group in ((source, left, a), (target, right, b)):
            rest, unnamed = list(cuts), list(names)
            for d in group:
                spec[d] = _take(rest, unnamed, shape[d])
    return rule_from(call, [left], right, sizes=sizes, whole=whole, linear=[{0}], emit=emit_reshape)


def _equal_ends(left: Sequence[int], right: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """`spans` of shapes without elements: equal sizes at the begin and at the end, and all dimensions between them."""
    a, b = ([d for d, size in enumerate(shape) if size != 1] for shape in (left, right))
    pairs: list[tuple[list[int], list[int]]] = []
    for end in (0, -1):
        while a and b and left[a[end]] == right[b[end]]:
            pairs.append(([a.pop(end)], [b.pop(end)]))
    return [*pairs, (a, b)]


rule(
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)(reshape_rule)


@rule(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default, aten.permute.default)
@rule(aten.movedim.int, aten.movedim.intlist)
@rule(aten.t.default, aten.numpy_T.default, aten.mT.default, aten.adjoint.default)
def permute(call: Call) -> Rule:
    """The operator itself tells the order of dimensions, from a tensor in which every size is a dimension's number."""
    spec = dims(call.operands[0].shape)
    order = call.target(torch.empty(list(range(len(spec))), device="meta"), *call.args[1:], **call.kwargs).shape
    return rule_from(call, [spec], [spec[d] for d in order], linear=[{0}])


def _emit_expand(local: Call) -> tuple[Step, ...]:
    return (Step(aten.expand.default, (local.args[0], list(local.output.shape))),)


@rule(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def expand(call: Call) -> Rule:
    """An expanded dimension is a factor of the output only: each rank's gradient is a sum over its own copies."""
    spec = dims(call.output.shape)
    return rule_from(call, broadcast(call, spec), spec, linear=[{0}], emit=_emit_expand)


def _emit_repeat(local: Call) -> tuple[Step, ...]:
    source = local.operands[0].shape
    padded = (1,) * (len(local.output.shape) - len(source)) + source
    repeats = [out // size for out, size in zip(local.output.shape, padded, strict=True)]
    return (Step(aten.repeat.default, (local.args[0], repeats)),)


@rule(aten.repeat.default)
def repeat(call: Call) -> Rule:
    """Repeats are the outer factor of a dimension."""
    source, target = call.operands[0].shape, call.output.shape
    if 0 in target:
        raise RuleError("an empty tensor has no factors")
    lead = len(target) - len(source)
    padded = (1,) * lead + tuple(source)
    sizes = {f"n{d}": size for d, size in enumerate(padded)}
    sizes |= {f"r{d}": target[d] // size for d, size in enumerate(padded)}
    output: list[Dim] = [(f"r{d}", f"n{d}") for d in range(len(target))]
    inner: list[Dim] = [(f"n{d}",) for d in range(lead, len(target))]
    return rule_from(call, [inner], output, sizes=sizes, linear=[{0}], emit=_emit_repeat)


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call) -> Rule:
    """Repeats are the inner factor of a dimension."""
    source = call.operands[0].shape
    dim = call.named("dim")
    if dim is None or not isinstance(call.args[1], int) or 0 in source:
        raise RuleError("repeat_interleave of a flattened or an empty tensor")
    d = dim_index(dim, len(source))

    def emit(local: Call) -> tuple[Step, ...]:
        repeats = local.output.shape[d] // local.operands[0].shape[d]
        return (Step(local.target, (local.args[0], repeats, d)),)

    spec = dims(source)
    output = [*spec]
    output[d] = (f"d{d}", "repeat")
    sizes = {"repeat": call.args[1]} | {f"d{i}": size for i, size in enumerate(source)}
    return rule_from(call, [spec], output, sizes=sizes, linear=[{0}], emit=emit)


@rule(aten.flip.default)
def flip(call: Call) -> Rule:
    spec = dims(call.operands[0].shape)
    flipped = {f"d{d}" for d in dim_indices(call.args[1], len(spec))} if call.args[1] else set()
    return rule_from(call, [spec], spec, whole=flipped, linear=[{0}])


@rule(aten.roll.default)
def roll(call: Call) -> Rule:
    """Without dimensions the tensor is rolled flat."""
    spec = dims(call.operands[0].shape)
    rolled = {f"d{d}" for d in dim_indices(call.named("dims"), len(spec))}
    return rule_from(call, [spec], spec, whole=rolled, linear=[{0}])


@rule(aten.tril.default, aten.triu.default)
def triangle(call: Call) -> Rule:
    spec = dims(call.operands[0].shape)
    return rule_from(call, [spec], spec, whole={f for dim in spec[-2:] for f in dim}, linear=[{0}])
