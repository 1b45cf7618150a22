"""The decisions of a batch before a step: a program runs it only if it decides what this program's batch decided.

A model that was captured with ``specialise=True`` has read values of its inputs, and took a branch by them. The graph
has this branch only. All ranks compute these values of every global micro-batch, in the code that the step runs. The
step's value of an extreme, such as `any` or `max`, is the largest or the least of its micro-batches' values.
`autopar.runtime.model.shape_cache` then takes the program of these decisions, or captures the model again. A value of
buffers is computed with the program's constants.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from autopar._torch.private import pytree
from autopar.capture.micro_batches import Extreme, extreme_of
from autopar.errors import short_repr
from autopar.ir.program import Decision
from autopar.runtime.distributed.mesh import named_ranks
from autopar.runtime.model.compiled import CompiledProgram
from autopar.runtime.model.known_code import BatchValues, CallPart, call_parts

_REL_TOLERANCE = 1e-6  # of a number with a fraction: ranks sum in another order
Found = tuple[float, ...]  # the numbers that a batch gives to one decision


class DecisionCheck:
    """Compares the decisions of a batch with the decisions of one program."""

    def __init__(self, compiled: CompiledProgram) -> None:
        self._program, self._compiled = compiled.program, compiled

    @cached_property
    def _parts(self) -> list[CallPart]:
        return call_parts(self._compiled, results=[decision.name for decision in self._program.decisions])

    @cached_property
    def _extremes(self) -> list[Extreme | None]:
        names = [decision.name for decision in self._program.decisions]
        is_apart = self._compiled.plan.degrees.per_micro_batch
        return [None if is_apart else extreme_of(self._program, name) for name in names]

    @torch.no_grad()
    def values(self, micro_batches: Sequence[BatchValues], constants: BatchValues) -> list[list[Found]]:
        """What a step gives to decisions, up to the first that differs; perhaps for each micro-batch. Collective."""
        rows = []
        for micro_batch in micro_batches:
            values = {**constants, **{name: value.to(self._compiled.device) for name, value in micro_batch.items()}}
            for part in self._parts:  # all parts run in any case: their code may have collectives
                part.run(values)
            rows.append([tuple(values[decision.name].reshape(-1).tolist()) for decision in self._program.decisions])
        joined = list[Found]()
        for extreme, numbers in zip(self._extremes, zip(*rows, strict=True), strict=True):
            if extreme is None and len({*numbers}) > 1:
                every = [[*joined, *numbers[len(joined) :]] for numbers in rows]
                return [numbers[: _first_different(self._program.decisions, numbers) + 1] for numbers in every]
            joined.append(numbers[0] if extreme is None else extreme(numbers))
            if _first_different(self._program.decisions, joined) < len(joined):
                break
        return [joined]

    def decided(self, values: Sequence[Found]) -> dict[tuple[str, int], Decision]:
        """The decisions of a step, as far as they are known, for a capture."""
        pairs = zip(self._program.decisions, values, strict=False)
        return {d.key: replace(d, value=_as_read(d.value, numbers)) for d, numbers in pairs}

    def fit(self, rows: Sequence[Sequence[Found]]) -> bool:
        """Whether the program's batch decided so too, as far as it is known."""
        decisions = self._program.decisions
        return all(_first_different(decisions[: len(row)], row) == len(row) <= len(decisions) for row in rows)

    def difference(self, rows: Sequence[Sequence[Found]]) -> tuple[int, int]:
        """The first decision that differs in a micro-batch, from 1 on, and its first number as bits. Zeros if none."""
        decisions = self._program.decisions
        for row in rows:
            if (at := _first_different(decisions, row)) < len(row):
                pairs = zip(pytree.tree_leaves(decisions[at].value), row[at], strict=True)
                return at + 1, _bits(next(float(b) for a, b in pairs if not _equal(a, b)))
        return 0, 0

    def text(self, rows: Sequence[Sequence[int]]) -> str:
        """The first decision that differs, from the `difference` of every rank."""
        number, bits = min((row[0], row[1]) for row in rows if row[0])
        ranks = [rank for rank, row in enumerate(rows) if tuple(row[:2]) == (number, bits)]
        decision = self._program.decisions[number - 1]
        of = f" of input {' and '.join(map(repr, decision.inputs))}" if decision.inputs else ""
        return (
            f"{decision.line}: `{decision.code}` read {short_repr(decision.value)}{of} during capture, "
            f"{named_ranks(ranks)} now read {short_repr(_number(decision, bits))}"
        )


def _as_read(value: Any, numbers: Found) -> Any:
    leaves, spec = pytree.tree_flatten(value)
    return pytree.tree_unflatten([type(leaf)(number) for leaf, number in zip(leaves, numbers, strict=True)], spec)


def _first_different(decisions: Sequence[Decision], values: Sequence[Found]) -> int:
    """The number of decisions before the first that differs."""
    for at, (decision, numbers) in enumerate(zip(decisions, values, strict=False)):
        expected = pytree.tree_leaves(decision.value)
        if len(expected) != len(numbers) or not all(map(_equal, expected, numbers)):
            return at
    return len(values)


def _equal(expected: float, value: float) -> bool:
    if isinstance(expected, bool):
        return bool(value) == expected
    if isinstance(expected, int):
        return int(value) == expected
    return math.isclose(expected, value, rel_tol=_REL_TOLERANCE) or (expected != expected and value != value)


def _bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number(decision: Decision, bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    kinds = {type(value) for value in pytree.tree_leaves(decision.value)}
    return bool(number) if kinds == {bool} else int(number) if kinds == {int} and number == int(number) else number
