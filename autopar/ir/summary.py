"""The counts and names of a plan that `Plan.explain` prints. They are written into the plan when it is made.

A summary decides nothing. A plan without a summary, written by hand, runs too.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from autopar.errors import PlanError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind on one mesh dimension in one pass of a block's call, with the bytes that a rank sends."""

    mesh_dim: str
    when: str  # "forward" or "backward"
    collective: str
    count: int
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSummary:
    """A distinct block: its number of calls, its collectives per call, the types of its results."""

    name: str
    num_calls: int
    num_operators: int
    traffic: tuple[Traffic, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSummary:
    """Parameters with the same split: a name with ``*`` for layer numbers, their number, the split per dimension."""

    name: str
    num_copies: int
    shape: tuple[int, ...]
    split: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutRule:
    """An operator that has no rule for its call. Every rank computes it whole."""

    operator: str
    where: str
    num_calls: int
    seconds: float  # of one rank in a step, forward and backward
    kept_bytes: int  # saved by one rank for the backward pass of a micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """A pipeline stage."""

    rank: int
    first: str  # its first block call
    last: str
    num_calls: int
    seconds: float  # of one rank and micro-batch, forward and backward
    num_parameters: int
    sent_bytes: int  # to the next stage, by one rank for a micro-batch
    recomputed: tuple[str, ...]  # values of earlier stages that this stage computes itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything that `Plan.explain` says beyond the plan itself."""

    without_rule: tuple[WithoutRule, ...]
    parameters: tuple[ParameterSummary, ...]
    blocks: tuple[BlockSummary, ...]
    once_a_step: tuple[str, ...]
    stages: tuple[StageSummary, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data: dict[str, Any] = asdict(self)
        return data

    @staticmethod
    def from_dict(data: Any, source: str = "summary") -> "Summary":
        """The inverse of `to_dict`. Raises `PlanError` on an unknown or missing key or a wrong type."""
        top = _checked(data, Summary, source)
        try:
            return Summary(
                without_rule=tuple(_made(WithoutRule, d, f"{source}: without_rule") for d in top["without_rule"]),
                parameters=tuple(
                    _made(ParameterSummary, d, f"{source}: parameters", shape=tuple) for d in top["parameters"]
                ),
                blocks=tuple(_block(d, f"{source}: blocks") for d in top["blocks"]),
                once_a_step=tuple(str(line) for line in top["once_a_step"]),
                stages=tuple(
                    _made(StageSummary, d, f"{source}: stages", recomputed=tuple) for d in top.get("stages", ())
                ),
            )
        except (TypeError, ValueError) as error:
            raise PlanError(f"{source}: {error}; write the plan again with `autopar plan`") from error


def _block(data: Any, source: str) -> BlockSummary:
    def traffic(items: Any) -> tuple[Traffic, ...]:
        return tuple(_made(Traffic, item, f"{source}: traffic") for item in items)

    made: BlockSummary = _made(BlockSummary, data, source, traffic=traffic, results=tuple)
    return made


def _made(kind: Any, data: Any, source: str, **convert: Any) -> Any:
    checked = _checked(data, kind, source)
    for field in fields(kind):
        value = checked[field.name]
        plain = {"int": int, "str": str, "float": float}.get(getattr(field.type, "__name__", str(field.type)))
        if plain is not None and type(value) is not plain:
            raise PlanError(f"{source}: {field.name}: expected {plain.__name__}, got {value!r}")
    return kind(**{name: convert.get(name, lambda v: v)(value) for name, value in checked.items()})


def _checked(data: Any, kind: Any, source: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise PlanError(f"{source}: expected an object, got {type(data).__name__}")
    known = [field.name for field in fields(kind)]
    for key in data:
        if key not in known:
            raise PlanError(f"{source}: unknown key {key!r}; {did_you_mean(str(key), known)}")
    optional = {field.name for field in fields(kind) if field.default is not MISSING}
    missing = [name for name in known if name not in data and name not in optional]
    if missing:
        raise PlanError(f"{source}: missing {missing}")
    return data
