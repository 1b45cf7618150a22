"""The check of indices before a step: no lookup of the batch may be outside of its table.

On one device torch refuses a token that the embedding does not have. A rank that holds a part of the table takes such a
token for one of another rank, and all ranks train on zeros. Two checks find it:

1. Every rank compares its inputs with ranges that are enough (`is_unsure`), one comparison per input. If all ranks are
   sure, this is all.
2. Otherwise all ranks compute the indices of all lookups from the batch (`check`), in the code that the step runs. They
   compare the indices with the tables, and exchange the result. The batch is refused only if an index is outside: a
   mask or a slice may hide any number.

The second check also runs for the first batch of each captured program, after a buffer was written to, and for a short
batch. It runs for every batch if the ranges of the model's inputs are not enough.

On 2 gloo ranks of 2 shared CPU cores, the first check took 0.04 ms for 8 × 1,024 token ids and labels with ignored
ones. The second check took 0.8 ms (least of 15 rounds, torch 2.13, 2026-11-23, `benchmarks/agreement.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import inf

import torch

from autopar.capture.input_ranges import SafeRanges, safe_ranges
from autopar.capture.lookups import Lookup, lookups
from autopar.capture.value_range import ValueRange
from autopar.errors import RuntimeInputError
from autopar.runtime.distributed.mesh import named_ranks, ranks_by
from autopar.runtime.model.compiled import CompiledProgram
from autopar.runtime.model.known_code import BatchValues, CallPart, call_parts

MAX_NAMED = 3  # indices that a message names
NumberExchange = Callable[[Sequence[int]], list[list[int]]]  # from this rank's numbers to those of every rank


class IndexCheck:
    """Compares the indices of one program's lookups with their tables."""

    def __init__(self, compiled: CompiledProgram) -> None:
        self._compiled = compiled
        self._checked: BatchValues | None = None  # the constants of the last check
        self._is_sufficient = False

    @cached_property
    def _lookups(self) -> tuple[Lookup, ...]:
        return lookups(self._compiled.program)

    @cached_property
    def _safe(self) -> SafeRanges:
        return safe_ranges(self._compiled.program, [lookup for lookup in self._lookups if lookup.inputs])

    @property
    def legal(self) -> dict[str, int]:
        """A number for every bounded input that its lookups allow, for the rows that a short batch is padded with."""
        return {name: int(max(allowed.low, min(0, allowed.high - 1))) for name, allowed in self._safe.ranges.items()}

    def is_unsure(self, batch: BatchValues, constants: BatchValues) -> bool:
        """Whether an index of this rank's batch could be outside of its table."""
        if constants is not self._checked or not self._is_sufficient:
            return True
        return _any_outside(self._safe.ranges, batch)

    @torch.no_grad()
    def check(self, micro_batches: Sequence[BatchValues], constants: BatchValues, exchange: NumberExchange) -> None:
        """Raise `RuntimeInputError` on all ranks if an index of any rank is outside of its table. Collective."""
        for parts in self._parts:
            first = self._first_outside(parts, micro_batches, constants)
            text = outside_text(exchange(first), self._lookups)
            if text:
                raise RuntimeInputError(text)
        self._checked = constants
        self._is_sufficient = self._safe.is_complete and not _any_outside(self._safe.ranges, constants)

    def _first_outside(
        self, parts: Sequence[CallPart], micro_batches: Sequence[BatchValues], constants: BatchValues
    ) -> tuple[int, int]:
        """A lookup, from 1 on, and its first index outside, or zeros. All parts run, for their collectives."""
        first, inputs = (0, 0), {name for part in parts for lookup in part.lookups for name in lookup.inputs}
        for micro_batch in micro_batches:
            values = {**constants, **{name: micro_batch[name].to(self._compiled.device) for name in inputs}}
            for part in parts:
                for lookup, index in zip(part.lookups, part.run(values), strict=True):
                    value = first_outside(index, lookup.allowed)
                    if value is not None and not first[0]:
                        first = (self._lookups.index(lookup) + 1, value)
        return first

    @cached_property
    def _parts(self) -> list[list[CallPart]]:
        """The code that computes all indices of each depth, call by call."""
        depths = sorted({lookup.depth for lookup in self._lookups})
        return [call_parts(self._compiled, [lookup for lookup in self._lookups if lookup.depth == d]) for d in depths]


def _any_outside(ranges: Mapping[str, ValueRange], values: BatchValues) -> bool:
    return any(first_outside(values[name], allowed) is not None for name, allowed in ranges.items() if name in values)


def first_outside(values: torch.Tensor, allowed: ValueRange) -> int | None:
    """The first element that a range does not allow. None if all are allowed."""
    if not values.numel():
        return None
    least, most = torch.stack(torch.aminmax(values)).tolist()
    if allowed.covers(least, most):
        return None
    flat = values.detach().reshape(-1).to(torch.int64)
    outside = torch.zeros_like(flat, dtype=torch.bool)
    if allowed.low != -inf:
        outside |= flat < int(allowed.low)
    if allowed.high != inf:
        outside |= flat >= int(allowed.high)
    for value in allowed.extra:
        outside &= flat != value
    outliers = flat[outside]
    return int(outliers[0].item()) if outliers.numel() else None


def outside_text(rows: Sequence[Sequence[int]], sites: Sequence[Lookup]) -> str:
    """The message about indices outside, empty without any. A row has a lookup's number from 1 on, and its index."""
    ranks_of = ranks_by([tuple(row[:2]) for row in rows])
    lines = [_line(sites[number - 1], index, ranks) for (number, index), ranks in ranks_of.items() if number]
    more = f"; and {len(lines) - MAX_NAMED} more" if len(lines) > MAX_NAMED else ""
    remedy = "; correct the batch, or make the table larger"
    return "; ".join(lines[:MAX_NAMED]) + more + remedy if lines else ""


def _line(lookup: Lookup, index: int, ranks: Sequence[int]) -> str:
    names = ", ".join(repr(name) for name in lookup.inputs)
    source = f"input{'s' * (len(lookup.inputs) > 1)} {names}" if names else "an index that the model makes itself"
    ignored = "".join(f" and ignores {value}" for value in sorted(lookup.allowed.extra))
    return f"{source}: {named_ranks(ranks)} got the index {index}, but {lookup.allowed.bounded_by[0]}{ignored}"
