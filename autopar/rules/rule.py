"""Operator rules in factor notation.

A rule names every dimension of an operator's operands and output by *factors*. ``"... i, o i[, o] -> ... o"``
says of ``linear`` that `o` is parallel and `i` is reduced. Parsed against an operator's actual shapes, a pattern
becomes a `Rule`: the only thing that analysis, labelling, code generation and the rule proof read.

Per mesh dimension an operator is labelled by one way of `Rule` (see `autopar.rules.variants`):

* One splittable factor is split. Operands with the factor are shards. Other operands are replicated, or partial if
  the factor is reduced and they are additive. The output is a shard, or partial if the factor is reduced.
* The operator is computed whole, as ``I -> I`` or ``R -> R``. Every vector-Jacobian product is linear in the cotangent.
  A partial operand is legal if the operator is linear in it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from autopar.errors import RuleError

Dim = tuple[str, ...]
Spec = tuple[Dim, ...]
Argument = Any  # an fx argument: node, number, list, None ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of an operand; `differentiable` says whether a cotangent may flow into it."""

    shape: tuple[int, ...]
    dtype: Any
    differentiable: bool = True


EXPERTS = "experts"
RING = ":ring"


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call: its target, its arguments with `Slot`s in place of tensors, and the shapes of the tensors.

    If it is the call of one rank, the shapes are local, and `split` has the mesh dimensions that split a factor. If
    ranks have the rows of their experts, the mesh dimension is under `EXPERTS`, and the number of rows is -1. If
    operands travel, it is under the factor with `RING` behind it.
    """

    target: Any
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]
    operands: tuple[TensorInfo, ...]
    output: TensorInfo
    split: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)  # ((mesh dimension, degree), ...)

    @staticmethod
    def of(
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: TensorInfo,
        info_of: Callable[[Any], TensorInfo | None],
    ) -> "tuple[Call, tuple[Any, ...]]":
        """A call and its tensor operands in slot order; `info_of` is None for an argument that is no tensor."""
        operands: list[Any] = []
        infos: list[TensorInfo] = []

        def slotted(value: Any) -> Argument:
            info = info_of(value)
            if info is not None:
                operands.append(value)
                infos.append(info)
                return Slot(len(operands) - 1)
            if isinstance(value, (list, tuple)):
                return tuple(slotted(v) for v in value) if isinstance(value, tuple) else [slotted(v) for v in value]
            return value

        slots, named = tuple(slotted(a) for a in args), {k: slotted(v) for k, v in kwargs.items()}
        return Call(target, slots, named, tuple(infos), output), tuple(operands)

    @property
    def key(self) -> object:
        """Equal for calls that are alike, whatever their operands are called."""
        return self.target, repr((self.args, self.kwargs)), self.operands, self.output

    def arg(self, index: int, name: str, default: Argument = None) -> Argument:
        """Argument by position or by name, else the default of the operator's schema, else `default`."""
        if index < len(self.args):
            return self.args[index]
        declared = getattr(getattr(self.target, "_schema", None), "arguments", ())
        known = next((a.default_value for a in declared if a.name == name), None)
        return self.kwargs.get(name, default if known is None else known)

    def named(self, name: str, default: Argument = None) -> Argument:
        """`arg` by its name in the operator's schema."""
        names = [argument.name for argument in self.target._schema.arguments]
        return self.arg(names.index(name) if name in names else len(self.args), name, default)

    def degree(self, factors: Sequence[str]) -> int:
        """By how much the mesh divides a product of factors that are reduced, hence even."""
        return prod(degree for factor in factors for _, degree in self.split.get(factor, ()))

    def mesh_dim(self, factor: str) -> "MeshDimRef | None":
        """The mesh dimension that splits a factor, or the two joined ones that do; None where none does."""
        names = [name for name, _ in self.split.get(factor, ())]
        return MeshDimRef("_".join(names)) if names else None

    def on_one_rank(
        self,
        operand_shapes: Iterable[tuple[int, ...]],
        output_shape: tuple[int, ...],
        split: Mapping[str, tuple[tuple[str, int], ...]],
    ) -> "Call":
        """The call as one rank makes it."""
        operands = tuple(replace(info, shape=s) for info, s in zip(self.operands, operand_shapes, strict=True))
        return replace(self, operands=operands, output=replace(self.output, shape=output_shape), split=split)


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the tensor operand `index` inside a call's arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class MeshDimRef:
    """Stands for a mesh dimension object inside emitted arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """One emitted operation; `Slot(-1)` in its arguments is the previous step's result."""

    target: Any
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument] = field(default_factory=dict)


