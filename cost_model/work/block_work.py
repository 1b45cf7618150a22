"""What one call of a block costs on one rank, as expressions in named sizes, and their values.

An expression is a `Polynomial` in the symbols below. So it is stored (`to_json`, `from_json`; nothing read from a file
is ever evaluated as code) and compared. `evaluate` puts numbers or NumPy arrays in place of all expressions of a block
or family at once; how it does so is found once per block or family and kept.

Sizes are those of 16-bit training as captured: bytes of a value are its elements times its own width, so what a model
computes in float32 counts four bytes.
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
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from autopar.cost_model.work.polynomials import Evaluation, Polynomial, Term, evaluation_of, total
from autopar.errors import InputError, Problem, did_you_mean
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
    "d": "data-parallel degree",
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
_MOST_POWER = 16  # of a symbol in a file; powers are evaluated as repeated products
_TENSOR_DIM = re.compile(r"tp\d")  # of a captured model whose tensor degree is a product of several
_Kind = Literal["matmul", "attention", "memory"]
Cause = Literal["value", "regather", "parameter", "inside"]
ROLES = ("first", "layer", "moe_layer", "last")
VARIANTS = ("one", "tp", "sp")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator(Generic[V]):
    """One operator or fused group on one rank, in one call of its block for one micro-batch.

    matmul: `count` products of (m × k) · (k × n); `flops` = 2·count·m·n·k forward, twice that backward where both
    operands have gradients. attention: `count` is sequences times heads, `m` queries, `n` keys, `k` the width of a
    head. memory: no FLOP, m = n = k = count = 0. Bytes are what is read and written; kernels are launches.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(Generic[V]):
    """One collective of one call of a block; `whole_bytes` is the tensor before it is scattered or once gathered.

    `of` is "value" (its types change), "regather" (a gathered value gathered again for a weight's gradient, in place of
    keeping it), "inside" (a rewrite of an operator sums over ranks) or "parameter" (gradients of a whole parameter are
    summed, which may wait until the end of the step).
    """

    collective: Collective
    mesh_dim: str
    is_forward: bool
    whole_bytes: V
    of: Cause = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork(Generic[V]):
    """One block on one rank.

    `products` are matrix products and attention. `eager` is every other operator by itself, `fused` the same work as
    maximal groups between products and collectives, one kernel each. `saved_eager_bytes` is what torch's autograd
    keeps for the backward pass, `saved_fused_bytes` what products, attention and fused groups that recompute their
    inside need; `input_bytes` what full recomputation keeps. Parameters are elements on one rank: split over tensor
    ranks, whole on each of them, and of experts (which expert parallelism divides further).
    """

    role: str
    products: tuple[Operator[V], ...]
    eager: tuple[Operator[V], ...]
    fused: tuple[Operator[V], ...]
    sent: tuple[Sent[V], ...]
    saved_eager_bytes: V
    saved_fused_bytes: V
    input_bytes: V
    parameters_split: V
    parameters_whole: V
    parameters_expert: V


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[V]):
    """The blocks of a family of models by role and variant: "one" tensor rank, "tp" several of them, or "sp" several
    with sequence parallelism. Collectives end fused groups, which are therefore longer on one rank."""

    name: str
    source: str
    blocks: tuple[tuple[str, tuple[tuple[str, BlockWork[V]], ...]], ...]

    def block(self, role: str, variant: str) -> BlockWork[V]:
        """The block of a role. Raises `KeyError` where the family has none."""
        return dict(dict(self.blocks)[role])[variant]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for role, _ in self.blocks)


# ---- values ----


def evaluate(works: Any, numbers: Mapping[str, Number]) -> Any:
    """The same block, family or operator with numbers in place of expressions: floats, or arrays where `numbers` are.

    Arrays must broadcast with each other; an expression without symbols is a plain number. Raises `InputError`
    naming the symbols that `numbers` lacks.
    """
    evaluation, build = _prepared(works)
    missing = [name for name in evaluation.names if name not in numbers]
    if missing:
        named = ", ".join(f"{name} ({SYMBOLS.get(name, 'a size of the model')})" for name in missing)
        raise InputError(f"no number for {named}; give one for every symbol of the expressions")
    return build(evaluation.values(numbers))


@functools.cache
def _prepared(works: Any) -> tuple[Evaluation, Callable[[list[Any]], Any]]:
    """How all expressions' values follow from numbers, and what puts those in place."""
    leaves: dict[Polynomial, int] = {}
    build = _builder(works, leaves)
    return evaluation_of(tuple(leaves)), build


def _builder(value: Any, leaves: dict[Polynomial, int]) -> Callable[[list[Any]], Any]:
    """A function from values of `leaves`, to which the expressions in `value` are added, to `value` with numbers."""
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


def to_json(family: Family[Polynomial]) -> str:
    """One line per operator, so that a change of a family can be read."""

    def plain(value: Any) -> Any:
        if isinstance(value, Polynomial):
            return [
                [c.numerator if c.denominator == 1 else [c.numerator, c.denominator], dict(p)] for c, p in value.terms
            ]
        if dataclasses.is_dataclass(value):
            return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    records = {"kernels_forward", "is_forward"}  # keys of what stands in one line

    def lines(value: Any, indent: str) -> str:
        text = json.dumps(value, ensure_ascii=False)
        deep = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        deep = deep or (isinstance(value, dict) and not records & set(value))
        if len(text) + len(indent) <= 118 or not deep:
            return text
        inner = indent + "  "
        if isinstance(value, dict):
            parts = [f"{inner}{json.dumps(k)}: {lines(v, inner)}" for k, v in value.items()]
            return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
        return "[\n" + ",\n".join(inner + lines(v, inner) for v in value) + f"\n{indent}]"

    blocks = {role: {name: plain(work) for name, work in found} for role, found in family.blocks}
    return lines({"name": family.name, "source": family.source, "blocks": blocks}, "") + "\n"


