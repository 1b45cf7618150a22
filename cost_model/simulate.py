"""Pipelines replayed: the action lists of `autopar.ir.schedules`, which the runtime executes, with seconds per pass.

A rank runs its actions in their order. A pass begins when the one before it has ended and what it needs is there: a
forward pass the values of the stage before, a backward pass its own forward pass and the gradients of the stage after,
the part for the weights the part for the inputs. Between stages of one rank nothing is sent. Since the order on every
rank is fixed, times are longest paths, found in one sweep (`simulate`); where a closed form of
`autopar.cost_model.pipelines` is exact both agree to rounding.

Messages are *overlapped*, as torch.distributed.pipelining sends them: the rank goes on, and sends one message after
another; or *blocking*: the rank waits until its message has arrived. A receiver is always ready, as with receives
posted ahead; runtimes that pair sends with receives order them so that no rank waits for itself, which a list does not
say.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.errors import PlanError, Problem
from autopar.ir.schedules import Action, Pass, actions, live_micro_batches, rank_of_stage

Orders = Sequence[Sequence[Action]]
_NEVER = -1.0  # times are not negative


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of the passes of one micro-batch, by stage: F, B, and I and W where the backward pass is split.

    `forward_message_s[i]` and `backward_message_s[i]` are those of a message from stage i to the next and back.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    input_s: Sequence[float]
    weight_s: Sequence[float]
    forward_message_s: Sequence[float]
    backward_message_s: Sequence[float]

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)


def equal_stages(
    num_stages: int, *, forward_s: float, backward_s: float, weight_s: float = 0.0, message_s: float = 0.0
) -> StageSeconds:
    """Equal stages; the seconds are of one stage, W is a part of B."""
    return StageSeconds(
        forward_s=[forward_s] * num_stages,
        backward_s=[backward_s] * num_stages,
        input_s=[backward_s - weight_s] * num_stages,
        weight_s=[weight_s] * num_stages,
        forward_message_s=[message_s] * (num_stages - 1),
        backward_message_s=[message_s] * (num_stages - 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One pass on the time line of a rank."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one pass sends to the stage that needs it."""

    from_rank: int
    to_rank: int
    from_stage: int
    to_stage: int
    micro_batch: int
    start_s: float
    end_s: float
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A replayed step. Arrays are per rank; `starts_s[rank][i]` and the like are of the i-th action of a rank.

    `busy_s` are seconds in passes, `sending_s` those in sends that block, `idle_s` the rest of the step, `gaps_s` what
    of it lies between a rank's first and last pass. `live` is the most (stage, micro-batch) pairs held at once.
    """

    orders: Orders
    rank_of_stage: Sequence[int]
    step_s: float
    busy_s: NDArray[np.float64]
    sending_s: NDArray[np.float64]
    starts_s: Sequence[Sequence[float]]
    ends_s: Sequence[Sequence[float]]
    sent_s: Sequence[Sequence[float]]
    arrived_s: Sequence[Sequence[float]]

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def idle_s(self) -> NDArray[np.float64]:
        return self.step_s - self.busy_s - self.sending_s

    @property
    def gaps_s(self) -> NDArray[np.float64]:
        spans = [end[-1] - start[0] if start else 0.0 for start, end in zip(self.starts_s, self.ends_s, strict=True)]
        return np.array(spans) - self.busy_s - self.sending_s

    @property
    def live(self) -> tuple[int, ...]:
        return tuple(live_micro_batches(order) for order in self.orders)

    def timeline(self) -> Iterator[Interval]:
        """Every pass, rank by rank in the order of time."""
        for rank, (order, starts, ends) in enumerate(zip(self.orders, self.starts_s, self.ends_s, strict=True)):
            for action, start, end in zip(order, starts, ends, strict=True):
                yield Interval(rank=rank, action=action, start_s=start, end_s=end)

    def messages(self, forward_bytes: Sequence[float], backward_bytes: Sequence[float]) -> Iterator[Message]:
        """Every message, with the bytes that cross between each stage and the next, and back."""
        for rank, (order, sent, arrived) in enumerate(zip(self.orders, self.sent_s, self.arrived_s, strict=True)):
            for action, start, end in zip(order, sent, arrived, strict=True):
                if start == _NEVER:
                    continue
                is_forward = action.kind == "F"
                to = action.stage + 1 if is_forward else action.stage - 1
                yield Message(
                    from_rank=rank,
                    to_rank=self.rank_of_stage[to],
                    from_stage=action.stage,
                    to_stage=to,
                    micro_batch=action.micro_batch,
                    start_s=start,
                    end_s=end,
                    num_bytes=forward_bytes[action.stage] if is_forward else backward_bytes[to],
                )


def simulate(
    orders: Orders, seconds: StageSeconds, *, messages: Literal["overlapped", "blocking"] = "overlapped"
) -> Simulation:
    """Replay the action lists of all ranks. Raises PlanError where ranks wait for each other, and says for what."""
    replay = _replay(orders, _rank_of_stage(orders, seconds))
    times = replayed(replay, seconds, messages=messages)
    starts, ends, sent, arrived = (
        _by_rank(replay, column) for column in (times.starts_s, times.ends_s, times.sent_s, times.arrived_s)
    )
    busy = [sum(end) - sum(start) for start, end in zip(starts, ends, strict=True)]
    return Simulation(
        orders=orders,
        rank_of_stage=replay.rank_of_stage,
        step_s=times.step_s,
        busy_s=np.array(busy),
        sending_s=times.sending_s,
        starts_s=starts,
        ends_s=ends,
        sent_s=sent,
        arrived_s=arrived,
    )


def shared_step_s(run: "Simulation | Replayed", ranks_per_core: float) -> float:
    """Seconds of a step whose ranks share cores, replayed with the seconds of passes while all ranks compute.

    At any moment all ranks that compute have the same speed, so that the order of events stays and time runs faster:
    with k of p ranks at work by p/k, but a rank has one core at most. Where none computes, messages take their time.
    """
    starts, ends = (np.concatenate([np.atleast_1d(one) for one in column]) for column in (run.starts_s, run.ends_s))
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    working = np.cumsum(np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])[order])
    spans = np.diff(np.append(times[order], run.step_s))
    faster = np.where(working > 0, np.minimum(ranks_per_core, run.num_ranks / np.maximum(working, 1)), 1.0)
    return float(np.sum(spans / np.maximum(faster, 1.0)) + times[order[0]])


def peak_held_bytes(
    orders: Orders, held_bytes: Sequence[float], held_for_weights_bytes: Sequence[float] | None = None
) -> NDArray[np.float64]:
    """Per rank, the most bytes that its stages hold for backward passes at once.

    By stage, what one micro-batch holds from F to B or W, and what of it is still held after I (by default all).
    """
    later = held_bytes if held_for_weights_bytes is None else held_for_weights_bytes
    found = []
    for order in orders:
        held = most = 0.0
        for action in order:
            whole, rest = held_bytes[action.stage], later[action.stage]
            held += {"F": whole, "B": -whole, "I": rest - whole, "W": -rest}[action.kind]
            most = max(most, held)
        found.append(most)
    return np.array(found)


@lru_cache(maxsize=64)
def most_held(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> tuple[NDArray[np.float64], ...]:
    """Per rank of a schedule, rows of how many micro-batches of every stage it holds, whenever it holds most of one.

    The largest of all rows times what stages hold is `peak_held_bytes`.
    """
    stages, found = pp * virtual_stages, []
    for order in actions(schedule, pp, virtual_stages, micro_batches):
        own = sorted({stage for stage, _, _ in order})
        counts, rows, grows = dict.fromkeys(own, 0), {(0,) * len(own)}, False
        for stage, kind, _ in order:
            if kind == "F":
                counts[stage] += 1
                grows = True
            elif kind != "I":
                if grows:
                    rows.add(tuple(counts.values()))
                counts[stage] -= 1
                grows = False
        every = np.zeros((len(rows), stages))
        every[:, own] = sorted(rows)
        found.append(every)
    return tuple(found)


# ---- the sweep ----

_CODES: dict[Pass, int] = {"F": 0, "B": 1, "I": 2, "W": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Action lists in an order in which they can run, whatever passes last; one row per action.

    A row is its rank; its pass, kind by stage; the cell with the time of what it waits for, and the cell that its end
    goes to; its message, direction by stage, -1 where none is sent. Cells are what stages need of each micro-batch,
    the last one is what nobody needs.
    """

    orders: Orders
    rank_of_stage: Sequence[int]
    rows: tuple[tuple[int, int, int, int, int], ...]
    num_cells: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Times of a replay's rows; `sending_s` are seconds per rank in sends that block."""

    step_s: float
    num_ranks: int
    sending_s: NDArray[np.float64]
    starts_s: list[float]
    ends_s: list[float]
    sent_s: list[float]
    arrived_s: list[float]


