"""What a search found, as data: the best plan, those next to it and why they lose, and what could not be a plan.

This is what prints, what JSON holds and what a report draws; nothing here needs a model, a device or torch. Seconds,
bytes; parts of a whole are from 0 to 1.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from autopar.cost_model.estimate import COLLECTIVES, COMPUTE, OTHER

if TYPE_CHECKING:
    from autopar.ir.plan import Degrees, Plan

PARTS: Mapping[str, str] = {
    **COMPUTE,
    **{name: f"{dim} collectives: {what}" for name, (dim, what) in COLLECTIVES.items()},
    **OTHER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plan that was priced as it would run. `parts` make up `step_s`, `slower` is how much longer it takes than the
    best (0 for the best itself), `reason` what makes it so, `name` what people call it, if anything."""

    degrees: Mapping[str, Any] = field(hash=False)
    step_s: float
    needed_bytes: float
    fits: bool
    slower: float
    reason: str
    parts: Mapping[str, float] = field(hash=False)
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How many candidates there were, how many cannot fit because of their state alone or because of activations, how
    many were priced as they would run, and which tensor degrees the model does not allow."""

    candidates: int
    no_room_for_state: int
    no_room_for_activations: int
    priced: int
    refused: Mapping[int, str] = field(hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """Where nothing fits: the candidate that misses least, by how many bytes of a device, and what would help."""

    degrees: Mapping[str, Any] = field(hash=False)
    needed_bytes: float
    missing_bytes: float
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """`plan` runs as it is; it is None where nothing fits, and `closest` says by how much. No plan of the space can be
    faster than `bound_s`; `gap` is what one could save of the best step. Of `refined` variations of stage cuts one may
    be faster than the bound, which is for cuts that make the slowest stage fastest."""

    model: str
    cluster: str
    engine: str
    profile: str
    precision: str
    num_devices: int
    sequence: int
    global_batch: int
    device_bytes: float
    best: Contender | None
    refined: int
    others: tuple[Contender, ...]
    baselines: tuple[Contender, ...]
    bound_s: float | None
    gap: float
    is_proven: bool
    counted: Counted
    closest: Closest | None
    seconds: float
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    plan: "Plan | None" = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the plan included."""
        names = [name for name in self.__slots__ if name != "plan"]
        data = {name: _plain(getattr(self, name)) for name in names}
        return data | {"plan": None if self.plan is None else self.plan.to_dict()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    return value


def degrees_in_plain(degrees: "Degrees", cuts: tuple[int, ...]) -> dict[str, Any]:
    """Degrees as they stand in JSON."""
    found = {name: value for name, value in asdict(degrees).items() if value is not None}
    return found | {"cuts": list(cuts)}


def why_slower(best: Mapping[str, float], other: Mapping[str, float]) -> str:
    """What takes most more of a step than in the best plan."""
    more = {name: other[name] - best.get(name, 0.0) for name in other}
    name = max(more, key=lambda one: more[one])
    less = min(more, key=lambda one: more[one])
    text = f"{PARTS[name]}: {_time(more[name])} more"
    return f"{text}; {PARTS[less]}: {_time(-more[less])} less" if more[less] < -0.1 * more[name] else text


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