def from_json(text: str) -> Family[Polynomial]:
    """Read what `to_json` wrote. Raises `InputError` with every problem of its content."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InputError(f"the blocks of a family are not valid JSON: {error}") from None
    return from_plain(data)


def from_plain(data: Any) -> Family[Polynomial]:
    """As `from_json`, of what the JSON holds."""
    problems: list[Problem] = []
    reader = _Reader(problems)
    family = reader.family(data)
    if problems or family is None:
        raise InputError("the blocks of a family cannot be used", problems)
    return family


class _Reader:
    """Plain data to dataclasses; collects problems and reads on."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems

    def fail(self, path: str, rule: str, value: object = None) -> None:
        self.problems.append(Problem(path=path, rule=rule, value=value))

    def family(self, data: Any) -> Family[Polynomial] | None:
        if not isinstance(data, dict) or not isinstance(data.get("blocks"), dict):
            self.fail("", "must be an object with name, source and blocks")
            return None
        blocks = []
        for role, variants in data["blocks"].items():
            if role.partition(":")[0] not in ROLES:  # a captured model's repeated blocks are numbered, as layer:2
                self.fail(f"blocks.{role}", f"must be one of {', '.join(ROLES)}")
            elif not isinstance(variants, dict) or set(variants) != set(VARIANTS):
                self.fail(f"blocks.{role}", f"must have the variants {' and '.join(VARIANTS)}")
            else:
                blocks.append((role, self.variants(role, variants)))
        return Family(name=str(data.get("name", "")), source=str(data.get("source", "")), blocks=tuple(blocks))

    def variants(self, role: str, data: Mapping[str, Any]) -> tuple[tuple[str, BlockWork[Polynomial]], ...]:
        """Those of a captured model are alike, and read once."""
        found: dict[str, BlockWork[Polynomial]] = {}
        for name in VARIANTS:
            alike = next((other for other in found if data[other] == data[name]), None)
            found[name] = found[alike] if alike else self.record(BlockWork, data[name], f"blocks.{role}.{name}")
        return tuple(found.items())

    def record(self, kind: Any, data: Any, path: str) -> Any:
        fields = {each.name: each for each in dataclasses.fields(kind)}
        if not isinstance(data, dict) or set(data) != set(fields):
            self.fail(path, f"must be an object with exactly the keys {', '.join(fields)}")
            return None
        values = {name: self.field(str(each.type), data[name], f"{path}.{name}") for name, each in fields.items()}
        return kind(**values)

    def field(self, kind: str, data: Any, path: str) -> Any:
        if kind == "V":
            return self.expression(data, path)
        if kind.startswith("tuple["):
            record = Operator if "Operator" in kind else Sent
            if not isinstance(data, list):
                self.fail(path, "must be a list")
                return ()
            return tuple(self.record(record, each, f"{path}[{i}]") for i, each in enumerate(data))
        wanted: type = {"int": int, "bool": bool}.get(kind, str)
        if type(data) is not wanted:
            self.fail(path, f"must be {wanted.__name__}", data)
        return data

    def expression(self, data: Any, path: str) -> Polynomial:
        found = (self.term(item, path) for item in (data if isinstance(data, list) else [data]))
        return total(term for term in found if term is not None)

    def term(self, item: Any, path: str) -> Term | None:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[1], dict):
            self.fail(path, "must be a list of [coefficient, {symbol: power}]", item)
            return None
        coefficient, powers = item
        pair = coefficient if isinstance(coefficient, list) else [coefficient, 1]
        if len(pair) != 2 or any(type(each) is not int for each in pair) or pair[1] < 1:
            self.fail(path, "a coefficient must be a whole number or [numerator, denominator]", coefficient)
            return None
        for name, power in powers.items():
            if not (name in SYMBOLS or _TENSOR_DIM.fullmatch(name)):
                self.fail(path, f"must be a power of a known symbol; {did_you_mean(name, tuple(SYMBOLS))}", item)
                return None
            if type(power) is not int or not 1 <= abs(power) <= _MOST_POWER:
                self.fail(path, f"a power must be a whole number from -{_MOST_POWER} to {_MOST_POWER}, not 0", item)
                return None
        return Fraction(*pair), tuple(sorted(powers.items()))


@functools.cache
def family(name: str, *, over_data: bool = False) -> Family[Polynomial]:
    """The blocks of a family shipped with the package; `over_data`: labelled over data-parallel ranks too, as autopar
    runs them. Raises `InputError` naming those there are."""
    if name not in family_names():
        raise InputError(f"no blocks of a family {name!r}; {did_you_mean(name, family_names())}")
    folder = resources.files("autopar.cost_model.work") / "families"
    return from_json(((folder / "over_data" if over_data else folder) / f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def family_names() -> tuple[str, ...]:
    """The families shipped with the package, sorted."""
    folder = resources.files("autopar.cost_model.work") / "families"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))
