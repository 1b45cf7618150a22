"""The space of a search: every legal combination of degrees, ZeRO stage, micro-batch, schedule, stages, order of ranks.

    devices      = pp · tp · cp · dp_shard · dp_replicate        ep divides dp_shard
    global batch = dp_shard · dp_replicate · micro-batch · micro-batches

Any number of devices is legal, not only powers of two. Some objectives also allow fewer devices than the cluster has.
Combinations that run the same are listed once. One data-parallel rank has no ZeRO stage, ZeRO 0 has no shards, and a
plan without a pipeline has no schedule. Ranks lie in another order than the default only if that can be faster.
Recomputation is no dimension of the space, because it follows from a candidate's memory
(`autopar.search.bounds.lower_bounds`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.step.unique_rows import distinct, numbered
from autopar.errors import InputError
from autopar.ir.arrays import Integers
from autopar.ir.degrees import Degrees
from autopar.search.space.dimensions import BY_COLUMN, DIMENSIONS, Constraints, Dimension, divisors

MOST_TENSOR_RANKS = 64
LEAST_TOKENS_OF_RANK = 1024  # of a sequence, on a context rank; fewer rows make products slow


class Split(NamedTuple):
    """The degrees that labels are chosen for: tensor, context and expert parallelism."""

    tp: int
    cp: int = 1
    ep: int = 1

    @staticmethod
    def of(degrees: Degrees) -> "Split":
        """The split of a plan."""
        return Split(degrees.tp, degrees.cp, degrees.ep)

    def __str__(self) -> str:
        more = (f", {name} degree {n}" for name, n in (("context", self.cp), ("expert", self.ep)) if n > 1)
        return f"tensor degree {self.tp}" + "".join(more)


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidates:
    """Candidates as arrays of one length, one for each column of `autopar.search.space.dimensions.DIMENSIONS`."""

    tp: Integers
    pp: Integers
    cp: Integers
    dp_shard: Integers
    ep: Integers
    dp_replicate: Integers
    zero: Integers
    micro_batch: Integers
    micro_batches: Integers  # of a step
    schedule: Integers  # a position in `SCHEDULE_NAMES`
    virtual: Integers
    order: Integers  # a position in `ORDERS`

    def __len__(self) -> int:
        return len(self.tp)

    @cached_property
    def dp(self) -> Integers:
        """Data-parallel ranks."""
        return self.dp_shard * self.dp_replicate

    @cached_property
    def num_devices(self) -> Integers:
        """Devices that each candidate uses."""
        return self.pp * self.tp * self.cp * self.dp

    @cached_property
    def places(self) -> Mapping[Split, NDArray[np.intp]]:
        """The candidates of every split, in order. Labels are chosen for splits."""
        if not len(self):
            return {}
        columns = (self.ep, self.cp, self.tp)
        kinds = distinct([numbered(column) for column in columns])
        number = kinds.numbers(len(self))
        few = number.astype(np.uint16) if kinds.count <= 1 << 16 else number  # sorted by their digits
        groups = np.split(np.argsort(few, kind="stable"), np.cumsum(np.bincount(number))[:-1])
        places = {self.split(int(group[0])): group for group in groups}
        return {split: places[split] for split in sorted(places, key=lambda split: (split.ep, split.cp, split.tp))}

    def splits(self) -> list[Split]:
        """The different degrees that labels are chosen for, in order."""
        return list(self.places)

    def split(self, index: int) -> Split:
        """The degrees that the labels of one candidate are chosen for."""
        return Split(int(self.tp[index]), int(self.cp[index]), int(self.ep[index]))

    def of(self, *splits: Split) -> NDArray[np.bool_]:
        """The candidates whose labels are chosen for one of several degrees."""
        mask = np.zeros(len(self), dtype=bool)
        for split in splits:
            if split in self.places:
                mask[self.places[split]] = True
        return mask

    def among(self, split: Split, mask: NDArray[np.bool_]) -> NDArray[np.intp]:
        """The candidates of a split that a mask has, in order."""
        place = self.places.get(split, np.zeros(0, dtype=np.intp))
        return place[mask[place]]

    def at(self, index: Any) -> "Candidates":
        """The candidates of an index array or mask."""
        return Candidates(**{each.name: getattr(self, each.name)[index] for each in fields(self)})

    def text(self, index: int) -> str:
        """The unique text of a candidate: ``tp=2 pp=4 ... schedule=1f1b virtual=1``."""
        values = {each.name: int(getattr(self, each.name)[index]) for each in fields(self)}
        return " ".join(f"{name}={BY_COLUMN[name].value_at(value)}" for name, value in values.items())

    def index_of(self, text: str) -> int:
        """The candidate with this text. Raises `InputError` if there is none."""
        place = next((index for index in range(len(self)) if self.text(index) == text), None)
        if place is None:
            raise InputError(f"no candidate of this search is {text!r}; the study is of another search, name a new one")
        return place

    def degrees(self, index: int, *, recompute: bool = False) -> Degrees:
        """One candidate as a plan's degrees, recomputing in no block or in all of them."""
        row = {each.name: int(getattr(self, each.name)[index]) for each in fields(self)}
        given: dict[str, Any] = {"recompute": "full" if recompute else "none"}
        for column, value in row.items():
            given |= BY_COLUMN[column].fields_of_degrees(value, has_pipeline=row["pp"] > 1)
        return Degrees(**given)


