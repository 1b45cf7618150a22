"""Prove a rule on one call: run the operator whole and in shards, and compare outputs and gradients.

The proof assumes only the meaning of the types. An operand S is this rank's part of an axis, and its gradient is that
part. An operand R is the same on all ranks, and its gradient is the sum over the ranks. An operand P is a sum over
ranks, and each rank's gradient is the whole gradient.

An output S is put together from parts, and its cotangent is cut likewise. An output P is summed, and every rank has the
whole cotangent. An output I is the same on all ranks.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count
from math import prod
from typing import Any

import torch

from autopar.errors import RuleError, VerificationError
from autopar.ir.sharding import Dims, Mesh, Type, chunk
from autopar.lowering.graph_writer import REWRITES
from autopar.rules.families.random import draws_numbers
from autopar.rules.registry import operator_of, rule_for
from autopar.rules.rule import Call, Dim, Rule, Slot, Step, TensorInfo
from autopar.rules.variants import Bound, Variant, rewrites_fit, split_variants, whole_variants
from autopar.runtime.parameters.shards import all_shards, assemble, coordinates, local_shard

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex128: 1e-9, torch.complex64: 1e-4}
_DEGREES = (2, 3)
NUM_PAIRS = 6  # of splits on two mesh dimensions, per binding
Proved = frozenset[tuple[str, int]]


class Disproved(VerificationError):
    """Raised when sharded and whole results differ; names the operator, the split and the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleProof:
    """The proved splits of an operator's rule.

    `splits` counts the splits of each factor. Factors in `whole` are never split. `backward` says whether gradients
    were compared. It is off if no operand has a defined gradient.
    """

    operator: str
    splits: dict[str, int]
    whole: tuple[str, ...]
    backward: bool

    def __str__(self) -> str:
        split = ", ".join(f"{factor} ({n})" for factor, n in self.splits.items())
        whole = f"; whole: {', '.join(self.whole)}" if self.whole else ""
        return f"{self.operator}: proved {split}{whole}; {'gradients too' if self.backward else 'forward only'}"


@dataclass(frozen=True)
class OperatorSample:
    """A call with real tensors in slot order."""

    call: Call
    tensors: tuple[torch.Tensor, ...]


def prove_rule(target: Any, samples: Sequence[Any], *, seed: int = 0) -> RuleProof:
    """Prove the rule of an operator on sample calls.

    Each call runs whole and in shards, forward and backward, and the results are compared. The proof splits every
    factor over 2 and 3 ranks, alone and together with another factor, as a single axis and as a product of two. If a
    degree does not divide an axis, the shards hold padding: zeros in parameters and any values in other operands. The
    padding must not change other values.

    Args:
        target: The operator: ``torch.ops.mine.scale``, or the result of `torch.library.custom_op`.
        samples: Calls. Each is a tuple of positional arguments, or a pair of such a tuple and a dict of keyword
            arguments. Tensors lie on one device. float64 is compared to 1e-9, float32 to 1e-4. Together the samples
            must split every factor that may be split, so give sizes that 2 or 3 divide.
        seed: The seed of the drawn splits and values.

    Returns:
        The number of proved splits of each factor.

    Raises:
        RuleError: The operator has no rule, or a sample does not fit it.
        VerificationError: Shards compute something else than the whole operator, or no sample splits a factor.

    Example:
        >>> sample = (torch.randn(4, 6).double(), torch.randn(6, 12).double())
        >>> print(autopar.prove_rule(torch.ops.aten.mm.default, [sample]))
        aten.mm.default: proved m (2), k (1), n (2); gradients too
    """
    overload = operator_of(target)
    rng = random.Random(seed)
    splits: dict[str, int] = {}
    whole: set[str] = set()
    backward = False
    if not samples:
        raise RuleError(f"{overload}: nothing to prove the rule with; pass samples=[(tensor, ...), ...]")
    for arguments in samples:
        pair = len(arguments) == 2 and isinstance(arguments[0], tuple) and isinstance(arguments[1], dict)
        args, kwargs = arguments if pair else (arguments, {})
        sample = sample_of(overload, args, kwargs)
        rule = rule_for(sample.call)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            proved = prove(sample, rule, rng)
        whole |= rule.whole
        for factor in rule.sizes:
            if factor not in rule.whole:
                splits[factor] = splits.get(factor, 0) + sum(name == factor for name, _ in proved)
        backward = backward or _has_gradient(sample)
    missing = [factor for factor, n in splits.items() if not n]
    if missing:
        raise VerificationError(
            f"{overload}: no sample splits {', '.join(missing)}; pass one in which that size is a multiple of 2 or 3, "
            "or register it as whole"
        )
    return RuleProof(operator=str(overload), splits=splits, whole=tuple(sorted(whole)), backward=backward)


