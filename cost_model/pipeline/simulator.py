"""Pipelines replayed: the action lists that the runtime executes, with seconds per pass (`autopar.ir.schedules`).

A rank runs its actions in their order. A pass begins when the pass before it has ended and its inputs are there. A
forward pass needs the values of the stage before. A backward pass needs its own forward pass and the gradients of the
stage after. The part for the weights needs the part for the inputs. Stages of one rank send nothing to each other. The
order on every rank is fixed, so times are longest paths, which one sweep finds (`replayed`). If a closed form of
`autopar.cost_model.pipeline.closed_forms` is exact, both agree to rounding.

Messages are *overlapped* or *blocking*. With overlapped messages, as in torch.distributed.pipelining, the rank goes on
and sends one message after another. With blocking messages the rank waits until its message has arrived. A receiver is
always ready, as with receives posted ahead. Runtimes that pair sends with receives order them so that no rank waits for
itself; an action list does not say so.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.ir.schedules.action import KINDS, Action, Pass, action_of
from autopar.ir.schedules.registry import numbered_actions, rank_of_stage

_NEVER = -1.0  # times are not negative


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of the passes of one micro-batch, by stage: F, B, and I and W where the backward pass is split."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    input_s: Sequence[float]
    weight_s: Sequence[float]
    forward_message_s: Sequence[float]  # from each stage to the next
    backward_message_s: Sequence[float]  # from each stage's next one back

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPass:
    """One pass on the time line of a rank."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The message of one pass to the stage that needs it."""

    from_rank: int
    to_rank: int
    from_stage: int
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A replayed run. `starts_s[rank][i]` and the like are of the i-th action of a rank."""

    replay: "Replay"
    step_s: float
    sending_s: NDArray[np.float64]  # of every rank, in sends that block
    starts_s: Sequence[Sequence[float]]
    ends_s: Sequence[Sequence[float]]
    sent_s: Sequence[Sequence[float]]
    arrived_s: Sequence[Sequence[float]]

    @property
    def num_ranks(self) -> int:
        return len(self.starts_s)

    @property
    def busy_s(self) -> NDArray[np.float64]:
        """Seconds of every rank in passes."""
        return np.array([sum(end) - sum(start) for start, end in zip(self.starts_s, self.ends_s, strict=True)])

    def timeline(self) -> Iterator[TimedPass]:
        """Every pass, rank by rank in the order of time."""
        for rank, *each in zip(range(self.num_ranks), self.replay.orders, self.starts_s, self.ends_s, strict=True):
            for number, start, end in zip(*each, strict=True):
                action = action_of(number, self.replay.micro_batches)
                yield TimedPass(rank=rank, action=action, start_s=start, end_s=end)

    def messages(self) -> Iterator[Message]:
        """Every message."""
        for timed, sent, arrived in zip(self.timeline(), chain(*self.sent_s), chain(*self.arrived_s), strict=True):
            if sent != _NEVER:
                stage, kind, micro_batch = timed.action
                yield Message(
                    from_rank=timed.rank,
                    to_rank=self.replay.rank_of_stage[stage + 1 if kind == "F" else stage - 1],
                    from_stage=stage,
                    micro_batch=micro_batch,
                    start_s=sent,
                    end_s=arrived,
                )


def shared_step_s(run: Simulation, ranks_per_core: float) -> float:
    """Seconds of a step whose ranks share cores, replayed with the seconds of passes while all ranks compute.

    At any moment all computing ranks have the same speed, so the order of events stays and time runs faster. If k of p
    ranks compute, time runs faster by p/k, but a rank has one core at most. If no rank computes, messages take their
    time.
    """
    starts, ends = (np.concatenate(column) for column in (run.starts_s, run.ends_s))
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    working = np.cumsum(np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])[order])
    spans = np.diff(np.append(times[order], run.step_s))
    faster = np.where(working > 0, np.minimum(ranks_per_core, run.num_ranks / np.maximum(working, 1)), 1.0)
    return float(np.sum(spans / np.maximum(faster, 1.0)) + times[order[0]])


@lru_cache(maxsize=64)
def most_held(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> tuple[NDArray[np.float64], ...]:
    """Per rank of a schedule, rows of how many micro-batches of every stage it holds, whenever it holds most of one."""
    stages, states = pp * virtual_stages, []
    for order in numbered_actions(schedule, pp, virtual_stages, micro_batches):
        each = np.array(order) // micro_batches
        code, stage = each % len(KINDS), each // len(KINDS)
        mine = np.unique(stage)
        kept = code != _CODES["I"]
        begins, held = code[kept] == _CODES["F"], stage[kept][:, None] == mine
        counts = np.cumsum(np.where(begins[:, None], 1, -1) * held, axis=0)
        rows = {(0,) * len(mine), *map(tuple, counts[:-1][begins[:-1] & ~begins[1:]].tolist())}
        every = np.zeros((len(rows), stages))
        every[:, mine] = sorted(rows)
        states.append(every)
    return tuple(states)


# ---- the sweep ----

_CODES: dict[Pass, int] = {kind: code for code, kind in enumerate(KINDS)}
_NONE, _IS_THERE = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Action lists in an order in which they can run, whatever passes last; one row per action.

    A cell holds the time at which a value of one micro-batch is ready for one stage. No row reads the last cell.

    A row has six numbers; -1 stands for none:

    1. the rank;
    2. the pass: its kind and its stage;
    3. the cell that it waits for;
    4. the cell to which it writes its end;
    5. its message: the direction and the stage;
    6. the weights' pass that follows on the same rank. This pass waits for nothing, so it has no row of its own.
    """

    orders: Sequence[Sequence[int]]  # the lists of all ranks, as numbers
    micro_batches: int
    rank_of_stage: Sequence[int]
    rows: Sequence[tuple[int, ...]]
    num_cells: int


