"""Prove a rule on one call: run the operator whole and in shards, and compare outputs and gradients.

What a type means is all that is assumed. An operand S is this rank's part of an axis and its gradient is that part;
R is the same on all ranks and its gradient is the sum over them; P is a sum over ranks and each rank's gradient is
the whole one. An output S is put together from parts and its cotangent is cut likewise, P is summed and every rank
has the whole cotangent, I is the same on all ranks.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from autopar.ir.sharding import Dims, Type
from autopar.rules.families.random import is_random
from autopar.rules.rule import Call, Dim, Local, Rule, Slot, Step, TensorInfo
from autopar.rules.variants import Bound, Variant, split_variants, whole_variants

RUNTIME_FUNCTIONS = frozenset({"vocab_parallel_embedding", "vocab_parallel_cross_entropy_sum"})
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
Sizes = list[list[int]]


class Disproved(AssertionError):
    """Raised when sharded and whole results differ."""


@dataclass(frozen=True)
class Sample:
    """A call with real tensors in slot order."""

    call: Call
    tensors: tuple[torch.Tensor, ...]


def sample_of(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Sample:
    """The `Call` of real arguments, as an analysis would build it."""
    tensors: list[torch.Tensor] = []

    def slot(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return Slot(len(tensors) - 1)
        return [slot(v) for v in value] if isinstance(value, (list, tuple)) else value

    slotted = tuple(slot(a) for a in args)
    named = {k: slot(v) for k, v in kwargs.items()}
    with torch.no_grad():
        output = target(*args, **kwargs)
    infos = tuple(_info(t) for t in tensors)
    return Sample(Call(target, slotted, named, infos, _info(output)), tuple(tensors))


def _info(tensor: torch.Tensor) -> TensorInfo:
    differentiable = tensor.dtype.is_floating_point and not hasattr(tensor, "is_constant")
    return TensorInfo(tuple(tensor.shape), tensor.dtype, differentiable)


def bind(rule: Rule, rng: random.Random) -> Bound:
    """Give every factor its axes: one, or two where its size is composite and the draw says so."""
    fresh = count()
    factors = {f: tuple((next(fresh), size) for size in _axes(n, rng)) for f, n in rule.sizes.items()}

    def dims(spec: Sequence[Dim]) -> Dims:
        atoms = [[atom for f in dim for atom in factors[f]] for dim in spec]
        return Dims(tuple(tuple(s for _, s in dim) for dim in atoms), tuple(tuple(a for a, _ in dim) for dim in atoms))

    return Bound(rule, factors, tuple(dims(spec) for spec in rule.inputs), dims(rule.output))


def _axes(size: int, rng: random.Random) -> list[int]:
    divisors = [d for d in range(2, size) if size % d == 0]
    if not divisors or rng.random() < 0.4:
        return [size]
    outer = rng.choice(divisors)
    return [outer, size // outer]


def prove(sample: Sample, rule: Rule, rng: random.Random) -> int:
    """Prove every variant of a rule for one call; the number of split variants proved. Raises `Disproved`."""
    bound = bind(rule, rng)
    run_variants(sample, bound, [], [])
    for variant in whole_variants(bound):
        if variant.label.startswith("P:"):
            run_variants(sample, bound, [variant], [2])
    proved = 0
    for degree in (2, 3):
        for variant in split_variants(bound, degree):
            proved += run_variants(sample, bound, [variant], [degree])
    pair = split_variants(bound, 2)
    if len(pair) > 1:
        run_variants(sample, bound, rng.sample(pair, 2), [2, 2])
    return proved


def run_variants(sample: Sample, bound: Bound, variants: Sequence[Variant], degrees: Sequence[int]) -> bool:
    """Prove one variant per mesh dimension together; False where a runtime function is emitted."""
    call, rule = sample.call, bound.rule
    split: dict[str, tuple[tuple[str, int], ...]] = {}
    for m, (variant, degree) in enumerate(zip(variants, degrees, strict=True)):
        if variant.factor:
            split[variant.factor] = (*split.get(variant.factor, ()), (f"m{m}", degree))
    types = [[variant.operands[k] for variant in variants] for k in range(len(call.operands))]
    out_types = [variant.output for variant in variants]
    local = Local(
        tuple(bound.operands[k].local_shape(types[k], degrees) for k in range(len(call.operands))),
        bound.output.local_shape(out_types, degrees),
        split,
    )
    steps = rule.emit(call, local) if rule.emit else (Step(call.target, call.args, call.kwargs),)
    named = {step.target for step in steps if isinstance(step.target, str)}
    if named:
        assert named <= RUNTIME_FUNCTIONS, f"unknown runtime function in {named}"
        return False
    flows = [operand.differentiable for operand in call.operands]
    whole = [_leaf(t, flow) for t, flow in zip(sample.tensors, flows, strict=True)]
    reference = run_steps((Step(call.target, call.args, call.kwargs),), whole)
    cotangent = torch.randn_like(reference) if reference.requires_grad else None
    operand_parts = [
        parts(t.detach(), _sizes(bound.operands[k]), types[k], degrees) for k, t in enumerate(sample.tensors)
    ]
    leaves = [[_leaf(part, flow) for part in of_operand] for of_operand, flow in zip(operand_parts, flows, strict=True)]
    ranks = range(max(1, _product(degrees)))
    outputs = [run_steps(steps, [of_operand[r] for of_operand in leaves]) for r in ranks]
    where = f"{call.target} {[v.label for v in variants]} over {list(degrees)}"
    for output in outputs:
        if tuple(output.shape) != local.output_shape or output.dtype is not reference.dtype:
            raise Disproved(f"{where}: local output {tuple(output.shape)}, expected {local.output_shape}")
    if is_random(call):
        return True
    combined = combine([o.detach() for o in outputs], _sizes(bound.output), out_types, degrees, "P")
    _compare(combined, reference.detach(), f"{where}: output")
    if cotangent is None:
        return True
    cuts = parts(cotangent, _sizes(bound.output), [_flows_back(t) for t in out_types], degrees)
    _gradients(whole, reference, cotangent)
    for r in ranks:
        _gradients([of_operand[r] for of_operand in leaves], outputs[r], cuts[r])
    for k, tensor in enumerate(whole):
        if tensor.requires_grad:
            found = combine([leaf.grad for leaf in leaves[k]], _sizes(bound.operands[k]), types[k], degrees, "R")
            _compare(found, tensor.grad, f"{where}: gradient of operand {k}")
    return True


def run_steps(steps: Sequence[Step], operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run emitted steps on one rank's operands."""
    result: torch.Tensor | None = None

    def filled(value: Any) -> Any:
        if isinstance(value, Slot):
            return result if value.index == -1 else operands[value.index]
        return [filled(v) for v in value] if isinstance(value, (list, tuple)) else value

    for step in steps:
        result = step.target(*filled(step.args), **{k: filled(v) for k, v in step.kwargs.items()})
    assert result is not None
    return result


