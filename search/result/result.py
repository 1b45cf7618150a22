"""What a search found, as data: the best plan, those next to it and why they lose, and what could not be a plan.

This is what prints, what JSON holds and what a report draws; nothing here needs a model, a device or torch. Seconds,
bytes; parts of a whole are from 0 to 1.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from autopar.cost_model.estimate import COLLECTIVES, COMPUTE, MEMORY, OTHER
from autopar.errors import InputError, Problem, short_repr
from autopar.files.plain_data import read_plain
from autopar.search.result.report_data import BlockGraph, Curve, Details, Points

if TYPE_CHECKING:
    from autopar.ir.degrees import Degrees
    from autopar.ir.plan import Plan

# objectives, and the units of their values
UNITS: Mapping[str, str] = {"time": "s", "cost": "USD", "energy": "J", "memory": "B"}
OBJECTIVES = tuple(UNITS)
ON_FEWER_DEVICES = ("cost", "energy")  # which are not known to be best on all devices
KIND, VERSION = "autopar search result", 1
_SAME = 5e-4  # of a value: what differs by less is told as equal, as it is in percent with one digit
PARTS: Mapping[str, str] = {
    **COMPUTE,
    **{name: f"{dim} collectives: {what}" for name, (dim, what) in COLLECTIVES.items()},
    **OTHER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plan that was priced as it would run. `parts` make up `step_s`, `slower` is how much longer it takes than the
    best (0 for the best itself), `value` what it costs in the search's `unit`, `reason` what makes that more, `name`
    what people call it, if anything. `formula_only` says what of it autopar prices and does not run."""

    degrees: Mapping[str, Any] = field(hash=False)
    step_s: float
    needed_bytes: float
    fits: bool
    slower: float
    reason: str
    parts: Mapping[str, float] = field(hash=False)
    value: float
    num_devices: int
    name: str = ""
    formula_only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A plan that no other beats in step time, bytes of its fullest rank and devices together; lower bounds of them,
    and of its `value`, unless it `is_exact`."""

    degrees: Mapping[str, Any] = field(hash=False)
    step_s: float
    needed_bytes: float
    num_devices: int
    value: float
    is_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How many candidates there were, how many cannot fit because of their state alone or because of activations, how
    many were priced as they would run, and which tensor degrees the model does not allow. `largest` is how many of
    those that do not fit have most of which part of memory, the most frequent first."""

    candidates: int
    no_room_for_state: int
    no_room_for_activations: int
    priced: int
    refused: Mapping[int, str] = field(hash=False)
    largest: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """Where nothing fits: the plan that needs least memory, by how many bytes of a device it misses, what they are for,
    and what would help, the cheapest change first."""

    degrees: Mapping[str, Any] = field(hash=False)
    needed_bytes: float
    missing_bytes: float
    remedy: str
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial of Optuna's: `params` are the candidate and what was varied, `value` what it costs (of the objective,
    seconds unless another was asked for; None where it was never told), `missing_bytes` what it is over a device's
    capacity, at most 0 where it fits. `source` is "enqueued: FSDP" and so on, "enumerated", "sampled", "resumed"
    or "another process"."""

    number: int
    params: Mapping[str, Any] = field(hash=False)
    value: float | None
    missing_bytes: float | None
    state: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """`plan` runs as it is; it is None where nothing fits, and `closest` says by how much. Values are of the
    `objective`, in its `unit`. No candidate can have a smaller one than `bound` (None where none fits); `gap` is what
    one could save of the best. `global_batch` are the sequences of the best plan's step, `front` the plans that no
    other beats in time, memory and devices together. Of `refined` variations with stages of their own one may be better
    than the bound, which is for the cut that makes the slowest stage fastest, and one number of recomputed blocks for
    all stages; `trials` are these, `importance` how much each of their parameters
    decides, as parts of 1. `details`, `points`, `what_if` and `block` are what a report draws; the last two are there
    where they were asked for. So is `beyond`, the best plan of those that need what no plan runs yet."""

    model: str
    cluster: str
    engine: str
    profile: str
    precision: str
    objective: str
    unit: str
    num_devices: int
    sequence: int
    global_batch: int
    device_bytes: float
    best: Contender | None
    refined: int
    others: tuple[Contender, ...]
    baselines: tuple[Contender, ...]
    bound: float | None
    gap: float
    is_proven: bool
    counted: Counted
    closest: Closest | None
    seconds: float
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    front: tuple[FrontPoint, ...] = ()
    trials: tuple[Trial, ...] = ()
    importance: Mapping[str, float] = field(default_factory=dict, hash=False)
    details: Details | None = field(default=None, compare=False)
    points: Points | None = field(default=None, compare=False)
    what_if: tuple[Curve, ...] = field(default=(), compare=False)
    beyond: Contender | None = None
    block: BlockGraph | None = field(default=None, compare=False)
    plan: "Plan | None" = field(default=None, compare=False)

    @property
    def saved_by_own_stages(self) -> float:
        """The part of the best candidate's value, which is proven, that the best plan's own stages save."""
        if self.best is None or self.bound is None or not self.is_proven:
            return 0.0
        saved = 1 - self.best.value / self.bound
        return saved if saved > _SAME else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the plan included."""
        names = [name for name in self.__slots__ if name != "plan"]
        data = {name: _plain(getattr(self, name)) for name in names}
        return {"kind": KIND, "version": VERSION, **data, "plan": None if self.plan is None else self.plan.to_dict()}

    @staticmethod
    def from_dict(data: Any, source: str = "search result") -> "SearchResult":
        """The inverse of `to_dict`. Raises `InputError` with every deviation, `PlanError` for those of the plan."""
        from autopar.ir.plan import Plan

        if not isinstance(data, Mapping) or data.get("kind") != KIND:
            raise InputError(f"{source} is no search result; write one with `autopar plan MODEL --cluster C --json`")
        version = data.get("version")
        if version != VERSION or isinstance(version, bool):
            raise InputError(f"{source}: version {short_repr(version)}, this autopar reads {VERSION}; search again")
        problems: list[Problem] = []
        readers = {Plan: lambda plan: Plan.from_dict(plan, f"{source}: plan")}
        fields_of_it = {name: value for name, value in data.items() if name not in ("kind", "version")}
        found: SearchResult = read_plain(SearchResult, fields_of_it, problems, readers=readers)
        if problems:
            raise InputError(f"{source} cannot be used", problems)
        return found


