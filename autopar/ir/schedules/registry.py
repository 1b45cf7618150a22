"""Pipeline schedules as data: which stage runs which pass of which micro-batch, in order, on every pipeline rank.

The order is that of torch.distributed.pipelining's own schedule of the name, which takes a second to import; a test
compares the two. What is listed here is what runs, and what a simulator replays. An action prints as torch prints it:
``0F1`` is stage 0, forward, micro-batch 1; ``B`` is the whole backward pass, ``I`` the part for a stage's inputs,
``W`` the part for its weights.

| schedule               | stages of a rank | source                                                           |
|------------------------|------------------|------------------------------------------------------------------|
| gpipe                  | 1                | Huang et al. 2019, "GPipe", section 2.3                          |
| 1f1b                   | 1                | Narayanan et al. 2021, "PipeDream-2BW", section 2 (flush)        |
| interleaved-1f1b       | 2 or more        | Narayanan et al. 2021, "Megatron-LM", section 2.2.2              |
| interleaved-zero-bubble| 1 or more        | Qi et al. 2024, "Zero Bubble Pipeline Parallelism", ZB1P         |
| zbv-zero-bubble        | 2                | Qi et al. 2024, section 6                                        |
| dualpipev              | 2                | DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.1                   |
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import Literal, NamedTuple

from autopar.errors import Problem

Pass = Literal["F", "B", "I", "W"]
KINDS: tuple[Pass, ...] = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule of torch: the name of its class, stages of a rank, and whether the backward pass is done in parts.

    In ``v`` order the second stages of the ranks run backwards over them, so that a rank holds the first and the last.
    """

    torch_name: str
    least_stages: int
    most_stages: int | None
    order: Literal["loop", "v"] = "loop"
    splits_backward: bool = False


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(torch_name="GPipe", least_stages=1, most_stages=1),
    "1f1b": Schedule(torch_name="1F1B", least_stages=1, most_stages=1),
    "interleaved-1f1b": Schedule(torch_name="Interleaved1F1B", least_stages=2, most_stages=None),
    "interleaved-zero-bubble": Schedule(
        torch_name="InterleavedZeroBubble", least_stages=1, most_stages=None, splits_backward=True
    ),
    "zbv-zero-bubble": Schedule(
        torch_name="ZBVZeroBubble", least_stages=2, most_stages=2, order="v", splits_backward=True
    ),
    "dualpipev": Schedule(torch_name="DualPipeV", least_stages=2, most_stages=2, order="v", splits_backward=True),
}


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    stage: int
    kind: Pass
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def default_virtual_stages(schedule: str) -> int:
    """The fewest stages that a rank has under a schedule."""
    return SCHEDULES[schedule].least_stages


def rank_of_stage(schedule: str, pp: int, stage: int) -> int:
    """The pipeline rank that holds a stage.

    >>> [rank_of_stage("interleaved-1f1b", 2, s) for s in range(4)]
    [0, 1, 0, 1]
    >>> [rank_of_stage("dualpipev", 2, s) for s in range(4)]
    [0, 1, 1, 0]
    """
    turn, position = divmod(stage, pp)
    return pp - 1 - position if SCHEDULES[schedule].order == "v" and turn % 2 else position


