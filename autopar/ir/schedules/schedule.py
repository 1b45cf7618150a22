"""The facts of a pipeline schedule. All code that orders, prices or bounds a pipeline asks this value.

Formulas take p ranks, v stages on each rank, n micro-batches and the rank r, as numbers or as arrays of candidates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from autopar.ir.schedules.action import Action
from autopar.ir.schedules.elementwise import minimum


class PassCounts(NamedTuple):
    """How many passes of one stage a path through the pipeline holds, by kind."""

    forward: Any
    inputs: Any
    weights: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """Seconds of the passes of one micro-batch, as arrays of candidates, for `Schedule.step_bound`."""

    pp: Any
    micro_batches: Any
    forward: Any  # through all stages
    backward: Any
    slowest_forward: Any  # through the slowest stage
    slowest_backward: Any
    first_forward: Any  # through the first rank's stages
    first_backward: Any
    messages: Any  # from the first stage to the last and back


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule: its name, the order of its passes, and closed forms of its idle time and its memory."""

    name: str  # in plans and on the command line
    torch_name: str | None  # torch.distributed.pipelining's class without "Schedule"; None if it has none
    source: str
    published: tuple[int, int]  # year and month of the source; schedules are listed oldest first

    least_stages: int = 1  # stages of one rank
    most_stages: int | None = 1  # None: any number
    # in "v" the second stages run over the ranks in reverse, so that one rank holds the first and the last stage
    placement: Literal["loop", "v"] = "loop"
    splits_backward: bool = False  # whether backward passes run in the parts I and W

    # (rank, p, v, n) -> the numbers of a rank's actions (`autopar.ir.schedules.action`), in the order in which they run
    rank_order: Callable[[int, int, int, int], Sequence[int]]
    # (p, n) -> why the schedule does not run n micro-batches, and what to use instead; None if it does
    refusal: Callable[[int, int], tuple[str, str] | None] = lambda pp, micro_batches: None
    # (p, v, n) -> the paths that can be the longest, in passes beyond the n·v of each kind that every rank runs
    critical_paths: Callable[[Any, Any, Any], Sequence[PassCounts]]
    # whether the longest of these paths is the idle time exactly, else a lower bound; balanced means F = I = W
    is_exact: Callable[[int, int, int, bool], bool] = lambda pp, virtual_stages, micro_batches, is_balanced: True
    # (p, v, n, r) -> the most (stage, micro-batch) pairs that a rank holds from F to B or W; at most n·v are counted
    in_flight: Callable[[Any, Any, Any, Any], Any]
    # (p, v, n, r) -> forward passes before the first backward pass of a rank; at most n·v are counted
    warm_up: Callable[[Any, Any, Any, Any], Any]
    # a lower bound of a step with unequal stages, beside the bounds of all schedules (`autopar.search.bounds.pipeline`)
    step_bound: Callable[[PassSeconds], Any] | None = None
    step_bound_is_exact: bool = False  # without messages, if every rank holds one stage

    @property
    def passes_per_micro_batch(self) -> int:
        """Passes of one stage: F and B, or F, I and W."""
        return 3 if self.splits_backward else 2

    def rank_of_stage(self, pp: int, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        turn, position = divmod(stage, pp)
        return pp - 1 - position if self.placement == "v" and turn % 2 else position

    def most_in_flight(self, *, pp: Any, virtual_stages: Any = 1, micro_batches: Any, rank: Any = 0) -> Any:
        """The most (stage, micro-batch) pairs whose activations a rank holds at once, in the shape of all arguments."""
        pairs = micro_batches * virtual_stages + 0 * (pp + rank)  # a formula may leave arguments out
        return minimum(pairs, self.in_flight(pp, virtual_stages, micro_batches, rank))

    def warm_up_passes(self, *, pp: Any, virtual_stages: Any = 1, micro_batches: Any, rank: Any = 0) -> Any:
        """Forward passes of one stage that a rank runs before its first backward pass, shaped as `most_in_flight`."""
        pairs = micro_batches * virtual_stages + 0 * (pp + rank)
        return minimum(pairs, self.warm_up(pp, virtual_stages, micro_batches, rank))


ActionLists = tuple[tuple[Action, ...], ...]  # of every rank, its actions in the order in which they run
