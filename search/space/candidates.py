"""The space of a search: every legal combination of degrees, ZeRO stage, micro-batch, schedule, stages, order of ranks.

    devices      = pp · tp · dp_shard · dp_replicate
    global batch = dp_shard · dp_replicate · micro-batch · micro-batches

Any number of devices is legal, not only powers of two. Some objectives also allow fewer devices than the cluster has.
Combinations that run the same are listed once. One data-parallel rank has no ZeRO stage, ZeRO 0 has no shards, and a
plan without a pipeline has no schedule. Ranks lie in another order than the default only if that can be faster.
Recomputation is no dimension of the space, because it follows from a candidate's memory
(`autopar.search.bounds.lower_bounds`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from autopar.errors import InputError
from autopar.ir.arrays import Integers
from autopar.ir.degrees import Degrees
from autopar.ir.rank_order import ORDERS, strides
from autopar.ir.schedules.registry import DEFAULT_SCHEDULE, SCHEDULE_NAMES, SCHEDULES, schedule_problems
from autopar.search.space.constraints import Constraints
from autopar.search.space.dimensions import BY_COLUMN

MOST_VIRTUAL = 8  # stages of one rank; more stages send more than they save
MOST_TENSOR_RANKS = 64
ZERO = (0, 1, 2, 3)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Candidates:
    """Candidates as arrays of one length, one for each column of `autopar.search.space.dimensions.DIMENSIONS`.

    `schedule` is a position in `SCHEDULE_NAMES`, `order` in `ORDERS`. `micro_batches` is the number in a step.
    """

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
        """The unique text of a candidate: ``tp=2 pp=4 ... schedule=1f1b virtual=1``."""
        values = {each.name: int(getattr(self, each.name)[index]) for each in fields(self)}
        return " ".join(f"{name}={BY_COLUMN[name].value_at(value)}" for name, value in values.items())

    def index_of(self, text: str) -> int:
        """The candidate with this text. Raises `InputError` if there is none."""
        found = next((index for index in range(len(self)) if self.text(index) == text), None)
        if found is None:
            raise InputError(f"no candidate of this search is {text!r}; the study is of another search, name a new one")
        return found

    def degrees(self, index: int, *, recompute: bool = False) -> Degrees:
        """One candidate as a plan's degrees, recomputing in no block or in all of them."""
        one = {each.name: int(getattr(self, each.name)[index]) for each in fields(self)}
        given: dict[str, Any] = {"recompute": "full" if recompute else "none"}
        for column, value in one.items():
            given |= BY_COLUMN[column].fields_of_degrees(value, has_pipeline=one["pp"] > 1)
        return Degrees(**given)


def concatenated(parts: Sequence[Candidates]) -> Candidates:
    """The candidates of several parts, one part after another."""
    return Candidates(
        **{each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Candidates)}
    )


def candidates(constraints: Constraints) -> Candidates:
    """Every candidate that the constraints allow; may be none."""
    columns: list[list[Integers]] = []
    for num_devices in sorted({constraints.num_devices, *constraints.fewer_devices}, reverse=True):
        for tp in constraints.tensor_degrees:
            if num_devices % tp or not constraints.allows("tp", tp):
                continue
            for pp in divisors(num_devices // tp):
                dp = num_devices // tp // pp
                local = constraints.batch_of_rank(dp)
                allowed = constraints.allows("pp", pp) and constraints.allows("dp", dp)
                if pp > constraints.most_stages or local is None or not allowed:
                    continue
                left = np.array(list(_shards(dp, constraints)))
                right = np.array(list(_splits(constraints, local, dp, pp)))
                for order in _orders_of_ranks(constraints, tp, pp, dp) if left.size and right.size else ():
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


def _orders_of_ranks(constraints: Constraints, tp: int, pp: int, dp: int) -> Iterator[int]:
    """Positions in `ORDERS`: the first allowed order, and the orders that may be faster.

    In the default order, data-parallel ranks are nearest to each other. Another order can only gain if it keeps the
    messages between stages inside a host. Context ranks have the default only.
    """
    allowed = [position for position, order in enumerate(ORDERS) if constraints.allows("order", order)]
    if pp == 1 or dp == 1 or constraints.context > 1:
        allowed = [position for position in allowed if position == 0]
    per_host, sizes = constraints.devices_per_host, {"tp": tp, "pp": pp, "dp": dp}
    for position in allowed:
        span = pp * strides(ORDERS[position], sizes)["pp"]
        stays = per_host is not None and per_host % span == 0 and tp * pp * dp > per_host
        if position == allowed[0] or stays:
            yield position


def _none() -> Candidates:
    return Candidates(**{each.name: np.zeros(0, dtype=np.int64) for each in fields(Candidates)})


def _shards(dp: int, constraints: Constraints) -> Iterator[tuple[int, int, int]]:
    """Ways to hold state on `dp` ranks, with the context ranks beside each: dp_shard, dp_replicate, ZeRO stage."""
    for shard in divisors(dp):
        for zero in ZERO:
            one_way = shard == dp if zero == 0 else shard * constraints.context > 1
            words = (("dp_shard", shard), ("dp_replicate", dp // shard), ("zero", zero))
            if one_way and all(constraints.allows(word, value) for word, value in words):
                yield shard, dp // shard, zero


def _splits(constraints: Constraints, local: int, dp: int, pp: int) -> Iterator[tuple[int, int, int, int]]:
    """Ways to split one rank's `local` sequences in time: micro-batch, micro-batches, schedule, virtual stages."""
    num_stages = constraints.num_stages
    for micro_batch in divisors(local):
        count = local // micro_batch
        # at a global micro-batch of one sequence the batch dimension cannot be told from a broadcast one
        split = count == 1 or (constraints.accumulates and micro_batch * dp > 1)
        words = (("micro_batch", micro_batch), ("micro_batches", count))
        if not split or not all(constraints.allows(word, value) for word, value in words):
            continue
        for schedule, virtual in _orders(pp, count, constraints.most_stages):
            if num_stages not in (None, pp * virtual):
                continue
            if constraints.allows("schedule", schedule) and constraints.allows("virtual_stages", virtual):
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


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, in order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def tensor_degrees(*counts: int) -> tuple[int, ...]:
    """The tensor degrees that divide one of several numbers of devices."""
    return tuple(sorted({tp for count in counts for tp in divisors(count) if tp <= MOST_TENSOR_RANKS}))


def constraints_on(constraints: Constraints, num_devices: int) -> Constraints:
    """The same constraints on another number of devices. Tensor degrees are the same ones and powers of two."""
    powers = {2**exponent for exponent in range(MOST_TENSOR_RANKS.bit_length())}
    known = {tp for tp in powers.union(constraints.tensor_degrees) if tp <= MOST_TENSOR_RANKS}
    degrees = {tp for tp in known if num_devices % tp == 0}
    return replace(constraints, num_devices=num_devices, fewer_devices=(), tensor_degrees=tuple(sorted(degrees)))


def what_would_be_legal(constraints: Constraints) -> str:
    """The smallest change that leaves candidates: one wish fewer, or a batch that can be split."""
    for text, fewer in constraints.without_one():
        count = len(candidates(fewer))
        if count:
            return f"without {text} there are {count:,} candidates"
    if constraints.global_batch is None:
        return "fix and forbid less"
    batch = -(-constraints.global_batch // constraints.num_devices) * constraints.num_devices
    count = len(candidates(replace(constraints, global_batch=batch)))
    return f"with global_batch {batch} there are {count:,} candidates" if count else "fix and forbid less"
