"""The dimensions of the search space: their words in `fix`, `forbid` and plans, their values, their place in a plan.

A new dimension is an entry of `DIMENSIONS`. `autopar.search.space.candidates.candidates` lists the values of every
entry, and `Candidates` names its column. `tests/conformance/test_search_dimensions.py` runs over every entry. This
module does not import numpy.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.errors import Problem
from autopar.ir.degrees import Degrees
from autopar.ir.rank_order import ORDERS, strides
from autopar.ir.schedules.registry import DEFAULT_SCHEDULE, SCHEDULE_NAMES, SCHEDULES, schedule_problems

MOST_VIRTUAL = 8  # stages of one rank; more stages send more than they save
ZERO = (0, 1, 2, 3)


class Limits(Protocol):
    """The limits of a search (`autopar.search.space.constraints.Constraints`)."""

    @property
    def most_stages(self) -> int: ...
    @property
    def tensor_degrees(self) -> tuple[int, ...]: ...
    @property
    def accumulates(self) -> bool: ...
    @property
    def accumulates_singly(self) -> bool: ...
    @property
    def context_degrees(self) -> tuple[int, ...]: ...
    @property
    def expert_degrees(self) -> tuple[int, ...]: ...
    @property
    def devices_per_host(self) -> float | None: ...
    @property
    def num_stages(self) -> int | None: ...
    def allows(self, word: str, value: int | str) -> bool: ...
    def batch_of_rank(self, dp: int) -> int | None: ...


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


def _tensor_degrees(limits: Limits, num_devices: int) -> Iterable[int]:
    return (tp for tp in limits.tensor_degrees if num_devices % tp == 0)


def _pipeline_degrees(limits: Limits, num_devices: int, tp: int) -> Iterable[int]:
    return (pp for pp in divisors(num_devices // tp) if pp <= limits.most_stages)


def _context_degrees(limits: Limits, num_devices: int, tp: int, pp: int) -> Iterable[int]:
    return (cp for cp in limits.context_degrees if num_devices // (tp * pp) % cp == 0)


def _data_degree(limits: Limits, num_devices: int, tp: int, pp: int, cp: int) -> Iterable[int]:
    dp = num_devices // (tp * pp * cp)
    return () if limits.batch_of_rank(dp) is None else (dp,)


def _orders_of_ranks(limits: Limits, tp: int, pp: int, cp: int, dp: int) -> Iterable[int]:
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


def _expert_degrees(limits: Limits, dp_shard: int) -> Iterable[int]:
    return (ep for ep in limits.expert_degrees if dp_shard % ep == 0)


def _zero_stages(limits: Limits, cp: int, dp: int, dp_shard: int) -> Iterable[int]:
    """ZeRO 0 has no shards. One data-parallel rank without context ranks beside it has no ZeRO stage."""
    return (zero for zero in ZERO if (dp_shard == dp if zero == 0 else dp_shard * cp > 1))


def _micro_batch_sizes(limits: Limits, dp: int) -> Iterable[int]:
    """All divisors of a rank's batch that leave the loss as it is."""
    local, singly = limits.batch_of_rank(dp) or 0, limits.accumulates_singly
    return (s for s in divisors(local) if s == local or (limits.accumulates and (s * dp > 1 or singly)))


def _numbers_of_micro_batches(limits: Limits, dp: int, micro_batch: int) -> Iterable[int]:
    return ((limits.batch_of_rank(dp) or 0) // micro_batch,)


def _schedules(limits: Limits, pp: int) -> Iterable[int]:
    """All schedules. Without a pipeline there is no order, so the default stands for all."""
    return range(len(SCHEDULE_NAMES)) if pp > 1 else (SCHEDULE_NAMES.index(DEFAULT_SCHEDULE),)


def _virtual_stages(limits: Limits, pp: int, micro_batches: int, schedule: int) -> Iterable[int]:
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