def _plain(value: Any) -> Any:
    """As `asdict` has it, with lists for tuples and without copies of what it holds."""
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return value


def degrees_in_plain(degrees: "Degrees", cuts: tuple[int, ...], *, regather: bool = True) -> dict[str, Any]:
    """Degrees as they stand in JSON; `regather` stands there where it is off."""
    found = {name: value for name, value in asdict(degrees).items() if value is not None}
    return found | {"cuts": list(cuts)} | ({} if regather else {"regather": False})


def why_slower(best: Mapping[str, float], other: Mapping[str, float]) -> str:
    """What takes most more of a step than in the best plan."""
    more = {name: other[name] - best.get(name, 0.0) for name in other}
    name = max(more, key=lambda one: more[one])
    less = min(more, key=lambda one: more[one])
    text = f"{PARTS[name]}: {_time(more[name])} more"
    return f"{text}; {PARTS[less]}: {_time(-more[less])} less" if more[less] < -0.1 * more[name] else text


def why_fuller(best: Mapping[str, float], other: Mapping[str, float]) -> str:
    """What takes most more of a rank's memory than in the best plan."""
    more = {name: other.get(name, 0.0) - best.get(name, 0.0) for name in MEMORY if name != "cache"}
    name = max(more, key=lambda one: more[one])
    return f"{MEMORY[name]}: {more[name] / 1e9:.2f} GB more"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
