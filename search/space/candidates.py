"""The space of a search: every legal combination of degrees, ZeRO stage, micro-batch, schedule, stages, order of ranks.

    devices      = pp · tp · dp_shard · dp_replicate
    global batch = dp_shard · dp_replicate · micro-batch · micro-batches

Any number of devices is legal, not powers of two only, and fewer than there are where the objective asks for it.
Combinations that run the same are listed once: one data-parallel rank has no ZeRO stage, ZeRO 0 no shards, a plan
without a pipeline no schedule, and ranks lie in another order than the default only where that can be faster. What
recomputation a candidate needs follows from its memory, so that it is no dimension here
(`autopar.search.bounds.lower_bounds`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from autopar.errors import InputError, PlanError, Problem, did_you_mean
from autopar.ir.arrays import Integers
from autopar.ir.plan import Degrees, degrees_from
from autopar.ir.rank_order import ORDERS, strides
from autopar.ir.schedules.registry import DEFAULT_SCHEDULE, SCHEDULE_NAMES, SCHEDULES, schedule_problems
from autopar.search.space.constraints import PINS

MOST_VIRTUAL = 8  # stages of one rank; more than that send more than they save
MOST_TENSOR_RANKS = 64
ZERO = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates as arrays of one length. `schedule` is a position in `SCHEDULE_NAMES`, `order` in `ORDERS`;
    `micro_batches` are those of a step."""

    tp: Integers
    pp: Integers
    dp_shard: Integers
    dp_replicate: Integers
    zero: Integers
    micro_batch: Integers
    micro_batches: Integers
    schedule: Integers
    virtual: Integers
    order: Integers

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def dp(self) -> Integers:
        """Data-parallel ranks."""
        return self.dp_shard * self.dp_replicate

    @property
    def num_devices(self) -> Integers:
        """Devices that each candidate uses."""
        return self.pp * self.tp * self.dp

    def at(self, index: Any) -> "Candidates":
        """The candidates of an index array or mask."""
        return Candidates(**{each.name: getattr(self, each.name)[index] for each in fields(self)})

    def text(self, index: int) -> str:
        """One candidate in words that no other has: ``tp=2 pp=4 ... schedule=1f1b virtual=1``."""
        values = {each.name: int(getattr(self, each.name)[index]) for each in fields(self)}
        named = {"schedule": SCHEDULE_NAMES[values["schedule"]], "order": ORDERS[values["order"]]}
        return " ".join(f"{name}={named.get(name, value)}" for name, value in values.items())

    def index_of(self, text: str) -> int:
        """The candidate whose text it is. Raises `InputError` where there is none."""
        found = next((index for index in range(len(self)) if self.text(index) == text), None)
        if found is None:
            raise InputError(f"no candidate of this search is {text!r}; the study is of another space, name a new one")
        return found

    def degrees(self, index: int, *, recompute: bool = False) -> Degrees:
        """One candidate as a plan's degrees, recomputing in no block or in all of them."""
        one = {each.name: int(getattr(self, each.name)[index]) for each in fields(self)}
        staged = one["pp"] > 1
        return Degrees(
            pp=one["pp"],
            tp=one["tp"],
            dp_shard=one["dp_shard"],
            dp_replicate=one["dp_replicate"],
            zero=one["zero"],
            micro_batch=one["micro_batch"],
            accumulate=1 if staged else one["micro_batches"],
            micro_batches=one["micro_batches"] if staged else 1,
            schedule=SCHEDULE_NAMES[one["schedule"]],
            virtual_stages=one["virtual"],
            recompute="full" if recompute else "none",
            order=ORDERS[one["order"]],
        )


def concatenated(parts: Sequence[Candidates]) -> Candidates:
    """One after another."""
    return Candidates(
        **{each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Candidates)}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a model and a cluster allow: devices, sequences of a step, calls that can be cut into stages, the tensor
    degrees that divide the model, and whether the batch may be split in time.

    The batch is that of all ranks, or `local_batch` of each data-parallel one; just one of them is given. A candidate
    uses `num_devices`, or a number of `fewer_devices`, each with as many ranks as `context` says. With `num_stages` it
    has so many pipeline stages. `devices_per_host` is what decides where the order of ranks counts; None: nowhere.
    """

    num_devices: int
    global_batch: int | None = None
    local_batch: int | None = None
    most_stages: int
    tensor_degrees: tuple[int, ...]
    accumulates: bool = True
    fewer_devices: tuple[int, ...] = ()
    context: int = 1
    num_stages: int | None = None
    devices_per_host: float | None = None

    def __post_init__(self) -> None:
        assert (self.global_batch is None) != (self.local_batch is None), (self.global_batch, self.local_batch)

    def batch_of_rank(self, dp: int) -> int | None:
        """Sequences of one of `dp` data-parallel ranks in a step; None where they do not divide the batch."""
        if self.global_batch is None:
            return self.local_batch
        return self.global_batch // dp if self.global_batch % dp == 0 else None


# the words of --fix and --forbid: those of a plan's degrees
WORDS = ("pp", "tp", "dp", "dp_shard", "dp_replicate", "zero", "micro_batch", "micro_batches", "schedule",
         "virtual_stages", "order")  # fmt: skip
NAMED = {"schedule": SCHEDULE_NAMES, "order": ORDERS}  # words whose values are names


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Values that a word must have, and values that it must not have."""

    fix: Mapping[str, tuple[int | str, ...]]
    forbid: Mapping[str, tuple[int | str, ...]]

    def allows(self, word: str, value: int | str) -> bool:
        """Whether a word may have a value."""
        return (word not in self.fix or value in self.fix[word]) and value not in self.forbid.get(word, ())