def _has_gradient(sample: OperatorSample) -> bool:
    call = sample.call
    leaves = [_leaf(t, info.differentiable) for t, info in zip(sample.tensors, call.operands, strict=True)]
    return run_steps((Step(call.target, call.args, call.kwargs),), leaves).requires_grad


def sample_of(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> OperatorSample:
    """The `Call` of real arguments, as an analysis would build it."""
    with torch.no_grad():
        output = target(*args, **kwargs)
    call, tensors = Call.of(target, args, kwargs, _info(output), _info_of)
    return OperatorSample(call, tensors)


def _info_of(value: Any) -> TensorInfo | None:
    return _info(value) if isinstance(value, torch.Tensor) else None


def _info(tensor: torch.Tensor) -> TensorInfo:
    differentiable = (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and not hasattr(tensor, "is_constant")
    return TensorInfo(tuple(tensor.shape), tensor.dtype, differentiable)


def bind_factors(rule: Rule, rng: random.Random | None) -> Bound:
    """Give every factor one axis. With `rng`, a factor of composite size may be drawn to have two."""
    fresh = count()
    factors = {f: tuple((next(fresh), size) for size in (_axes(n, rng) if rng else [n])) for f, n in rule.sizes.items()}

    def dims(spec: Sequence[Dim]) -> Dims:
        atoms = [[atom for f in dim for atom in factors[f]] for dim in spec]
        return Dims(tuple(tuple(s for _, s in dim) for dim in atoms), tuple(tuple(a for a, _ in dim) for dim in atoms))

    zero_padded = frozenset(() if rng is None or not rule.inputs else {rng.randrange(len(rule.inputs))})
    return Bound(rule, factors, tuple(dims(spec) for spec in rule.inputs), dims(rule.output), zero_padded)


def _axes(size: int, rng: random.Random) -> list[int]:
    divisors = [d for d in range(2, size) if size % d == 0]
    if not divisors or rng.random() < 0.2:
        return [size]
    outer = rng.choice(divisors)
    return [outer, size // outer]


def prove(sample: OperatorSample, rule: Rule, rng: random.Random) -> Proved:
    """Prove every variant of a rule for one call: the split factors and axes, of one axis each, then of two."""
    proved: set[tuple[str, int]] = set()
    single = bind_factors(rule, None)
    products = bind_factors(rule, rng)
    run_variants(sample, single, [], [])
    for bound in (single, products) if products.factors != single.factors else (single,):
        partial = [v for v in whole_variants(bound) if v.label.startswith("P:")]
        for variant in partial:
            run_variants(sample, bound, [variant], [2])
        for degree in _DEGREES:
            for variant in split_variants(bound, degree):
                if rewrites_fit(bound, [variant], [degree]) and run_variants(sample, bound, [variant], [degree]):
                    proved.add((variant.factor, variant.axis))
        for variants, degrees in _pairs(bound, partial, rng):
            run_variants(sample, bound, variants, degrees)
    return frozenset(proved)


def _pairs(
    bound: Bound, partial: Sequence[Variant], rng: random.Random
) -> Iterator[tuple[tuple[Variant, ...], list[int]]]:
    """Variants for two mesh dimensions at once, which never split the same axis, nor rewrite one factor twice."""
    ways = [(v, degree) for degree in _DEGREES for v in split_variants(bound, degree)] + [(v, 2) for v in partial]
    pairs = [
        pair
        for pair in combinations(ways, 2)
        if (not pair[0][0].factor or (pair[0][0].factor, pair[0][0].axis) != (pair[1][0].factor, pair[1][0].axis))
        and rewrites_fit(bound, [v for v, _ in pair], [degree for _, degree in pair])
    ]
    for pair in rng.sample(pairs, min(NUM_PAIRS, len(pairs))):
        chosen = list(pair)
        rng.shuffle(chosen)
        yield tuple(v for v, _ in chosen), [degree for _, degree in chosen]


def run_variants(sample: OperatorSample, bound: Bound, variants: Sequence[Variant], degrees: Sequence[int]) -> bool:
    """Prove one variant per mesh dimension together. False if a runtime function is emitted."""
    call, rule = sample.call, bound.rule
    split: dict[str, tuple[tuple[str, int], ...]] = {}
    for m, (variant, degree) in enumerate(zip(variants, degrees, strict=True)):
        if variant.factor:
            split[variant.factor] = (*split.get(variant.factor, ()), (f"m{m}", degree))
    types = [[variant.operands[k] for variant in variants] for k in range(len(call.operands))]
    out_types = [variant.output for variant in variants]
    shapes = (bound.operands[k].local_shape(types[k], degrees) for k in range(len(call.operands)))
    local = call.on_one_rank(shapes, bound.output.local_shape(out_types, degrees), split)
    steps = rule.steps(local)
    named = {step.target for step in steps if isinstance(step.target, str)}
    if named:
        assert named <= set(REWRITES), f"unknown runtime function in {named}"
        return False
    mesh = Mesh(tuple(f"m{i}" for i in range(len(degrees))), tuple(degrees))
    flows = [operand.differentiable for operand in call.operands]
    whole = [_leaf(t, flow) for t, flow in zip(sample.tensors, flows, strict=True)]
    reference = run_steps((Step(call.target, call.args, call.kwargs),), whole)
    cotangent = torch.randn_like(reference) if reference.requires_grad else None
    operand_parts = [
        _drawn_shards(t.detach(), bound.operands[k], types[k], mesh, zeros=k in bound.zero_padded)
        for k, t in enumerate(sample.tensors)
    ]
    leaves = [[_leaf(part, flow) for part in of_operand] for of_operand, flow in zip(operand_parts, flows, strict=True)]
    ranks = range(prod(degrees))
    where = f"{call.target} {[v.label for v in variants]} over {list(degrees)}"
    try:
        outputs = [run_steps(steps, [of_operand[r] for of_operand in leaves]) for r in ranks]
    except Exception as error:  # the operator did not raise this error on the whole
        raise Disproved(f"{where}: the operator does not take its shards: {type(error).__name__}: {error}") from error
    for output in outputs:
        if tuple(output.shape) != local.output.shape or output.dtype is not reference.dtype:
            raise Disproved(f"{where}: local output {tuple(output.shape)}, expected {local.output.shape}")
    if draws_numbers(call):
        return True
    combined = _assembled([o.detach() for o in outputs], bound.output, out_types, mesh)
    _compare(combined, reference.detach(), f"{where}: output")
    if cotangent is None:
        return True
    cuts = all_shards(cotangent, bound.output, [_flows_back(t) for t in out_types], mesh)
    _gradients(whole, reference, cotangent)
    for r in ranks:
        _gradients([of_operand[r] for of_operand in leaves], outputs[r], cuts[r])
    for k, tensor in enumerate(whole):
        if tensor.requires_grad:
            grads = [leaf.grad for leaf in leaves[k] if leaf.grad is not None]
            found = _assembled(grads, bound.operands[k], types[k], mesh, cotangent=True)
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


def _flows_back(kind: Type) -> Type:
    """The type of a cotangent. The cotangent of a partial value is the same on all ranks."""
    return Type("R") if kind.kind == "P" else kind


def _drawn_shards(
    value: torch.Tensor, dims: Dims, types: Sequence[Type], mesh: Mesh, *, zeros: bool
) -> list[torch.Tensor]:
    """The shards of all ranks, in rank order, padded by `zeros` or noise. Partial values get random summands."""
    partial_dims = [i for i, kind in enumerate(types) if kind.kind == "P"]
    whole_types = [Type("R") if kind.kind == "P" else kind for kind in types]
    summands: dict[tuple[int, ...], torch.Tensor] = {(): value}
    for i in partial_dims:
        summands = {
            (*at, rank): term for at, one in summands.items() for rank, term in enumerate(_terms(one, mesh.degrees[i]))
        }
    if not zeros:
        filled = {at: _with_filled_padding(one, dims, types, mesh) for at, one in summands.items()}
        dims, summands = next(iter(filled.values()))[1], {at: one for at, (one, _) in filled.items()}
    return [
        local_shard(summands[tuple(at[i] for i in partial_dims)], dims, whole_types, mesh, at)
        for at in coordinates(mesh)
    ]


def _terms(value: torch.Tensor, degree: int) -> list[torch.Tensor]:
    """Random tensors whose sum is the value."""
    is_whole = not (value.dtype.is_floating_point or value.dtype.is_complex)
    noise = [torch.randint_like(value, -5, 5) if is_whole else torch.randn_like(value) for _ in range(degree - 1)]
    return [*noise, value - sum(noise)]


def _with_filled_padding(
    value: torch.Tensor, dims: Dims, types: Sequence[Type], mesh: Mesh
) -> tuple[torch.Tensor, Dims]:
    """The value with every split axis filled up to equal shards by its own first elements, and its new dimensions."""
    sizes = [list(dim) for dim in dims.sizes]
    out = value.reshape([size for dim in sizes for size in dim])
    for kind, degree in zip(types, mesh.degrees, strict=True):
        if kind.kind == "S":
            size = sizes[kind.dim][kind.position]
            index, filled = sum(map(len, sizes[: kind.dim])) + kind.position, chunk(size, degree) * degree
            if filled > size:
                out = out.index_select(index, torch.arange(filled, device=out.device) % size)
                sizes[kind.dim][kind.position] = filled
    filled_dims = replace(dims, sizes=tuple(tuple(dim) for dim in sizes))
    return out.reshape(filled_dims.shape), filled_dims


def _assembled(
    shards: Sequence[torch.Tensor], dims: Dims, types: Sequence[Type], mesh: Mesh, *, cotangent: bool = False
) -> torch.Tensor:
    """The whole of all ranks' shards. Raises `Disproved` if ranks that must agree do not."""
    if shards[0].dtype is torch.bool and any(kind.kind == "P" for kind in types):
        raise Disproved("a sum over ranks of bools")

    def agree(one: torch.Tensor, other: torch.Tensor) -> float:
        _compare(one, other, "ranks that must agree")
        return 0.0

    return assemble(shards, dims, types, mesh, cotangent=cotangent, difference_of=agree)[0]


def _compare(found: torch.Tensor, expected: torch.Tensor | None, what: str) -> None:
    assert expected is not None
    tolerance = _TOLERANCE.get(expected.dtype, 0.0)
    if found.shape != expected.shape:
        raise Disproved(f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        wide = torch.complex128 if expected.dtype.is_complex else torch.float64
        error = (found.to(wide) - expected.to(wide)).abs().max()
        raise Disproved(f"{what} differs by up to {error:.2e}")