Emit = Callable[[Call], tuple[Step, ...]]  # from the call of one rank


@dataclass(frozen=True, slots=True)
class Rule:
    """A parsed rule: factor names per operand dimension, and what may be done with each factor."""

    inputs: tuple[Spec, ...]
    output: Spec
    sizes: Mapping[str, int]  # of factors
    reduced: frozenset[str] = frozenset()  # factors that the output lacks
    whole: frozenset[str] = frozenset()  # factors that are never split
    additive: frozenset[int] = frozenset()  # operands that enter the output by addition
    linear: tuple[frozenset[int], ...] = ()  # each a set of operands that may be partial together
    invariant: frozenset[str] = frozenset()  # factors whose rewrite sums over ranks itself: its output is I
    outermost: frozenset[str] = frozenset()  # factors split only on the outermost axis: their rewrite computes offsets
    even: frozenset[str] = frozenset()  # factors that take no padding
    # operands of which a factor's rewrite sends half to one other rank in each pass; -1 is the output
    exchanged: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # a factor, and another one whose parts a second rewrite passes from rank to rank
    travels: Mapping[str, str] = field(default_factory=dict)
    is_routed: bool = False  # an operator between tokens and sorted rows (`autopar.rules.routed`)
    expert: str = ""  # the factor of its experts, if it has one
    flops: Callable[[Mapping[str, int]], float] | None = None  # multiply-adds from the sizes of factors
    emit: Emit | None = None  # the operations of one rank, if they are not the call itself
    known: bool = True  # False: no rule, the operator stays whole

    def steps(self, local: Call) -> tuple[Step, ...]:
        """The operations of one rank: the rule's emission, or the call itself."""
        return self.emit(local) if self.emit else (Step(local.target, local.args, local.kwargs),)

    def factor_flops(self) -> float:
        """Multiply-add FLOP of the whole operator, forward; 0 for operators that only move memory."""
        return self.flops(self.sizes) if self.flops else 0.0


_TOKEN = re.compile(r"\(|\)|\.\.\.|\S+?(?=[\s()]|$)")


def parse_operand(text: str) -> list[Dim | None]:
    """Dims of one operand; None stands for ``...``."""
    dims: list[Dim | None] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(text):
        if token == "(":
            group = []
        elif token == ")":
            assert group is not None, text
            dims.append(tuple(group))
            group = None
        elif token == "...":
            dims.append(None)
        elif group is not None:
            group.append(token)
        else:
            dims.append(() if token == "1" else (token,))
    return dims


def split_operands(text: str) -> list[str]:
    """Operands of the left side; ``[, o]`` marks an optional one."""
    return [part.strip() for part in text.replace("[,", ",").replace("]", "").split(",")]


def _bind(dims: list[Dim | None], shape: Sequence[int], sizes: dict[str, int], pattern: str) -> Spec:
    """Expand ``...`` to factors numbered from the right and read factor sizes off a shape."""
    count = len(shape) - sum(d is not None for d in dims)
    bound: list[Dim] = []
    for dim in dims:
        if dim is None:
            bound.extend((f".{count - 1 - i}",) for i in range(count))
        else:
            bound.append(dim)
    if count < 0 or len(bound) != len(shape):
        named = " ".join("..." if d is None else _shown(d) for d in dims)
        raise RuleError(f"rule {pattern!r}: {named!r} does not fit a tensor of shape {tuple(shape)}")
    for position, (dim, size) in enumerate(zip(bound, shape, strict=True)):
        unknown = [f for f in dim if f not in sizes]
        if dim and unknown and size == 1:  # a broadcast dimension has no axis
            bound[position] = ()
        elif len(unknown) > 1:
            raise RuleError(
                f"rule {pattern!r}: the sizes of {' and '.join(unknown)} cannot be told from dimension {position} of "
                f"{tuple(shape)}; one of them must stand alone in some operand"
            )
        elif len(unknown) == 1:
            sizes[unknown[0]], rest = divmod(size, prod(sizes[f] for f in dim if f != unknown[0]))
            if rest:
                raise _misfit(pattern, position, shape, dim, sizes)
        elif dim and not unknown and prod(sizes[f] for f in dim) != size:
            if size != 1:
                raise _misfit(pattern, position, shape, dim, sizes)
            bound[position] = ()
    return tuple(bound)


