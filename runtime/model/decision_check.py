"""The check of decisions before a step: a batch must decide what the example inputs decided during capture.

A model that was captured with ``specialise=True`` has read values of its inputs, and took a branch by them. The graph
has this branch only. All ranks compute these values of every global micro-batch, in the code that the step runs, and
exchange the first that differs. A value of buffers is computed with the program's constants.
"""

import math
import struct
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from autopar._torch.private import pytree
from autopar.errors import RuntimeInputError, short_repr
from autopar.ir.program import Decision, Program
from autopar.runtime.distributed.mesh import named_ranks
from autopar.runtime.model.known_code import KnownCode, Part, Values

_REL_TOLERANCE = 1e-6  # of a number with a fraction: ranks sum in another order
Exchange = Callable[[Sequence[int]], list[list[int]]]  # from this rank's numbers to those of every rank


class DecisionCheck:
    """Compares the decisions of a batch with the decisions of one program."""

    def __init__(self, program: Program, code: KnownCode) -> None:
        self._program, self._code = program, code

    @cached_property
    def _parts(self) -> list[Part]:
        return self._code.parts(results=[decision.name for decision in self._program.decisions])

    @torch.no_grad()
    def check(self, micro_batches: Sequence[Values], constants: Values, exchange: Exchange) -> None:
        """Raise `RuntimeInputError` on all ranks if a micro-batch decides something else. Collective."""
        decisions = self._program.decisions
        if not decisions:
            return
        own: tuple[int, int] = (0, 0)
        for micro_batch in micro_batches:
            values = {**constants, **{name: value.to(self._code.device) for name, value in micro_batch.items()}}
            for part in self._parts:  # all parts run in any case: their code may have collectives
                part.run(values)
            for number, decision in enumerate(decisions, 1):
                different = _different(decision.value, values[decision.name])
                if different is not None and not own[0]:
                    own = number, _bits(different)
        text = _text(exchange(own), decisions)
        if text:
            more = ", or use micro_batches × accumulate = 1: every micro-batch must decide alike"
            raise RuntimeInputError(text + more * (len(micro_batches) > 1))


def _different(expected: Any, found: torch.Tensor) -> float | None:
    """The first number that differs from the number that was read during capture. None if all are equal."""
    numbers = pytree.tree_leaves(expected)
    pairs = zip(numbers, found.reshape(-1).tolist(), strict=True)
    return next((float(b) for a, b in pairs if not _equal(a, b)), None)


def _equal(expected: float, found: float) -> bool:
    if isinstance(expected, bool):
        return bool(found) == expected
    if isinstance(expected, int):
        return int(found) == expected
    return math.isclose(expected, found, rel_tol=_REL_TOLERANCE) or (expected != expected and found != found)


def _bits(number: float) -> int:
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


def _number(decision: Decision, bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    kinds = {type(value) for value in pytree.tree_leaves(decision.value)}
    return bool(number) if kinds == {bool} else int(number) if kinds == {int} and number == int(number) else number


def _text(rows: Sequence[Sequence[int]], decisions: Sequence[Decision]) -> str:
    """The message about the first decision that differs. Empty if all are equal."""
    ranks_of: dict[tuple[int, int], list[int]] = {}
    for rank, (number, bits, *_) in enumerate(rows):
        if number:
            ranks_of.setdefault((number, bits), []).append(rank)
    if not ranks_of:
        return ""
    (number, bits), ranks = min(ranks_of.items())
    decision = decisions[number - 1]
    of = f" of input {' and '.join(map(repr, decision.inputs))}" if decision.inputs else ""
    return (
        f"the batch takes another branch than the captured model: {decision.line}: `{decision.code}` read "
        f"{short_repr(decision.value)}{of} during capture, {named_ranks(ranks)} now read "
        f"{short_repr(_number(decision, bits))}; pass batches that decide alike, or capture the model with this batch "
        "as example inputs"
    )
