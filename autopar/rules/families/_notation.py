"""Helpers that all families share: rules from explicit specs, broadcasting, and emissions with local attributes."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.rule import Call, Dim, Emit, Rule, Slot, Spec, Step, make_rule

PERMITTED_OPTIONS = frozenset({"additive", "invariant", "outermost", "even", "exchanged", "travels", "flops", "emit"})


def rule_from(
    call: Call,
    inputs: Sequence[Sequence[Dim]] | Mapping[int, Sequence[Dim]],
    output: Sequence[Dim],
    *,
    sizes: Mapping[str, int] | None = None,
    whole: Collection[str] = (),
    linear: Iterable[Collection[int]] = (),
    **options: Any,
) -> Rule:
    """A rule from one spec per operand, in order or by index, and one for the output.

    The sizes of packed factors are given in `sizes`.

    Factors of size 1 and broadcast dimensions become the empty product. A dimension without elements stays whole. Sets
    in `linear` that contain a bool are dropped: a sum over ranks of bools means nothing. Raises `RuleError` where a
    spec does not fit its shape.
    """
    assert options.keys() <= PERMITTED_OPTIONS, options
    shapes = [operand.shape for operand in call.operands]
    if len(inputs) != len(shapes):
        raise RuleError(f"{call.target}: a rule for {len(inputs)} operands met {len(shapes)}")
    known = dict(sizes or {})
    specs = [*([inputs[k] for k in sorted(inputs)] if isinstance(inputs, Mapping) else inputs), output]
    for spec, shape in zip(specs, [*shapes, call.output.shape], strict=True):
        if len(spec) != len(shape):
            raise RuleError(f"{call.target}: {spec} does not fit a tensor of shape {shape}")
        for dim, size in zip(spec, shape, strict=True):
            if len(dim) == 1 and dim[0] not in (sizes or {}):
                met = (size, known.get(dim[0], 1))
                known[dim[0]] = max(met) if all(met) else 0
    fitted = [_fit(call, s, shape, known) for s, shape in zip(specs, [*shapes, call.output.shape], strict=True)]
    used = {f for spec in fitted for dim in spec for f in dim}
    return make_rule(
        tuple(fitted[:-1]),
        fitted[-1],
        known,
        whole=frozenset(whole) & used,
        linear=linear_sets(call, linear),
        **{k: frozenset(v) if isinstance(v, (tuple, list, set)) else v for k, v in options.items()},
    )


def _fit(call: Call, spec: Sequence[Dim], shape: Sequence[int], sizes: Mapping[str, int]) -> Spec:
    fitted: list[Dim] = []
    for dim, size in zip(spec, shape, strict=True):
        kept = () if size == 1 else tuple(f for f in dim if sizes[f] != 1)
        if prod(sizes[f] for f in kept) != size:
            raise RuleError(f"{call.target}: dimension {dim} of {tuple(shape)} has not the size of {dict(sizes)}")
        fitted.append(kept)
    return tuple(fitted)


def linear_sets(call: Call, groups: Iterable[Collection[int]]) -> tuple[frozenset[int], ...]:
    """The sets of operands that may be partial together, without sets that contain a bool."""
    if call.output.dtype is torch.bool:
        return ()
    sets = [frozenset(group) for group in groups]
    return tuple(s for s in sets if s and all(call.operands[k].dtype is not torch.bool for k in s))


def dims(shape: Sequence[int], prefix: str = "d") -> list[Dim]:
    """One factor per dimension: ``d0 d1 ...``."""
    return [(f"{prefix}{i}",) for i in range(len(shape))]


def aligned(spec: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
    """The part of `spec` that an operand of `shape` has when it broadcasts against it: aligned at the right."""
    if len(shape) > len(spec):
        raise RuleError(f"{tuple(shape)} has more dimensions than {spec}")
    return list(spec[len(spec) - len(shape) :])


def broadcast(call: Call, spec: Sequence[Dim]) -> list[list[Dim]]:
    """Every operand aligned with `spec`."""
    return [aligned(spec, operand.shape) for operand in call.operands]


def slot_of(argument: Any) -> int:
    """The operand index of an argument that must be a tensor."""
    if not isinstance(argument, Slot):
        raise RuleError(f"expected a tensor operand, got {argument!r}")
    return argument.index


def is_zero(argument: Any) -> bool:
    return isinstance(argument, (int, float)) and argument == 0


def slots_of(arguments: Iterable[Any]) -> list[int]:
    """The operand indices of the tensors among some arguments."""
    return [a.index for a in arguments if isinstance(a, Slot)]


def dim_index(dim: int, rank: int) -> int:
    """A dimension as a number from the left. Raises `RuleError` when it is no number or out of range."""
    if not isinstance(dim, int) or not -max(rank, 1) <= dim < max(rank, 1):
        raise RuleError(f"dimension {dim!r} of a tensor with {rank}")
    return dim % max(rank, 1)


def dim_indices(dim: Any, rank: int) -> list[int]:
    """Dimensions given as None or empty (all), one number or a list, as numbers from the left."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(rank))
    return [dim_index(d, rank) for d in (dim if isinstance(dim, (list, tuple)) else [dim])] if rank else []


def places_whole(call: Call, places: Collection[int], linear: bool) -> Rule:
    """A rule: `places` of the first operand are whole and may change in size, and its other dimensions are parallel."""
    shape = call.operands[slot_of(call.args[0])].shape
    spec, output = ([(f"{s}{d}",) if d in places else (f"d{d}",) for d in range(len(shape))] for s in "xy")
    whole = {f"{side}{d}" for side in "xy" for d in places}
    return rule_from(call, [spec], output, whole=whole, linear=[{0}] if linear else [])


def original(call: Call) -> Step:
    """The call itself."""
    return Step(call.target, call.args, call.kwargs)


def emit_reshape(local: Call) -> tuple[Step, ...]:
    """The first operand reshaped to the local output shape."""
    return (Step(aten.reshape.default, (local.args[0], list(local.output.shape))),)


def emit_mean(factors: Collection[str]) -> Emit:
    """The call itself, a mean over local elements, divided by the number of ranks that hold the others."""

    def emit(local: Call) -> tuple[Step, ...]:
        degree = local.degree(tuple(factors))
        if degree == 1:
            return (original(local),)
        return (original(local), Step(aten.div.Tensor, (Slot(-1), degree)))

    return emit


def multiply_adds(sizes: Mapping[str, int]) -> float:
    """FLOP of a contraction: every combination of factors is one multiplication and one addition."""
    return 2.0 * prod(sizes.values())