def _shown(dim: Dim) -> str:
    return dim[0] if len(dim) == 1 else f"({' '.join(dim)})" if dim else "1"


def _misfit(pattern: str, position: int, shape: Sequence[int], dim: Dim, sizes: Mapping[str, int]) -> RuleError:
    known = ", ".join(f"{f} = {sizes[f]}" for f in sorted({*sizes}))
    return RuleError(
        f"rule {pattern!r}: dimension {position} of a tensor of shape {tuple(shape)} is {shape[position]}, which is "
        f"not {_shown(dim)} where {known}"
    )


def parse(
    pattern: str,
    call: Call,
    *,
    sizes: Mapping[str, int] | None = None,
    whole: str = "",
    additive: Sequence[int] = (),
    linear: Sequence[Sequence[int]] = (),
    flops: Callable[[Mapping[str, int]], float] | None = None,
) -> Rule:
    """Bind a pattern to a call's shapes. `whole` is space-separated factor names."""
    left, right = pattern.split("->")
    operand_dims = [parse_operand(text) for text in split_operands(left)]
    if not len(operand_dims) - left.count("[") <= len(call.operands) <= len(operand_dims):
        raise RuleError(f"rule {pattern!r} names {len(operand_dims)} operands, the call has {len(call.operands)}")
    operand_dims = operand_dims[: len(call.operands)]
    known = dict(sizes or {})
    order = sorted(range(len(operand_dims)), key=lambda k: sum(len(d or ()) > 1 for d in operand_dims[k]))
    specs = {k: _bind(operand_dims[k], call.operands[k].shape, known, pattern) for k in order}
    inputs = tuple(specs[k] for k in range(len(operand_dims)))
    output = _bind(parse_operand(right), call.output.shape, known, pattern)
    return make_rule(
        inputs,
        output,
        known,
        whole=frozenset(whole.split()),
        additive=frozenset(additive),
        linear=tuple(frozenset(group) for group in linear),
        flops=flops,
    )


def make_rule(inputs: tuple[Spec, ...], output: Spec, sizes: Mapping[str, int], **options: Any) -> Rule:
    """A rule from explicit factor names. The output lacks the `reduced` factors; additive operands are added to it."""
    in_output = {f for dim in output for f in dim}
    used = in_output | {f for spec in inputs for dim in spec for f in dim}
    reduced = frozenset(f for f in used if f not in in_output)
    ordered = {f: n for f, n in sizes.items() if f in used}  # labels must come in the same order in every process
    empty = frozenset(f for f, size in ordered.items() if size == 0)
    options["whole"] = options.get("whole", frozenset()) | empty
    return Rule(inputs=inputs, output=output, sizes=ordered, reduced=reduced, **options)


def whole_rule(call: Call) -> Rule:
    """The rule of an operator that has none: every dimension its own factor, nothing splittable."""
    shapes = {f"x{k}.": operand.shape for k, operand in enumerate(call.operands)} | {"y.": call.output.shape}
    sizes = {f"{prefix}{d}": size for prefix, shape in shapes.items() for d, size in enumerate(shape)}
    *inputs, output = (tuple((f"{prefix}{d}",) for d in range(len(shape))) for prefix, shape in shapes.items())
    return Rule(inputs=tuple(inputs), output=output, sizes=sizes, whole=frozenset(sizes), known=False)
