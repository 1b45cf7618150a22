"""The passes of a pipeline: as actions that print as torch prints them, and as numbers that long lists hold.

``0F1`` is stage 0, forward, micro-batch 1. ``B`` is the whole backward pass, ``I`` its part for a stage's inputs and
``W`` its part for the stage's weights.
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Literal, NamedTuple

Pass = Literal["F", "B", "I", "W"]
KINDS: tuple[Pass, ...] = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    stage: int
    kind: Pass
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def pass_number(stage: int, kind: Pass) -> int:
    """A pass of a stage as a number. Times the micro-batches plus the micro-batch, it is the number of an action."""
    return stage * len(KINDS) + KINDS.index(kind)


def action_of(number: int, micro_batches: int) -> Action:
    """The inverse: the action that has a number."""
    pair, micro_batch = divmod(number, micro_batches)
    return Action(pair // len(KINDS), KINDS[pair % len(KINDS)], micro_batch)


def in_turns(*passes: tuple[int, Sequence[int]]) -> list[int]:
    """Merge lists of passes: in every step each list runs one pass, from the step on at which the list begins."""
    order: list[int] = []
    ends = sorted({end for begin, ids in passes for end in (begin, begin + len(ids))})
    for start, stop in pairwise(ends):
        running = [ids[start - begin : stop - begin] for begin, ids in passes if begin <= start < begin + len(ids)]
        order.extend(chain.from_iterable(zip(*running, strict=True)))
    return order


def peak_in_flight(order: Sequence[Action]) -> int:
    """The most (stage, micro-batch) pairs of one rank whose activations are held at once: from F to B or W."""
    live = most = 0
    for action in order:
        live += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        most = max(most, live)
    return most
