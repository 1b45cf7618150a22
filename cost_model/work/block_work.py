"""The cost of one call of a block on one rank, as expressions in named sizes, and the values of these expressions.

An expression is a `Polynomial` in the symbols below, so that it can be stored and compared (`to_plain`, `from_plain`).
Nothing read from a file is ever evaluated as code. `evaluate` replaces all expressions of a block or family by numbers
or NumPy arrays at once. The steps of this evaluation are found once per block or family and cached.

Bytes of a value are its elements times the width of its captured dtype. A value that a 16-bit model computes in float32
counts four bytes per element.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from math import prod
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_type_hints

from autopar.cost_model.work.polynomials import Evaluation, Polynomial, Term, evaluation_of, total
from autopar.errors import InputError, Problem, did_you_mean, short_repr
from autopar.files.plain_data import read_plain
from autopar.ir.sharding import Mesh, owned_by
from autopar.lowering.conversions import Collective

if TYPE_CHECKING:
    from autopar.cost_model.work.polynomials import Number

SYMBOLS: Mapping[str, str] = {
    "b": "sequences of one rank's micro-batch",
    "s": "query tokens of a sequence",
    "S": "keys that a query may see",
    "h": "hidden width",
    "a": "query heads",
    "g": "key and value heads",
    "e": "width of a head",
    "f": "width of the feed-forward layer",
    "v": "vocabulary",
    "t": "tensor-parallel degree",
    "d": "data-parallel degree, without expert ranks",
    "ep": "expert-parallel degree",
    "cp": "context-parallel degree",
    "x": "experts",
    "y": "experts that work on a token",
    "m": "width of one expert",
    "w": "width of the shared experts together",
    "l": "positions of a learned position table",
    "q": "rank of the queries' projection (latent attention)",
    "c": "rank of the keys' and values' projection (latent attention)",
    "r": "rotated part of a head (latent attention)",
    "u": "width of a head's values (latent attention)",
}
_MOST_POWER = 16  # limit for symbols in a file; powers are evaluated as repeated products
_ONE_OF_TWO = re.compile(r"[tc]p\d")  # symbols of a captured model whose tensor or context degree is a product
_Kind = Literal["matmul", "attention", "memory", "again"]
Cause = Literal["value", "regather", "parameter", "inside", "beside"]
PASSES = 3  # products of a step for each product of the forward pass of a trained layer (`Operator.passes`)
ROLES = ("first", "layer", "moe_layer", "last")
VARIANTS = ("one", "tp", "sp")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator(Generic[V]):
    """One operator or fused group on one rank, in one call of its block for one micro-batch.

    matmul: `count` products of (m × k) · (k × n). `flops` = 2·count·m·n·k forward; backward has as many for the
    gradient of each operand (`only`). again: the product of this name, which backward computes again. Its `count` parts
    exist one after the other, so `m` × `n` elements of its result exist at once. attention: `count` is sequences times
    heads, `m` queries, `n` keys, `k` the width of a head. memory: no FLOP, m = n = k = count = 0. Bytes count reads and
    writes. Kernels are launches.
    """

    name: str
    kind: _Kind
    flops: V
    m: V
    n: V
    k: V
    count: V
    forward_bytes: V
    backward_bytes: V
    kernels_forward: int
    kernels_backward: int
    only: Literal["left", "right", "none"] | None = None  # the operand of a product that has a gradient; None: both
    sees: Literal["all"] | None = None  # the keys that a query of attention meets; None: those before it

    @property
    def passes(self) -> int:
        """Products of a step for each product of the forward pass: itself, and one for the gradient of each operand."""
        return {None: PASSES, "left": 2, "right": 2, "none": 1}[self.only]


def memory_operator(name: str, forward: V, backward: V, kernels: tuple[int, int], nothing: V) -> Operator[V]:
    """An operator that only moves bytes. `nothing` is zero."""
    sizes: dict[str, Any] = dict.fromkeys(("flops", "m", "n", "k", "count"), nothing)
    moved: dict[str, Any] = {"forward_bytes": forward, "backward_bytes": backward}
    return Operator(name=name, kind="memory", **sizes, **moved, kernels_forward=kernels[0], kernels_backward=kernels[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(Generic[V]):
    """One collective of one call of a block; `whole_bytes` is the tensor before it is scattered or once gathered.

    `of` is the cause: "value" if a value changes its types; "regather" if backward gathers a value again for a weight's
    gradient; "inside" if a rewritten operator sums over ranks; "beside" if it sends while it computes; "parameter" if
    gradients of a whole parameter are summed. The last sum may wait until the end of the step. `times` is the number of
    such collectives, one if None.
    """

    collective: Collective
    mesh_dim: str
    is_forward: bool
    whole_bytes: V
    of: Cause
    times: V | None = None

    @property
    def is_once_a_step(self) -> bool:
        """Whether it sums a parameter's gradient over ranks with other samples (`autopar.cost_model.step.step`)."""
        return self.of == "parameter" and owned_by(self.mesh_dim) != "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveWork(Generic[V]):
    """Selective recomputation of a block: the bytes that it still saves, and the operators that it computes again."""

    saved_bytes: V
    operators: tuple[Operator[V], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork(Generic[V]):
    """One block on one rank. Parameters are numbers of elements."""

    role: str
    products: tuple[Operator[V], ...]  # matrix products and attention
    eager: tuple[Operator[V], ...]  # every other operator by itself
    fused: tuple[Operator[V], ...]  # the same in maximal groups between products and collectives, one kernel each
    sent: tuple[Sent[V], ...]  # collectives and messages
    saved_eager_bytes: V  # of the tensors that torch's autograd saves for the backward pass
    saved_fused_bytes: V  # of the saved tensors if fused groups recompute their inner values
    saved_operand_bytes: V  # the part of `saved_fused_bytes` that only matrix products need
    input_bytes: V  # of the block's inputs, which full recomputation saves
    parameters_split: V  # split over tensor ranks
    parameters_whole: V  # whole on each tensor rank
    parameters_expert: V  # of experts, before expert parallelism divides them
    frozen_dense: V | None = None  # the part of split and whole parameters that is not trained
    frozen_expert: V | None = None  # the part of `parameters_expert` that is not trained
    selected: SelectiveWork[V] | None = None  # selective recomputation; None if no operators are chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[V]):
    """The blocks of a family of models by role and variant.

    The variants are "one" tensor rank, "tp" with several, and "sp" with several and sequence parallelism. Collectives
    end fused groups. Groups on one rank are therefore longer.
    """

    name: str
    source: str
    blocks: tuple[tuple[str, tuple[tuple[str, BlockWork[V]], ...]], ...]

    def block(self, role: str, variant: str) -> BlockWork[V]:
        """The block of a role. Raises `KeyError` if the family has none."""
        return dict(dict(self.blocks)[role])[variant]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for role, _ in self.blocks)

    def with_works(self, changed: Callable[[str, str, BlockWork[V]], BlockWork[V]]) -> Family[V]:
        """The family with ``changed(role, variant, work)`` in place of each block."""
        blocks = ((role, tuple((n, changed(role, n, work)) for n, work in each)) for role, each in self.blocks)
        return dataclasses.replace(self, blocks=tuple(blocks))


