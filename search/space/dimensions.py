"""The dimensions of the search space, and the constraints of a search.

    dimensions     their words in `fix`, `forbid` and plans, their values, their place in a plan
    constraints    the values that the user fixed or forbade, and the limits of the model and the cluster

A new dimension is an entry of `DIMENSIONS`. `autopar.search.space.candidates.candidates` lists the values of every
entry, and `Candidates` names its column. `tests/conformance/test_search_dimensions.py` runs over every entry.

`autopar.planning.options.PlanOptions` is the user's request. `Constraints` is the same request, checked for one model
on one cluster. Some words of ``fix`` are dimensions of the space (`WORDS`). The other words (`PINS`) hold for every
plan of the search. This module does not import numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import InputError, PlanError, Problem, did_you_mean
from autopar.ir.degrees import Degrees, degrees_from
from autopar.ir.offload import NO_OFFLOAD, OFFLOADS
from autopar.ir.rank_order import ORDERS, strides
from autopar.ir.schedules.registry import DEFAULT_SCHEDULE, SCHEDULE_NAMES, SCHEDULES, schedule_problems

MOST_VIRTUAL = 8  # stages of one rank; more stages send more than they save
ZERO = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One dimension."""

    word: str
    column: str | None  # of `Candidates`; None if other columns decide it
    beside: tuple[str, ...]  # the columns that the values depend on
    values: Callable[..., Iterable[int]]  # (limits, the columns of `beside`) -> values of the column
    names: tuple[str, ...] = ()  # the values if they are names; the column holds positions in it
    least: int = 1
    most: int | None = None
    # (value, whether the plan has a pipeline) -> fields of `Degrees`; None: the field called `word`
    to_degrees: Callable[[int, bool], Mapping[str, int]] | None = None
    of_degrees: Callable[[Degrees], Any] | None = None  # the value of a plan; None: the field called `word`

    def problem(self, path: str, value: Any) -> Problem | None:
        """The problem of a user's value. None if the value is legal."""
        if self.names:
            rule = f"must be one of {', '.join(self.names)}"
            return None if value in self.names else Problem(path=path, value=value, rule=rule)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and self.least <= value <= (value if self.most is None else self.most):
            return None
        rule = f"must be a whole number of at least {self.least}"
        if self.most is not None:
            *others, last = range(self.least, self.most + 1)
            rule = f"must be {', '.join(map(str, others))} or {last}"
        return Problem(path=path, value=value, rule=rule)

    def value_at(self, position: int) -> int | str:
        """The value that an element of the column stands for."""
        return self.names[position] if self.names else position

    def fields_of_degrees(self, position: int, *, has_pipeline: bool) -> Mapping[str, Any]:
        """The fields of `Degrees` for an element of the column."""
        if self.to_degrees is not None:
            return self.to_degrees(position, has_pipeline)
        return {self.word: self.value_at(position)}

    def value_of(self, degrees: Degrees) -> Any:
        """The value that a plan has."""
        return getattr(degrees, self.word) if self.of_degrees is None else self.of_degrees(degrees)


def _micro_batches(count: int, has_pipeline: bool) -> Mapping[str, int]:
    """A pipeline's schedule runs the micro-batches. Without a pipeline they are accumulated."""
    return {"accumulate": 1, "micro_batches": count} if has_pipeline else {"accumulate": count, "micro_batches": 1}


# ---- values, beside values of earlier dimensions ----


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, in order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def _tensor_degrees(limits: Constraints, num_devices: int) -> Iterable[int]:
    return (tp for tp in limits.tensor_degrees if num_devices % tp == 0)