def candidates(constraints: Constraints) -> Candidates:
    """Every candidate that the constraints allow; may be none."""
    counts = sorted({constraints.num_devices, *constraints.fewer_devices}, reverse=True)
    rows: dict[str, Integers] = {"num_devices": np.array(counts)}
    for dimension in DIMENSIONS:
        beside = [rows[name] for name in dimension.beside]
        if not len(beside[0]):
            return Candidates(**{each.name: beside[0] for each in fields(Candidates)})
        groups = distinct([numbered(column) for column in beside])
        group = groups.numbers(len(beside[0]))
        lists = [_allowed(dimension, constraints, row) for row in np.stack(beside, axis=1)[groups.rows].tolist()]
        sizes = np.array([len(values) for values in lists])
        begins, counts_of_rows = np.cumsum(sizes) - sizes, sizes[group]
        row = np.repeat(np.arange(len(group)), counts_of_rows)
        place = np.arange(len(row)) - (np.cumsum(counts_of_rows) - counts_of_rows)[row]
        rows = {name: column[row] for name, column in rows.items()}
        every = np.array([value for values in lists for value in values], dtype=np.int64)
        rows[dimension.column or dimension.word] = every[begins[group][row] + place]
    return Candidates(**{each.name: rows[each.name] for each in fields(Candidates)})


def _allowed(dimension: Dimension, constraints: Constraints, beside: Sequence[int]) -> list[int]:
    values = dimension.values(constraints, *beside)
    return [value for value in values if constraints.allows(dimension.word, dimension.value_at(value))]


def tensor_degrees(*counts: int) -> tuple[int, ...]:
    """The tensor degrees that divide one of several numbers of devices."""
    return tuple(sorted({tp for count in counts for tp in divisors(count) if tp <= MOST_TENSOR_RANKS}))


def context_degrees(tokens: int | None, *counts: int, fixed: Sequence[int] = ()) -> tuple[int, ...]:
    """The context degrees that divide one of several numbers of devices, and the tokens of a sequence."""
    every = {cp for count in counts for cp in divisors(count) if tokens and tokens % cp == 0}
    enough = {cp for cp in every if cp == 1 or (tokens or 0) // cp >= LEAST_TOKENS_OF_RANK}
    return tuple(sorted(every.intersection(fixed) or enough or {1}))


def expert_degrees(experts: int, *counts: int) -> tuple[int, ...]:
    """The expert degrees that divide one of several numbers of devices, and the experts of a block."""
    every = {ep for count in counts for ep in divisors(count) if experts and experts % ep == 0}
    return tuple(sorted(every | {1}))


def constraints_on(constraints: Constraints, num_devices: int) -> Constraints:
    """The same constraints on another number of devices. Tensor degrees are the same ones and powers of two."""
    powers = {2**exponent for exponent in range(MOST_TENSOR_RANKS.bit_length())}
    known = {tp for tp in powers.union(constraints.tensor_degrees) if tp <= MOST_TENSOR_RANKS}
    degrees = {tp for tp in known if num_devices % tp == 0}
    return replace(constraints, num_devices=num_devices, fewer_devices=(), tensor_degrees=tuple(sorted(degrees)))


def what_would_be_legal(constraints: Constraints) -> str:
    """Why no candidate is left, if fixed degrees say so; else the smallest change that leaves candidates."""
    over_data = {"dp": "dp"} if "dp" in constraints.fix else {"dp_replicate": "dp_replicate", "dp_shard": "dp"}
    words = {"pp": "pp", "tp": "tp", "cp": "cp"} | over_data  # the option of dp_shard is --dp
    fixed = {name: constraints.fix[word][0] for word, name in words.items() if len(constraints.fix.get(word, ())) == 1}
    ranks = math.prod(fixed.values())
    if all(count % ranks for count in (constraints.num_devices, *constraints.fewer_devices)):
        degrees = " × ".join(f"{name} {degree}" for name, degree in fixed.items())
        return f"{degrees} needs {ranks} devices, or a multiple; use a smaller degree, or leave one out"
    dp = math.prod(degree for name, degree in fixed.items() if name.startswith("dp"))
    if constraints.global_batch is not None and constraints.global_batch % dp:
        return f"dp {dp} needs a multiple of {dp} sequences; use such a global batch, or leave dp out"
    for text, fewer in constraints.without_one():
        count = len(candidates(fewer))
        if count:
            return f"without {text} there are {count:,} candidates"
    if constraints.global_batch is None:
        return "fix and forbid less"
    batch = -(-constraints.global_batch // constraints.num_devices) * constraints.num_devices
    count = len(candidates(replace(constraints, global_batch=batch)))
    return f"with global_batch {batch} there are {count:,} candidates" if count else "fix and forbid less"