# ---- values ----


def evaluate(works: Any, numbers: Mapping[str, Number]) -> Any:
    """The same block, family or operator with floats in place of expressions, or arrays if `numbers` has arrays.

    Arrays must broadcast with each other. An expression without symbols becomes a plain number. Raises `InputError`
    naming the symbols that `numbers` lacks.
    """
    evaluation, build = _prepared(works)
    missing = [name for name in evaluation.names if name not in numbers]
    if missing:
        named = ", ".join(f"{name} ({SYMBOLS.get(name, 'a size of the model')})" for name in missing)
        raise InputError(f"no number for {named}; give one for every symbol of the expressions")
    return build(evaluation.values(numbers))


def sizes_on(mesh: Mesh, sequence: int | None, micro_batch: int | None = None) -> dict[str, float]:
    """The numbers of the symbols of a captured block's expressions on a mesh; one sequence without `micro_batch`."""
    numbers = {name: float(degree) for name, degree in mesh.as_dict().items()}
    numbers |= {"t": numbers.get("tp", 1.0), "d": numbers.get("dp", 1.0), "b": float(micro_batch or 1)}
    context = prod(mesh.degrees[i] for i in mesh.owning("sequence"))
    return numbers | {"s": float(sequence or 1) / context, "S": float(sequence or 1)}


@functools.cache
def _prepared(works: Any) -> tuple[Evaluation, Callable[[list[Any]], Any]]:
    """The evaluation of all expressions, and a function that puts their values in place."""
    leaves: dict[Polynomial, int] = {}
    build = _builder(works, leaves)
    return evaluation_of(tuple(leaves)), build


def _builder(value: Any, leaves: dict[Polynomial, int]) -> Callable[[list[Any]], Any]:
    """A function from the values of `leaves` to `value` with numbers."""
    if isinstance(value, Polynomial):
        position = leaves.setdefault(value, len(leaves))
        return lambda values: values[position]
    if isinstance(value, tuple):
        items = [_builder(item, leaves) for item in value]
        return lambda values: tuple([item(values) for item in items])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        parts = [(each.name, _builder(getattr(value, each.name), leaves)) for each in dataclasses.fields(value)]
        return lambda values: kind(**{name: part(values) for name, part in parts})
    return lambda values: value