@lru_cache(maxsize=64)
def replay_of(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> Replay:
    """A schedule's own action lists, to be replayed with any seconds."""
    ranks = tuple(rank_of_stage(schedule, pp, stage) for stage in range(pp * virtual_stages))
    return _replay(actions(schedule, pp, virtual_stages, micro_batches), ranks)


def _replay(orders: Orders, ranks: Sequence[int]) -> Replay:
    """Rows of all actions; `ranks` are those of stages. Each rank runs until it has to wait; a message wakes its
    receiver. Raises PlanError where ranks wait for each other.

    A pass's gradient, and with it the pass, is there only after the stage's forward pass: no need to look at that.
    """
    stages, count = len(ranks), 1 + max((action.micro_batch for order in orders for action in order), default=0)
    # by stage and micro-batch: the inputs of F, the gradients of B or I, what I leaves for W; and what nobody needs
    size, last = stages * count, 3 * stages * count
    is_there = [True] * count + [False] * (last - count + 1)
    first_cell = {"F": 0, "B": size, "I": size, "W": 2 * size}  # of what a pass needs
    done, rows = [0] * len(orders), []
    waiting, is_waiting = list(range(len(orders))), [True] * len(orders)
    while waiting:
        rank = waiting.pop()
        is_waiting[rank] = False
        order, position = orders[rank], done[rank]
        while position < len(order):
            stage, kind, micro_batch = order[position]
            code, cell = _CODES[kind], stage * count + micro_batch
            needs = cell + first_cell[kind]
            if not is_there[needs]:
                break
            gives, message = last, -1
            if code == 0 and stage == stages - 1:
                gives = size + cell
            elif code == 0 or (code < 3 and stage > 0):
                to = stage + 1 if code == 0 else stage - 1
                gives = cell + count if code == 0 else size + cell - count
                if ranks[to] != rank:
                    message = stage if code == 0 else stages + to
                    if not is_waiting[ranks[to]]:
                        waiting.append(ranks[to])
                        is_waiting[ranks[to]] = True
            is_there[gives] = True
            if code == 2:
                is_there[2 * size + cell] = True
            # W follows I on its own rank, and waits for nothing else
            rows.append((rank, code * stages + stage, 0 if code == 3 else needs, gives, message))
            position += 1
        done[rank] = position
    if any(position < len(order) for order, position in zip(orders, done, strict=True)):
        raise _stuck(orders, done, ranks)
    return Replay(orders=orders, rank_of_stage=ranks, rows=tuple(rows), num_cells=last + 1)


def replayed(
    replay: Replay, seconds: StageSeconds, *, messages: Literal["overlapped", "blocking"] = "overlapped"
) -> Replayed:
    """Replay action lists with the seconds of their passes."""
    blocks = messages == "blocking"
    lasting = [*seconds.forward_s, *seconds.backward_s, *seconds.input_s, *seconds.weight_s]
    lasts = [*seconds.forward_message_s, 0.0, *seconds.backward_message_s]
    there, num_ranks = [0.0] * replay.num_cells, len(replay.orders)
    starts, ends, sent, arrived = list[float](), list[float](), list[float](), list[float]()
    free, port, sending = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    for rank, which, needs, gives, message in replay.rows:
        start = free[rank]
        if there[needs] > start:
            start = there[needs]
        end = now = start + lasting[which]
        starts.append(start)
        ends.append(end)
        if message < 0:
            there[gives] = end
            sent.append(_NEVER)
            arrived.append(_NEVER)
        else:
            begin = end if end > port[rank] else port[rank]
            arrives = there[gives] = port[rank] = begin + lasts[message]
            sent.append(begin)
            arrived.append(arrives)
            if blocks:
                sending[rank] += arrives - end
                now = arrives
        free[rank] = now
    return Replayed(
        step_s=max(free, default=0.0),
        num_ranks=num_ranks,
        sending_s=np.array(sending),
        starts_s=starts,
        ends_s=ends,
        sent_s=sent,
        arrived_s=arrived,
    )


def run_seconds(
    replay: Replay, seconds: StageSeconds, *, messages: Literal["overlapped", "blocking"] = "overlapped"
) -> tuple[float, NDArray[np.float64]]:
    """Seconds of a replay, and those of every rank in sends that block; as `replayed`, which keeps all times."""
    lasting = [*seconds.forward_s, *seconds.backward_s, *seconds.input_s, *seconds.weight_s]
    lasts = [*seconds.forward_message_s, 0.0, *seconds.backward_message_s]
    there, num_ranks, blocks = [0.0] * replay.num_cells, len(replay.orders), messages == "blocking"
    free, port, sending = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    for rank, which, needs, gives, message in replay.rows:
        start, arrived = free[rank], there[needs]
        end = (arrived if arrived > start else start) + lasting[which]
        free[rank] = end
        if message < 0:
            there[gives] = end
        else:
            begin = port[rank]
            there[gives] = port[rank] = arrives = (end if end > begin else begin) + lasts[message]
            if blocks:
                sending[rank] += arrives - end
                free[rank] = arrives
    return max(free, default=0.0), np.array(sending)


def _by_rank(replay: Replay, times: Sequence[float]) -> list[list[float]]:
    """Times of rows as those of every rank's actions."""
    found: list[list[float]] = [[] for _ in replay.orders]
    for row, time in zip(replay.rows, times, strict=True):
        found[row[0]].append(time)
    return found


# ---- what cannot run ----


def _rank_of_stage(orders: Orders, seconds: StageSeconds) -> tuple[int, ...]:
    stages, owners, problems = seconds.num_stages, dict[int, int](), []
    for rank, order in enumerate(orders):
        for action in order:
            if owners.setdefault(action.stage, rank) != rank:
                rule = f"stage {action.stage} is also on rank {owners[action.stage]}"
                problems.append(Problem(path=f"rank {rank}", value=str(action), rule=rule))
    lengths = {"passes": {len(seconds.backward_s), len(seconds.input_s), len(seconds.weight_s), stages}}
    lengths["messages"] = {len(seconds.forward_message_s) + 1, len(seconds.backward_message_s) + 1, stages}
    for name, found in lengths.items():
        if found != {stages}:
            problems.append(Problem(path=f"seconds of {name}", rule=f"must be given for {stages} stages"))
    if sorted(owners) != list(range(stages)):
        rule = f"must hold the stages 0 to {stages - 1}, those that seconds are given of"
        problems.append(Problem(path="action lists", value=sorted(owners), rule=rule))
    if problems:
        raise PlanError("the pipeline's action lists cannot be replayed", problems)
    return tuple(owners[stage] for stage in range(stages))


def _stuck(orders: Orders, positions: Sequence[int], rank_of_stage: Sequence[int]) -> PlanError:
    """What every rank that is left waits for, and a circle of them where there is one."""
    problems, waits = [], dict[int, int]()
    for rank, (order, position) in enumerate(zip(orders, positions, strict=True)):
        if position == len(order):
            continue
        action = order[position]
        needed, owner = _needed(orders, action, rank_of_stage)
        left = orders[owner][positions[owner] :]
        if needed in left:
            waits[rank] = owner
            first = "" if left[0] == needed else f" after {left[0]}"
            rule = f"waits for {needed}, which rank {owner} would run{first}"
        else:
            rule = f"waits for {needed}, which is not in the list of rank {owner}"
        problems.append(Problem(path=f"rank {rank}", value=str(action), rule=rule))
    path = [next(iter(waits), -1)]
    while path[-1] in waits and path[-1] not in path[:-1]:
        path.append(waits[path[-1]])
    circle = " → ".join(f"rank {rank}" for rank in path[path.index(path[-1]) :]) if path[-1] in waits else ""
    message = f"deadlock in the pipeline: {circle}" if circle else "the pipeline's action lists miss passes"
    return PlanError(f"{message}; reorder the passes of these ranks or use a schedule's own order", problems)


def _needed(orders: Orders, action: Action, rank_of_stage: Sequence[int]) -> tuple[Action, int]:
    """The action that one waits for, and its rank."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "W":
        return Action(stage, "I", micro_batch), rank_of_stage[stage]
    if action.kind == "F":
        return Action(stage - 1, "F", micro_batch), rank_of_stage[stage - 1]
    if stage == len(rank_of_stage) - 1:
        return Action(stage, "F", micro_batch), rank_of_stage[stage]
    owner = rank_of_stage[stage + 1]
    split = Action(stage + 1, "I", micro_batch)
    return (split if split in orders[owner] else Action(stage + 1, "B", micro_batch)), owner