def _leaf(tensor: torch.Tensor, differentiable: bool) -> torch.Tensor:
    return tensor.detach().clone().contiguous().requires_grad_(differentiable)


def _gradients(leaves: Sequence[torch.Tensor], output: torch.Tensor, cotangent: torch.Tensor) -> None:
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf) if leaf.requires_grad else None
    if output.requires_grad:
        output.backward(cotangent)


def _product(degrees: Sequence[int]) -> int:
    return int(torch.tensor(list(degrees)).prod()) if degrees else 1


def _sizes(dims: Dims) -> Sizes:
    return [list(dim) for dim in dims.sizes]


def _flows_back(kind: Type) -> Type:
    """The type of a cotangent: that of a partial value is the same on all ranks."""
    return Type("R") if kind.kind == "P" else kind


def _cut(tensor: torch.Tensor, sizes: Sizes, kind: Type, degree: int) -> list[torch.Tensor]:
    axes = sizes[kind.dim]
    if axes[kind.position] % degree:
        raise Disproved(f"axis {kind} of {sizes} over {degree}")
    unflat = tensor.unflatten(kind.dim, axes).chunk(degree, kind.dim + kind.position)
    return [piece.flatten(kind.dim, kind.dim + len(axes) - 1) for piece in unflat]


def _shrunk(sizes: Sizes, kind: Type, degree: int) -> Sizes:
    copy = [list(dim) for dim in sizes]
    if kind.kind == "S":
        copy[kind.dim][kind.position] //= degree
    return copy


def parts(tensor: torch.Tensor, sizes: Sizes, types: Sequence[Type], degrees: Sequence[int]) -> list[torch.Tensor]:
    """Every rank's part of a tensor, the last mesh dimension fastest."""
    if not types:
        return [tensor]
    kind, degree = types[0], degrees[0]
    if kind.kind == "S":
        mine = _cut(tensor, sizes, kind, degree)
    elif kind.kind == "P":
        noise = [_noise(tensor) for _ in range(degree - 1)]
        mine = [*noise, tensor - sum(noise)]
    else:
        mine = [tensor] * degree
    rest = _shrunk(sizes, kind, degree)
    return [part for piece in mine for part in parts(piece, rest, types[1:], degrees[1:])]


def _noise(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return torch.randn_like(tensor)
    return torch.randint_like(tensor, -5, 5)


def combine(
    pieces: Sequence[torch.Tensor], sizes: Sizes, types: Sequence[Type], degrees: Sequence[int], summed: str
) -> torch.Tensor:
    """The whole of every rank's part. Parts of type `summed` are added, other unsharded ones must be equal."""
    if not types:
        return pieces[0]
    kind, degree = types[0], degrees[0]
    size = len(pieces) // degree
    rest = _shrunk(sizes, kind, degree)
    mine = [combine(pieces[r * size : (r + 1) * size], rest, types[1:], degrees[1:], summed) for r in range(degree)]
    if kind.kind == summed:
        if mine[0].dtype is torch.bool:
            raise Disproved("a sum over ranks of bools")
        return torch.stack(mine).sum(0).to(mine[0].dtype)
    if kind.kind != "S":
        for piece in mine[1:]:
            _compare(piece, mine[0], "ranks that must agree")
        return mine[0]
    unflat = [piece.unflatten(kind.dim, rest[kind.dim]) for piece in mine]
    joined = torch.cat(unflat, kind.dim + kind.position)
    return joined.flatten(kind.dim, kind.dim + len(rest[kind.dim]) - 1)


def _compare(found: torch.Tensor, expected: torch.Tensor | None, what: str) -> None:
    assert expected is not None
    tolerance = TOLERANCE.get(expected.dtype, 0.0)
    if found.shape != expected.shape:
        raise Disproved(f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        error = (found.double() - expected.double()).abs().max()
        raise Disproved(f"{what} differs by up to {error:.2e}")