def free_symbols(works: Any) -> tuple[str, ...]:
    """The names of all symbols of a block, family or operator, sorted."""
    return _prepared(works)[0].names


# ---- files ----


def to_plain(family: Family[Polynomial]) -> dict[str, Any]:
    """A family as plain data for JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, Polynomial):
            return [
                [c.numerator if c.denominator == 1 else [c.numerator, c.denominator], dict(p)] for c, p in value.terms
            ]
        if dataclasses.is_dataclass(value):
            every = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return {name: plain(v) for name, v in every.items() if v is not None}
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    blocks = {role: {name: plain(work) for name, work in works} for role, works in family.blocks}
    return {"name": family.name, "source": family.source, "blocks": blocks}


def from_plain(data: Any) -> Family[Polynomial]:
    """The family in the result of `to_plain`. Raises `InputError` with every problem of its content."""
    problems: list[Problem] = []
    if not isinstance(data, dict) or not isinstance(data.get("blocks"), dict):
        problems.append(Problem(path="", rule="must be an object with name, source and blocks"))
        data = {"blocks": {}}
    blocks = []
    for role, variants in data["blocks"].items():
        path = f"blocks.{role}"
        if role.partition(":")[0] not in ROLES:  # a captured model's repeated blocks are numbered, as layer:2
            problems.append(Problem(path=path, rule=f"must be one of {', '.join(ROLES)}"))
        elif not isinstance(variants, dict) or set(variants) != set(VARIANTS):
            problems.append(Problem(path=path, rule=f"must have the variants {' and '.join(VARIANTS)}"))
        else:
            blocks.append((role, _variants(variants, problems, path)))
    if problems:
        raise InputError("the blocks of a family cannot be used", problems)
    return Family(name=str(data.get("name", "")), source=str(data.get("source", "")), blocks=tuple(blocks))


def _variants(
    data: Mapping[str, Any], problems: list[Problem], path: str
) -> tuple[tuple[str, BlockWork[Polynomial]], ...]:
    """The blocks of a role's variants. Equal variants are read once: a captured model has only these."""
    works: dict[str, BlockWork[Polynomial]] = {}
    for name in VARIANTS:
        same = next((other for other in works if data[other] == data[name]), None)
        readers = {get_type_hints(BlockWork)["input_bytes"]: _expression}
        works[name] = works[same] if same else read_plain(BlockWork, data[name], problems, f"{path}.{name}", readers)
    return tuple(works.items())


def _expression(data: Any) -> Polynomial:
    return total(_term(item) for item in (data if isinstance(data, list) else [data]))


def _term(item: Any) -> Term:
    if not isinstance(item, list) or len(item) != 2 or not isinstance(item[1], dict):
        raise ValueError(f"must be a list of [coefficient, {{symbol: power}}]; got {short_repr(item)}")
    coefficient, powers = item
    pair = coefficient if isinstance(coefficient, list) else [coefficient, 1]
    if len(pair) != 2 or any(type(each) is not int for each in pair) or pair[1] < 1:
        rule = "a coefficient must be a whole number or [numerator, denominator]"
        raise ValueError(f"{rule}; got {short_repr(coefficient)}")
    for name, power in powers.items():
        if not (name in SYMBOLS or _ONE_OF_TWO.fullmatch(name)):
            raise ValueError(f"must be a power of a known symbol; {did_you_mean(name, tuple(SYMBOLS))}")
        if type(power) is not int or not 1 <= abs(power) <= _MOST_POWER:
            rule = f"a power must be a whole number from -{_MOST_POWER} to {_MOST_POWER}, not 0"
            raise ValueError(f"{rule}; got {short_repr(item)}")
    return Fraction(*pair), tuple(sorted(powers.items()))


@functools.cache
def family(name: str, *, over_data: bool = False) -> Family[Polynomial]:
    """The blocks of a family shipped with the package."""
    if name not in family_names():
        raise InputError(f"no blocks of a family {name!r}; {did_you_mean(name, family_names())}")
    folder = resources.files("autopar.cost_model.work") / "families"
    file = (folder / "over_data" if over_data else folder) / f"{name}.json"
    return from_plain(json.loads(file.read_text(encoding="utf-8")))


@functools.cache
def family_names() -> tuple[str, ...]:
    """The families shipped with the package, sorted."""
    folder = resources.files("autopar.cost_model.work") / "families"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))