def _pipeline_degrees(limits: Constraints, num_devices: int, tp: int) -> Iterable[int]:
    return (pp for pp in divisors(num_devices // tp) if pp <= limits.most_stages)


def _context_degrees(limits: Constraints, num_devices: int, tp: int, pp: int) -> Iterable[int]:
    return (cp for cp in limits.context_degrees if num_devices // (tp * pp) % cp == 0)


def _data_degree(limits: Constraints, num_devices: int, tp: int, pp: int, cp: int) -> Iterable[int]:
    dp = num_devices // (tp * pp * cp)
    return () if limits.batch_of_rank(dp) is None else (dp,)


def _orders_of_ranks(limits: Constraints, tp: int, pp: int, cp: int, dp: int) -> Iterable[int]:
    """The first allowed order, and the orders that may be faster."""
    allowed = [position for position, order in enumerate(ORDERS) if limits.allows("order", order)]
    if pp == 1 or dp == 1 or cp > 1:
        allowed = [position for position in allowed if position == 0]
    per_host, sizes = limits.devices_per_host, {"tp": tp, "pp": pp, "dp": dp}
    for position in allowed:
        span = pp * strides(ORDERS[position], sizes)["pp"]
        stays = per_host is not None and per_host % span == 0 and tp * pp * dp > per_host
        if position == allowed[0] or stays:
            yield position


def _expert_degrees(limits: Constraints, dp_shard: int) -> Iterable[int]:
    return (ep for ep in limits.expert_degrees if dp_shard % ep == 0)


def _zero_stages(limits: Constraints, cp: int, dp: int, dp_shard: int) -> Iterable[int]:
    """ZeRO 0 has no shards. One data-parallel rank without context ranks beside it has no ZeRO stage."""
    return (zero for zero in ZERO if (dp_shard == dp if zero == 0 else dp_shard * cp > 1))


def _micro_batch_sizes(limits: Constraints, dp: int) -> Iterable[int]:
    """All divisors of a rank's batch that leave the loss as it is."""
    local, singly = limits.batch_of_rank(dp) or 0, limits.accumulates_singly
    return (s for s in divisors(local) if s == local or (limits.accumulates and (s * dp > 1 or singly)))


def _numbers_of_micro_batches(limits: Constraints, dp: int, micro_batch: int) -> Iterable[int]:
    return ((limits.batch_of_rank(dp) or 0) // micro_batch,)


def _schedules(limits: Constraints, pp: int) -> Iterable[int]:
    """All schedules. Without a pipeline there is no order, so the default stands for all."""
    return range(len(SCHEDULE_NAMES)) if pp > 1 else (SCHEDULE_NAMES.index(DEFAULT_SCHEDULE),)


def _virtual_stages(limits: Constraints, pp: int, micro_batches: int, schedule: int) -> Iterable[int]:
    name = SCHEDULE_NAMES[schedule]
    kind = SCHEDULES[name]
    most = min(kind.most_stages or MOST_VIRTUAL, limits.most_stages // pp)
    every = range(kind.least_stages, most + 1) if pp > 1 else (1,)
    wanted = limits.num_stages
    legal = (v for v in every if pp == 1 or not schedule_problems(name, pp, v, micro_batches))
    return (virtual for virtual in legal if wanted in (None, pp * virtual))


# every dimension behind the dimensions that its values depend on; candidates are listed in this order
DIMENSIONS = (
    Dimension(word="tp", column="tp", beside=("num_devices",), values=_tensor_degrees),
    Dimension(word="pp", column="pp", beside=("num_devices", "tp"), values=_pipeline_degrees),
    Dimension(word="cp", column="cp", beside=("num_devices", "tp", "pp"), values=_context_degrees),
    Dimension(word="dp", column=None, beside=("num_devices", "tp", "pp", "cp"), values=_data_degree),
    Dimension(word="order", column="order", names=ORDERS, beside=("tp", "pp", "cp", "dp"), values=_orders_of_ranks),
    Dimension(word="dp_shard", column="dp_shard", beside=("dp",), values=lambda limits, dp: divisors(dp)),
    Dimension(word="ep", column="ep", beside=("dp_shard",), values=_expert_degrees),
    Dimension(
        word="dp_replicate",
        column="dp_replicate",
        beside=("dp", "dp_shard"),
        values=lambda limits, dp, dp_shard: (dp // dp_shard,),
    ),
    Dimension(word="zero", column="zero", least=0, most=3, beside=("cp", "dp", "dp_shard"), values=_zero_stages),
    Dimension(word="micro_batch", column="micro_batch", beside=("dp",), values=_micro_batch_sizes),
    Dimension(
        word="micro_batches",
        column="micro_batches",
        beside=("dp", "micro_batch"),
        values=_numbers_of_micro_batches,
        to_degrees=_micro_batches,
        of_degrees=lambda degrees: degrees.num_micro_batches,
    ),
    Dimension(word="schedule", column="schedule", names=SCHEDULE_NAMES, beside=("pp",), values=_schedules),
    Dimension(
        word="virtual_stages",
        column="virtual",
        beside=("pp", "micro_batches", "schedule"),
        values=_virtual_stages,
    ),
)
WORDS = tuple(dimension.word for dimension in DIMENSIONS)
BY_WORD = {dimension.word: dimension for dimension in DIMENSIONS}
BY_COLUMN = {dimension.column: dimension for dimension in DIMENSIONS if dimension.column is not None}

# ---- constraints ----

EVERY_BLOCK = 1_000_000  # `recompute_blocks` of a plan that recomputes all blocks
# words of `fix` with one value, which all plans of the search share
PINS = (
    *("sequence_parallel", "per_micro_batch", "recompute", "recompute_blocks", "cut_at", "regather", "loss_chunks"),
    *("precision", "reduce_dtype", "optimizer", "dispatch", "context"),
)
# words of `fix` and `forbid` with values that the search tries one after another, each in a search of its own
IN_TURN = {"offload": OFFLOADS}
_PRICED_AS = ("recompute", "recompute_blocks", "regather")  # pins that pricing decides if they are not given

Values = Mapping[str, tuple[Any, ...]]  # values by word


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Everything that decides which candidates a search lists.

    A candidate uses `num_devices` devices, or one of `fewer_devices`. Just one of `global_batch` and `local_batch` is
    given.
    """

    num_devices: int
    most_stages: int  # calls of the model that can be cut into stages
    tensor_degrees: tuple[int, ...]
    global_batch: int | None = None  # sequences of a step, of all ranks
    local_batch: int | None = None  # sequences of a step, of each data-parallel rank
    accumulates: bool = True  # whether the batch may be split in time without changing the loss
    accumulates_singly: bool = True  # whether a global micro-batch of it may be one sequence
    fewer_devices: tuple[int, ...] = ()
    context_degrees: tuple[int, ...] = (1,)
    expert_degrees: tuple[int, ...] = (1,)
    devices_per_host: float | None = None  # None: the order of ranks makes no difference
    fix: Values = field(default_factory=dict, hash=False)  # values that a word must have
    forbid: Values = field(default_factory=dict, hash=False)  # values that a word must not have
    cuts: tuple[int, ...] | None = None  # calls before which stages begin; None: chosen by the search

    def __post_init__(self) -> None:
        assert (self.global_batch is None) != (self.local_batch is None), (self.global_batch, self.local_batch)

    def narrowed(self, fix: Mapping[str, Any] | None = None, forbid: Mapping[str, Any] | None = None) -> Constraints:
        """The same limits with other values fixed and forbidden. Raises `InputError` as `checked_values` does."""
        fixed, forbidden = checked_values(fix, forbid)
        return replace(self, fix=fixed, forbid=forbidden)

    def allows(self, word: str, value: int | str) -> bool:
        """Whether a word may have a value."""
        return (word not in self.fix or value in self.fix[word]) and value not in self.forbid.get(word, ())

    @property
    def offloads(self) -> tuple[str, ...]:
        """The values of `offload` that a plan may have: the given ones, or else the ones that are not forbidden."""
        given = self.fix.get("offload", OFFLOADS)
        return tuple(value for value in OFFLOADS if value in given and self.allows("offload", value))

    @property
    def first_offloads(self) -> tuple[str, ...]:
        """The values that are searched whether memory is short or not."""
        if "offload" in self.fix or NO_OFFLOAD not in self.offloads:
            return self.offloads
        return (NO_OFFLOAD,)

    def batch_of_rank(self, dp: int) -> int | None:
        """Sequences of one of `dp` data-parallel ranks in a step; None if they do not divide the batch."""
        if self.global_batch is None:
            return self.local_batch
        return self.global_batch // dp if self.global_batch % dp == 0 else None

    @property
    def num_stages(self) -> int | None:
        """The number of stages of every plan, if `cuts` or `recompute_blocks` decide it."""
        counts = {"cut_at": len(self.cuts) + 1} if self.cuts is not None else {}
        if isinstance(blocks := recompute_blocks_of(self.fix), tuple):
            counts["recompute_blocks"] = len(blocks)
        if len(set(counts.values())) > 1:
            said = " and ".join(f"{word} {count}" for word, count in counts.items())
            raise PlanError(f"the numbers of stages differ: {said}; recompute_blocks has one number for every stage")
        return next(iter(counts.values()), None)

    def without_one(self) -> Iterator[tuple[str, Constraints]]:
        """The constraints without each dimension of `fix` and `forbid`, behind that dimension as text."""
        for kind, given in (("fix", self.fix), ("forbid", self.forbid)):
            for word, values in ((word, values) for word, values in given.items() if word in (*WORDS, *IN_TURN)):
                fewer: Any = {other: theirs for other, theirs in given.items() if other != word}
                yield f"{kind} {word} = {', '.join(map(str, values))}", replace(self, **{kind: fewer})


def checked_values(
    fix: Mapping[str, Any] | None = None, forbid: Mapping[str, Any] | None = None
) -> tuple[Values, Values]:
    """`fix` and `forbid` with a tuple of values for each word."""
    problems: list[Problem] = []
    checked: list[dict[str, tuple[Any, ...]]] = []
    for option, given in (("fix", fix), ("forbid", forbid)):
        checked.append({})
        for word, value in (given or {}).items():
            values = tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else (value,)
            if word in PINS and option == "fix":
                pinned, wrong = _pinned(word, value)
                problems += wrong
                checked[-1][word] = (pinned,)
            elif word in IN_TURN:
                rule = f"must be one of {', '.join(IN_TURN[word])}"
                wrong = [value for value in values if value not in IN_TURN[word]]
                problems += [Problem(path=f"{option} {word}", value=value, rule=rule) for value in wrong]
                checked[-1][word] = values
            elif word not in WORDS:
                known = (*WORDS, *IN_TURN, *PINS) if option == "fix" else (*WORDS, *IN_TURN)
                rule = "can only be fixed" if word in PINS else f"is unknown; {did_you_mean(word, known)}"
                problems.append(Problem(path=f"{option} {word}", rule=rule))
            else:
                problems += [p for v in values if (p := BY_WORD[word].problem(f"{option} {word}", v)) is not None]
                checked[-1][word] = values
    if checked[0].get("recompute") == ("auto",) and "recompute_blocks" in checked[0]:
        rule = "needs recompute = selective or full; with auto the search decides the blocks"
        problems.append(Problem(path="fix recompute_blocks", rule=rule))
    if problems:
        raise InputError("the search cannot be narrowed like this", problems)
    return checked[0], checked[1]


def recompute_blocks_of(fix: Values) -> int | tuple[int, ...] | None:
    """How many blocks of every stage, or of each stage, recompute under `fix`; None if it does not say."""
    if fix.get("recompute") == ("none",):
        return 0
    if "recompute_blocks" in fix:
        blocks: int | tuple[int, ...] = fix["recompute_blocks"][0]
        return blocks
    return EVERY_BLOCK if fix.get("recompute", ("auto",)) != ("auto",) else None


def is_selective(fix: Values) -> bool:
    """Whether plans may recompute selectively under `fix`. A number of blocks without a word means full."""
    return fix.get("recompute", ("full",) if "recompute_blocks" in fix else ("auto",))[0] in ("selective", "auto")


def most_level_of(fix: Values) -> int:
    """The highest level of recomputation of plans under `fix`, a position in `RECOMPUTE`."""
    return 1 if fix.get("recompute") == ("selective",) else 2


def shared_degrees(fix: Values) -> dict[str, Any]:
    """The fields of `Degrees` that `fix` gives to every plan and that pricing does not decide."""
    return {word: fix[word][0] for word in PINS if word in fix and word not in _PRICED_AS}


def _pinned(word: str, value: Any) -> tuple[Any, list[Problem]]:
    """The one value of a word of `PINS`, in the form that a plan or its degrees have."""
    if isinstance(value, tuple) and len(value) == 1 and word != "cut_at":
        value = value[0]
    if word == "regather":
        rule = "must be true or false"
        return value, [] if isinstance(value, bool) else [Problem(path=f"fix {word}", value=value, rule=rule)]
    try:
        return getattr(degrees_from({word: value}), word), []
    except PlanError as error:
        return value, [replace(problem, path=f"fix {problem.path}") for problem in error.problems]