def schedule_problems(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> list[Problem]:
    """What a schedule does not allow, all of it, with the nearest values that it does."""
    kind, problems = SCHEDULES[schedule], []
    least, most = kind.least_stages, kind.most_stages
    if virtual_stages < least or (most is not None and virtual_stages > most):
        wanted = f"{least}" if least == most else f"at least {least}"
        rule = f"schedule {schedule} has {wanted} stage{'s' * (least > 1)} on a rank"
        problems.append(Problem(path="virtual_stages", value=virtual_stages, rule=rule, suggestion=f"use {least}"))
    elif schedule == "dualpipev" and micro_batches < 2 * pp:
        rule = f"schedule dualpipev needs as many micro-batches as stages, {2 * pp}"
        problems.append(Problem(path="micro_batches", value=micro_batches, rule=rule, suggestion=f"use {2 * pp}"))
    elif schedule.startswith("interleaved") and not _rounds_fit(pp, micro_batches):
        near = [n for n in range(1, 2 * micro_batches + pp) if _rounds_fit(pp, n)]
        close = sorted(sorted(near, key=lambda n: abs(n - micro_batches))[:2])
        rule = f"schedule {schedule} takes micro-batches in {micro_batches // pp} rounds of equal size over {pp} ranks"
        hint = " or ".join(str(n) for n in close)
        problems.append(Problem(path="micro_batches", value=micro_batches, rule=rule, suggestion=f"nearest: {hint}"))
    return problems


def _rounds_fit(pp: int, micro_batches: int) -> bool:
    return micro_batches % max(1, micro_batches // pp) == 0


def actions(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Per pipeline rank, its actions in the order in which they run. Sizes are those that `schedule_problems` takes."""
    found = []
    for order in numbered_actions(schedule, pp, virtual_stages, micro_batches):
        pairs = [divmod(number, micro_batches) for number in order]
        found.append(tuple(Action(each // len(KINDS), KINDS[each % len(KINDS)], at) for each, at in pairs))
    return tuple(found)


@lru_cache(maxsize=64)
def numbered_actions(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """As `actions`, each of them as a number: lists are long, and a search replays many.

    The number is (stage · 4 + position of the pass in `KINDS`) · `micro_batches` + micro-batch.
    """
    return tuple(tuple(_of_rank(schedule, rank, pp, virtual_stages, micro_batches)) for rank in range(pp))


def _of_rank(schedule: str, rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[int]:
    match schedule:
        case "gpipe":
            return _one_stage(rank, micro_batches, micro_batches)
        case "1f1b":
            return _one_stage(rank, pp - rank, micro_batches)
        case "zbv-zero-bubble":
            return _zbv(rank, pp, micro_batches)
        case "dualpipev":
            return _dualpipev(rank, pp, micro_batches)
    return _interleaved(rank, pp, virtual_stages, micro_batches, splits=SCHEDULES[schedule].splits_backward)


def _one_stage(stage: int, ahead: int, micro_batches: int) -> list[int]:
    """The order of a rank with one stage that runs at most `ahead` forward passes before the backward of the first.

    torch's class runs so too, but the order that it publishes counts micro-batches from 1 on the last rank.
    """
    forward, backward = (_pass(stage, kind) * micro_batches for kind in ("F", "B"))
    return _in_turns(
        (0, range(forward, forward + micro_batches)), (ahead - 1, range(backward, backward + micro_batches))
    )


def _interleaved(rank: int, pp: int, virtual_stages: int, micro_batches: int, *, splits: bool) -> list[int]:
    """Rounds of about `pp` micro-batches through each of the rank's stages in turn; backward in the other direction.

    Where the backward pass is split, a weight's part comes `rank` passes after that of the inputs.
    """
    round_size = micro_batches // max(1, micro_batches // pp)
    ahead = (virtual_stages - 1) * round_size + (1 if splits else 2) * (pp - 1 - rank)
    warm_up = min(ahead, virtual_stages * micro_batches)
    rounds = [range(begin, begin + round_size) for begin in range(0, micro_batches, round_size)]
    own = range(rank, virtual_stages * pp, pp)

    def passes(kind: Pass, stages: Sequence[int]) -> list[int]:
        each = [_pass(stage, kind) * micro_batches for stage in stages]
        return [number + micro_batch for one in rounds for number in each for micro_batch in one]

    forward, back = (0, passes("F", own)), own[::-1]
    if not splits:
        return _in_turns(forward, (warm_up, passes("B", back)))
    return _in_turns(forward, (warm_up, passes("I", back)), (warm_up + rank, passes("W", back)))


def _pass(stage: int, kind: Pass) -> int:
    return stage * len(KINDS) + KINDS.index(kind)


def _in_turns(*passes: tuple[int, Sequence[int]]) -> list[int]:
    """Lists of passes that run one pass each in every step, in their order, from the step on at which each begins."""
    order: list[int] = []
    ends = sorted({end for begin, own in passes for end in (begin, begin + len(own))})
    for start, stop in pairwise(ends):
        running = [own[start - begin : stop - begin] for begin, own in passes if begin <= start < begin + len(own)]
        order.extend(chain.from_iterable(zip(*running, strict=True)))
    return order


def _zbv(rank: int, pp: int, micro_batches: int) -> list[int]:
    """torch plans for at least ``2·pp - 1`` micro-batches and leaves out those that are not there."""
    first, second = rank, 2 * pp - 1 - rank
    planned = max(2 * pp - 1, micro_batches)
    (f, i, w), (f2, i2, w2) = ([_pass(stage, kind) for kind in ("F", "I", "W")] for stage in (first, second))
    order = [f] * (2 * (pp - rank) - 1) + [f2, f] * rank + [f2, i2, w2] * (pp - rank)
    late = planned - (2 * pp - 1 - rank)  # forward passes of the first stage that are left
    order += [f, i, w, f2, i2, w2] * late + [i, w, f2, i2, w2] * (planned - pp - late)
    order += [i, i2] * rank + [i, w] * (pp - rank)
    order += [w2] * (planned - order.count(w2)) + [w] * (planned - order.count(w))
    done, numbers = dict.fromkeys(order, 0), list[int]()
    for each in order:
        if done[each] < micro_batches:
            numbers.append(each * micro_batches + done[each])
        done[each] += 1
    return numbers


def _dualpipev(rank: int, pp: int, micro_batches: int) -> list[int]:
    """The eight steps of DeepSeek's own DualPipeV; a forward and a backward pass that overlap there stand in a row."""
    first, second = rank, 2 * pp - 1 - rank
    order: list[int] = []
    done = dict.fromkeys(((stage, is_forward) for stage in (first, second) for is_forward in (True, False)), 0)
    weights: deque[int] = deque()

    def run(stage: int, kind: Pass) -> None:
        micro_batch = done[stage, kind == "F"]
        order.append(_pass(stage, kind) * micro_batches + micro_batch)
        done[stage, kind == "F"] = micro_batch + 1
        if kind == "I":
            weights.append(_pass(stage, "W") * micro_batches + micro_batch)

    def run_weights() -> None:
        if weights:
            order.append(weights.popleft())

    def run_all(*passes: tuple[int, Pass], times: int) -> None:
        for _ in range(times):
            for stage, kind in passes:
                run(stage, kind)

    run_all((first, "F"), times=2 * (pp - rank - 1))
    run_all((first, "F"), (second, "F"), times=rank + 1)
    for _ in range(pp - rank - 1):
        run(second, "I")
        run_weights()
        run(second, "F")
    run_all((first, "F"), (second, "B"), (second, "F"), (first, "B"), times=micro_batches - 2 * pp + rank + 1)
    run_all((second, "B"), (second, "F"), (first, "B"), times=pp - rank - 1)
    whole = (rank + 1) // 2  # of the last passes, those whose backward is not split: one more of the second stage
    for step in range(rank + 1):
        run(second, "B" if step < whole + (rank + 1) % 2 else "I")
        run(first, "B" if step < whole else "I")
    for _ in range(pp - rank - 1):
        run_weights()
        run(first, "I")
    while weights:
        run_weights()
    return order


def live_micro_batches(order: Sequence[Action]) -> int:
    """The most (stage, micro-batch) pairs of one rank whose activations are held at once: from F to B or W."""
    live = most = 0
    for action in order:
        live += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        most = max(most, live)
    return most