@lru_cache(maxsize=64)
def replay_of(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> Replay:
    """A schedule's action lists, to be replayed with any seconds.

    A rank runs until it has to wait, and goes on when the awaited value is there.
    """
    ranks = tuple(rank_of_stage(schedule, pp, stage) for stage in range(pp * virtual_stages))
    orders = numbered_actions(schedule, pp, virtual_stages, micro_batches)
    each, micro_batch = np.divmod(np.array([number for order in orders for number in order]), micro_batches)
    lengths = [*map(len, orders)]
    rows, num_cells = _rows(np.array([each // len(KINDS), each % len(KINDS), micro_batch]), lengths, ranks)
    counts = np.bincount(rows[0], minlength=pp)
    stops, num_inputs = np.cumsum(counts), num_cells // (3 * len(ranks))
    rows = np.insert(rows, stops, num_cells, axis=1)  # the last row of every rank waits for ever
    stops += np.arange(pp)
    needs, gives = rows[2].tolist(), rows[3].tolist()
    cells = [_IS_THERE] * num_inputs + [_NONE] * (num_cells - num_inputs + 1)  # or the rank that waits for it
    done, order, ready = (stops - counts).tolist(), list[int](), list(range(pp))
    while ready:
        rank = ready.pop()
        position = done[rank]
        while cells[needs[position]] == _IS_THERE:
            cell = gives[position]
            if cells[cell] >= 0:
                ready.append(cells[cell])
            cells[cell] = _IS_THERE
            order.append(position)
            position += 1
        cells[needs[position]] = rank
        done[rank] = position
    assert done == stops.tolist(), f"ranks of {schedule} wait for each other: {pp, virtual_stages, micro_batches}"
    return Replay(
        orders=orders,
        micro_batches=micro_batches,
        rank_of_stage=ranks,
        rows=list(zip(*rows[:, order].tolist(), strict=True)),
        num_cells=num_cells,
    )


def _rows(actions: NDArray[np.intp], lengths: Sequence[int], ranks: Sequence[int]) -> tuple[NDArray[np.intp], int]:
    """The rows of all actions as columns, and the number of cells.

    `actions` has rows of stage, pass and micro-batch; its columns are the actions, rank after rank. A backward pass
    waits for its gradient only. The gradient comes after the stage's own forward pass.
    """
    stage, code, micro_batch = actions
    stages, count = len(ranks), 1 + int(micro_batch.max(initial=0))
    # cells by stage and micro-batch: inputs of F, gradients of B or I, values that I leaves for W; one unread cell
    size, last = stages * count, 3 * stages * count
    cell, rank = stage * count + micro_batch, np.repeat(np.arange(len(lengths)), lengths)
    is_forward, is_weight, at = code == _CODES["F"], code == _CODES["W"], np.arange(len(cell))
    needs = cell + size * np.array([0, 1, 1, 2])[code]
    # W follows I on its own rank, and waits for nothing else
    behind = np.full(size, len(cell))
    behind[cell[code == _CODES["I"]]] = at[code == _CODES["I"]]
    follows = is_weight & (behind[cell] < at)
    needs[follows] = 0
    crosses = np.where(is_forward, stage < stages - 1, ~is_weight & (stage > 0))
    to = np.where(crosses, np.where(is_forward, stage + 1, stage - 1), stage)
    gives = np.where(is_forward, cell + count, size + cell - count)
    gives = np.where(crosses, gives, np.where(is_forward, size + cell, last))
    message = np.where(np.array(ranks)[to] != rank, np.where(is_forward, stage, stages + to), _NONE)
    # one row of two passes where W comes next
    passes = code * stages + stage
    joins = follows & np.append(False, (rank[1:] == rank[:-1]) & ~is_weight[:-1])
    then = np.where(np.append(joins[1:], False), np.append(passes[1:], 0), _NONE)
    return np.array([rank, passes, needs, gives, message, then])[:, ~joins], last + 1


def replayed(
    replay: Replay, seconds: StageSeconds, *, messages: Literal["overlapped", "blocking"] = "overlapped"
) -> Simulation:
    """Replay action lists with the seconds of their passes."""
    starts, ends, sent, arrived = ([list[float]() for _ in replay.orders] for _ in range(4))

    def write(rank: int, *times: float) -> None:
        for column, time in zip((starts, ends, sent, arrived), times, strict=True):
            column[rank].append(time)

    step_s, sending_s = run_seconds(replay, seconds, messages=messages, write=write)
    return Simulation(
        replay=replay,
        step_s=step_s,
        sending_s=sending_s,
        starts_s=starts,
        ends_s=ends,
        sent_s=sent,
        arrived_s=arrived,
    )


def run_seconds(
    replay: Replay,
    seconds: StageSeconds,
    *,
    messages: Literal["overlapped", "blocking"] = "overlapped",
    write: Callable[..., None] | None = None,
) -> tuple[float, NDArray[np.float64]]:
    """Seconds of a replay, and the seconds of every rank in blocking sends.

    `write` gets the rank of every pass, its start and end, and the start and end of its message.
    """
    blocks = messages == "blocking"
    lasting, lasts = _lasting(seconds)
    there, free, port, sending = [0.0] * replay.num_cells, *([0.0] * len(replay.orders) for _ in range(3))
    for rank, which, needs, gives, message, then in replay.rows:
        free_s, there_s = free[rank], there[needs]
        start = there_s if there_s > free_s else free_s
        end = now = start + lasting[which]
        if message < 0:
            there[gives], begin, arrives = end, _NEVER, _NEVER
        else:
            begin = port[rank]
            begin = end if end > begin else begin
            there[gives] = port[rank] = arrives = begin + lasts[message]
            if blocks:
                sending[rank] += arrives - end
                now = arrives
        free[rank] = now + lasting[then]
        if write is not None:
            write(rank, start, end, begin, arrives)
            if then >= 0:
                write(rank, now, free[rank], _NEVER, _NEVER)
    return max(free, default=0.0), np.array(sending)


def _lasting(seconds: StageSeconds) -> tuple[list[float], list[float]]:
    """Seconds of passes and of messages as rows count them; the last pass is none."""
    passes = [*seconds.forward_s, *seconds.backward_s, *seconds.input_s, *seconds.weight_s, 0.0]
    return passes, [*seconds.forward_message_s, 0.0, *seconds.backward_message_s]