def wishes(fix: Mapping[str, Any] | None = None, forbid: Mapping[str, Any] | None = None) -> Wishes:
    """Wishes from one value or several per word. Raises `InputError` with every word or value that is none."""
    problems: list[Problem] = []
    found: list[dict[str, tuple[int | str, ...]]] = []
    for option, given in (("fix", fix), ("forbid", forbid)):
        found.append({})
        for word, value in (given or {}).items():
            values = tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else (value,)
            if word in PINS and option == "fix":
                pinned, wrong = _pinned(word, value)
                problems += wrong
                found[-1][word] = (pinned,)
            elif word not in WORDS:
                known = (*WORDS, *PINS) if option == "fix" else WORDS
                problems.append(Problem(path=f"{option} {word}", rule=f"is unknown; {did_you_mean(word, known)}"))
            else:
                problems += [p for v in values if (p := _value_problem(f"{option} {word}", word, v)) is not None]
                found[-1][word] = values
    if problems:
        raise InputError("the search cannot be narrowed like this", problems)
    return Wishes(fix=found[0], forbid=found[1])


def _pinned(word: str, value: Any) -> tuple[Any, list[Problem]]:
    """The one value of a word of `PINS` as a plan or its degrees have it."""
    if isinstance(value, tuple) and len(value) == 1 and word != "cut_at":
        value = value[0]
    if word == "regather":
        rule = "must be true or false"
        return value, [] if isinstance(value, bool) else [Problem(path=f"fix {word}", value=value, rule=rule)]
    try:
        return getattr(degrees_from({word: value}), word), []
    except PlanError as error:
        return value, [replace(one, path=f"fix {one.path}") for one in error.problems]


def _value_problem(path: str, word: str, value: Any) -> Problem | None:
    if word in NAMED:
        known = NAMED[word]
        return None if value in known else Problem(path=path, value=value, rule=f"must be one of {', '.join(known)}")
    least = 0 if word == "zero" else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (word == "zero" and value > 3):
        rule = "must be 0, 1, 2 or 3" if word == "zero" else "must be a whole number of at least 1"
        return Problem(path=path, value=value, rule=rule)
    return None


