"""The result of a search as data: the best plan, the plans next to it and why they are worse, and the candidates.

Commands print it, JSON holds it and reports draw it; nothing here needs a model, a device or torch. Times are in
seconds, sizes in bytes; parts of a whole are from 0 to 1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autopar.cost_model.interval import DEFAULT_CHANCE
from autopar.cost_model.parts import COLLECTIVES, COMPUTE, MEMORY, OTHER
from autopar.errors import InputError, PlanError, Problem
from autopar.files.plain_data import content_of, plain_of, read_plain
from autopar.ir.degrees import Degrees, degrees_from
from autopar.ir.sharding import Type
from autopar.search.result.report_data import BlockGraph, Curve, Details, Points
from autopar.words.numbers import readable_seconds

if TYPE_CHECKING:
    from autopar.ir.plan import Plan

# objectives, and the units of their values
UNITS: Mapping[str, str] = {"time": "s", "cost": "USD", "energy": "J", "memory": "B"}
OBJECTIVES = tuple(UNITS)
ON_FEWER_DEVICES = ("cost", "energy")  # objectives that may be better on fewer devices
KIND, VERSION = "autopar search result", 2
_SAME = 5e-4  # of a value: smaller differences count as equal, because percentages have one digit
PARTS: Mapping[str, str] = {
    **COMPUTE,
    **{name: f"{dim} collectives: {what}" for name, (dim, what) in COLLECTIVES.items()},
    **OTHER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plan beside the best plan.

    A plan of the front has neither parts nor a reason. If it was not priced, its figures are lower bounds.
    """

    degrees: Mapping[str, Any] = field(hash=False)
    step_s: float
    peak_bytes: float  # of the fullest rank
    fits: bool = True
    slower: float = 0.0  # how much longer the step is than the best plan's, as a part of it
    reason: str = ""  # why its value is larger than the best plan's
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)  # seconds that sum to `step_s`
    value: float  # of the search's objective
    num_devices: int
    name: str = ""  # "FSDP" and so on, of a baseline
    formula_only: tuple[str, ...] = ()  # features that autopar prices and does not run
    is_exact: bool = True  # it was priced
    is_like_best: bool = False  # its step is so little longer that measured steps may be in the other order


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCounts:
    """The numbers of candidates of a search."""

    candidates: int
    no_room_for_state: int  # parameters, gradients and optimizer state alone do not fit
    no_room_for_activations: int  # the state fits, but not with activations
    priced: int  # exactly
    refused: Mapping[str, str] = field(hash=False)  # the degrees that the model does not allow, and why
    # candidates that do not fit, by the largest part of their memory; the most frequent part first
    largest: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """The plan that needs least memory, if no plan fits."""

    degrees: Mapping[str, Any] = field(hash=False)
    peak_bytes: float  # of the fullest rank
    missing_bytes: float  # over the capacity of a device
    remedy: str  # changes with which a plan fits, the cheapest first
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)  # bytes that sum to `peak_bytes`


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial of an Optuna study."""

    number: int
    params: Mapping[str, Any] = field(hash=False)  # the candidate, and the blocks moved out of its first and last stage
    value: float | None  # of the objective; None if the trial did not end
    missing_bytes: float | None  # over a device's capacity; at most 0 if the plan fits
    state: str
    source: str  # "enqueued: FSDP" and so on, "enumerated", "sampled", "resumed" or "another process"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of `autopar.plan`: the best plan, the plans next to it and why they are worse, and the proof.

    Values are of the `objective`, in `unit`: seconds, US dollars, joules or bytes. `to_dict` and `from_dict` write and
    read it as JSON.

    >>> import torch, autopar
    >>> model, batch = torch.nn.Linear(8, 8), (torch.zeros(4, 8), torch.zeros(4, 8))
    >>> loss = torch.nn.functional.mse_loss
    >>> result = autopar.plan(model, "2xcpu", example_inputs=batch, loss_fn=loss, global_batch=8)
    >>> result.best.fits, result.gap
    (True, 0.0)
    """

    model: str
    cluster: str
    engine: str
    profile: str
    precision: str
    objective: str
    unit: str
    num_devices: int
    sequence: int  # tokens
    global_batch: int  # sequences of the best plan's step
    device_bytes: float
    best: Contender | None  # None if no plan fits
    # the measured step time and memory of the best plan are between these in four of five runs
    step_interval_s: tuple[float, float] | None = None
    peak_interval_bytes: tuple[float, float] | None = None
    chance: float = DEFAULT_CHANCE  # with which a plan must fit
    chance_of_fitting: float | None = None  # of the best plan
    refined: int  # number of `trials`
    others: tuple[Contender, ...]  # the best plans of other degrees
    baselines: tuple[Contender, ...]  # plans that people choose by hand
    bound: float | None  # no candidate has a smaller value; None if none fits
    gap: float  # the part of the best value that a better candidate could save, from 0 to 1
    is_proven: bool  # whether no candidate is better than the best one; plans of `trials` may be
    counted: CandidateCounts
    closest: Closest | None  # if no plan fits: the plan that needs least memory
    seconds: float  # duration of the search
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    front: tuple[Contender, ...] = ()  # plans that no other plan beats in time, memory and devices together
    trials: tuple[Trial, ...] = ()  # variations of stage cuts, and of blocks that each stage recomputes
    # how much each parameter of trials decides, as parts of 1; with a study, how much each degree decides
    importance: Mapping[str, float] = field(default_factory=dict, hash=False)
    details: Details | None = field(default=None, compare=False)  # the best plan rank by rank
    points: Points | None = field(default=None, compare=False)  # candidates, for a scatter plot
    what_if: tuple[Curve, ...] = field(default=(), compare=False)  # only if a report was asked for
    block: BlockGraph | None = field(default=None, compare=False)  # only if a report was asked for
    plan: "Plan | None" = field(default=None, compare=False)  # the best plan, as it runs; None if no plan fits

    @property
    def like_best(self) -> tuple[Contender, ...]:
        """The next plans that cannot be told apart from the best plan without a measurement."""
        return tuple(plan for plan in self.others if plan.is_like_best)

    @property
    def saved_by_own_stages(self) -> float:
        """The part of the proven best candidate's value that the best plan saves by stages of its own, from 0 to 1."""
        if self.best is None or self.bound is None or not self.is_proven:
            return 0.0
        saved = 1 - self.best.value / self.bound
        return saved if saved > _SAME else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the plan included.

        Returns:
            Dicts, lists, texts and numbers by the names of the fields, with "kind" and "version".

        >>> import torch, autopar
        >>> model, batch = torch.nn.Linear(8, 8), (torch.zeros(4, 8), torch.zeros(4, 8))
        >>> loss = torch.nn.functional.mse_loss
        >>> found = autopar.plan(model, "2xcpu", example_inputs=batch, loss_fn=loss, global_batch=8)
        >>> found.to_dict()["kind"]
        'autopar search result'
        """
        return {"kind": KIND, "version": VERSION, **plain_of(self, {Type: str})}

    @staticmethod
    def from_dict(data: Any, source: str = "search result") -> "SearchResult":
        """The inverse of `to_dict`.

        Args:
            data: Plain data, as JSON has it.
            source: The name of the data in messages.

        Returns:
            The result, equal to the written one.

        Raises:
            InputError: The data is no search result of this version; the message names every deviation.
            PlanError: The plan in it cannot be read.

        >>> import torch, autopar
        >>> model, batch = torch.nn.Linear(8, 8), (torch.zeros(4, 8), torch.zeros(4, 8))
        >>> loss = torch.nn.functional.mse_loss
        >>> found = autopar.plan(model, "2xcpu", example_inputs=batch, loss_fn=loss, global_batch=8)
        >>> autopar.SearchResult.from_dict(found.to_dict()) == found
        True
        """
        from autopar.ir.plan import Plan

        content = content_of(data, KIND, VERSION, source, command="plan", again="search again")
        problems: list[Problem] = []
        readers = {Plan: lambda plan: Plan.from_dict(plan, f"{source}: plan")}
        result: SearchResult = read_plain(SearchResult, content, problems, readers=readers)
        problems += [] if problems else _wrong_values(result)
        if problems:
            raise InputError(f"{source} cannot be used", problems)
        return result


def _wrong_values(result: SearchResult) -> Iterator[Problem]:
    """What types do not say: degrees that a plan may have, numbers of devices, and columns of equal length."""
    plans: dict[str, Contender | Closest | None] = {"best": result.best, "closest": result.closest}
    for name in ("others", "baselines", "front"):
        plans |= {f"{name}[{at}]": plan for at, plan in enumerate(getattr(result, name))}
    for path, plan in plans.items():
        given = {} if plan is None else {k: v for k, v in plan.degrees.items() if k not in ("cuts", "regather")}
        try:
            degrees_from(given)
        except PlanError as error:
            yield from (replace(problem, path=f"{path}.degrees.{problem.path}") for problem in error.problems)
        if isinstance(plan, Contender) and not 1 <= plan.num_devices <= result.num_devices:
            rule = f"must be from 1 to {result.num_devices}, the devices of the cluster"
            yield Problem(path=f"{path}.num_devices", value=plan.num_devices, rule=rule)
    columns = {} if result.points is None else result.points.columns
    for name, column in columns.items():
        kind: Any = str if name == "schedule" else int | float
        if len(column) != len(next(iter(columns.values()))) or not all(isinstance(value, kind) for value in column):
            rule = f"must be {'texts' if kind is str else 'numbers'}, as many as in the other columns"
            yield Problem(path=f"points.columns.{name}", rule=rule)


def degrees_in_plain(degrees: Degrees, cuts: tuple[int, ...], *, regather: bool = True) -> dict[str, Any]:
    """Degrees as they stand in JSON. `regather` is only written if it is off, `loss_chunks` if it is on."""
    plain = {name: value for name, value in asdict(degrees).items() if value is not None}
    if degrees.loss_chunks == 1:
        del plain["loss_chunks"]
    return plain | {"cuts": list(cuts)} | ({} if regather else {"regather": False})


def why_slower(best: Mapping[str, float], other: Mapping[str, float]) -> str:
    """The part of a step that exceeds the best plan's by most seconds; nothing if no part does."""
    more = {name: other[name] - best.get(name, 0.0) for name in other}
    name = max(more, key=lambda part: more[part])
    less = min(more, key=lambda part: more[part])
    if more[name] <= 0:
        return ""
    text = f"{PARTS[name]}: {readable_seconds(more[name])} more"
    return f"{text}; {PARTS[less]}: {readable_seconds(-more[less])} less" if more[less] < -0.1 * more[name] else text


def why_fuller(best: Mapping[str, float], other: Mapping[str, float]) -> str:
    """The part of a rank's memory that exceeds the best plan's by most bytes."""
    more = {name: other.get(name, 0.0) - best.get(name, 0.0) for name in MEMORY}
    name = max(more, key=lambda part: more[part])
    return f"{MEMORY[name]}: {more[name] / 1e9:.2f} GB more"