def candidates(limits: Limits, wanted: Wishes) -> Candidates:
    """Every candidate within the limits that the wishes allow; may be none."""
    columns: list[list[Integers]] = []
    ways = cache(lambda dp: np.array(list(_shards(dp, wanted, limits.context))))
    splits = cache(lambda local, dp, pp: np.array(list(_splits(limits, local, dp, pp, wanted))))
    for num_devices in sorted({limits.num_devices, *limits.fewer_devices}, reverse=True):
        for tp in limits.tensor_degrees:
            if num_devices % tp or not wanted.allows("tp", tp):
                continue
            for pp in divisors(num_devices // tp):
                dp = num_devices // tp // pp
                local = limits.batch_of_rank(dp)
                allowed = wanted.allows("pp", pp) and wanted.allows("dp", dp)
                if pp > limits.most_stages or local is None or not allowed:
                    continue
                left, right = ways(dp), splits(local, dp, pp)
                for order in _orders_of_ranks(limits, wanted, tp, pp, dp) if left.size and right.size else ():
                    columns.append([np.array([tp]), np.array([pp]), left, right, np.array([order])])
    return concatenated([_product(*parts) for parts in columns]) if columns else _none()


def _product(tp: Integers, pp: Integers, shards: Integers, splits: Integers, order: Integers) -> Candidates:
    rows, columns = len(shards), len(splits)
    left, right = np.repeat(shards, columns, axis=0), np.tile(splits, (rows, 1))
    whole = np.ones(rows * columns, dtype=np.int64)
    return Candidates(
        tp=whole * tp, pp=whole * pp, dp_shard=left[:, 0], dp_replicate=left[:, 1], zero=left[:, 2],
        micro_batch=right[:, 0], micro_batches=right[:, 1], schedule=right[:, 2], virtual=right[:, 3],
        order=whole * order,
    )  # fmt: skip


def _orders_of_ranks(limits: Limits, wanted: Wishes, tp: int, pp: int, dp: int) -> Iterator[int]:
    """Positions in `ORDERS`: the first that is allowed, and those that may be faster. The default has data-parallel
    ranks nearest to each other, so that another one can only gain by messages between stages that stay in a host.
    Context ranks have the default only."""
    allowed = [position for position, order in enumerate(ORDERS) if wanted.allows("order", order)]
    if pp == 1 or dp == 1 or limits.context > 1:
        allowed = [position for position in allowed if position == 0]
    per_host, sizes = limits.devices_per_host, {"tp": tp, "pp": pp, "dp": dp}
    for position in allowed:
        span = pp * strides(ORDERS[position], sizes)["pp"]
        stays = per_host is not None and per_host % span == 0 and tp * pp * dp > per_host
        if position == allowed[0] or stays:
            yield position


def _none() -> Candidates:
    return Candidates(**{each.name: np.zeros(0, dtype=np.int64) for each in fields(Candidates)})


def _shards(dp: int, wanted: Wishes, context: int) -> Iterator[tuple[int, int, int]]:
    """Ways to hold state on `dp` ranks, each of so many `context` ranks: dp_shard, dp_replicate, ZeRO stage."""
    for shard in divisors(dp):
        for zero in ZERO:
            one_way = shard == dp if zero == 0 else shard * context > 1
            words = (("dp_shard", shard), ("dp_replicate", dp // shard), ("zero", zero))
            if one_way and all(wanted.allows(word, value) for word, value in words):
                yield shard, dp // shard, zero


def _splits(limits: Limits, local: int, dp: int, pp: int, wanted: Wishes) -> Iterator[tuple[int, int, int, int]]:
    """Ways to split one rank's `local` sequences in time: micro-batch, micro-batches, schedule, virtual stages."""
    for micro_batch in divisors(local):
        count = local // micro_batch
        # at a global micro-batch of one sequence the batch dimension cannot be told from a broadcast one
        split = count == 1 or (limits.accumulates and micro_batch * dp > 1)
        if not split or not wanted.allows("micro_batch", micro_batch) or not wanted.allows("micro_batches", count):
            continue
        for schedule, virtual in _orders(pp, count, limits.most_stages):
            if limits.num_stages not in (None, pp * virtual):
                continue
            if wanted.allows("schedule", schedule) and wanted.allows("virtual_stages", virtual):
                yield micro_batch, count, SCHEDULE_NAMES.index(schedule), virtual


def _orders(pp: int, micro_batches: int, most_stages: int) -> Iterator[tuple[str, int]]:
    if pp == 1:
        yield DEFAULT_SCHEDULE, 1  # the default: without a pipeline there is no order
        return
    for name, kind in SCHEDULES.items():
        most = min(kind.most_stages or MOST_VIRTUAL, most_stages // pp)
        for virtual in range(kind.least_stages, most + 1):
            if not schedule_problems(name, pp, virtual, micro_batches):
                yield name, virtual


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, in order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def without_one(wanted: Wishes) -> Iterator[tuple[str, Wishes]]:
    """The wishes without each one of them, and that one in words."""
    for kind, given in (("fix", wanted.fix), ("forbid", wanted.forbid)):
        for word, values in given.items():
            fewer = {one: theirs for one, theirs in given.items() if one != word}
            yield f"{kind} {word} = {', '.join(map(str, values))}", replace(wanted, **{kind: fewer})


def tensor_degrees(*counts: int) -> tuple[int, ...]:
    """Those of numbers of devices."""
    return tuple(sorted({tp for count in counts for tp in divisors(count) if tp <= MOST_TENSOR_RANKS}))


def limits_on(limits: Limits, num_devices: int) -> Limits:
    """The same limits on another number of devices, with the same tensor degrees and powers of two."""
    powers = {2**exponent for exponent in range(MOST_TENSOR_RANKS.bit_length())}
    degrees = {tp for tp in powers.union(limits.tensor_degrees) if num_devices % tp == 0 and tp <= MOST_TENSOR_RANKS}
    return replace(limits, num_devices=num_devices, fewer_devices=(), tensor_degrees=tuple(sorted(degrees)))


def what_would_be_legal(limits: Limits, wanted: Wishes) -> str:
    """The smallest change that leaves candidates: a wish less, or a batch that can be split."""
    for text, fewer in without_one(wanted):
        count = len(candidates(limits, fewer))
        if count:
            return f"without {text} there are {count:,} candidates"
    if limits.global_batch is None:
        return "fix and forbid less"
    batch = -(-limits.global_batch // limits.num_devices) * limits.num_devices
    count = len(candidates(replace(limits, global_batch=batch), wanted))
    return f"with global_batch {batch} there are {count:,} candidates" if count else "fix and forbid less"
