"""Pipeline schedules as data: which stage runs which pass of which micro-batch, in order, on every pipeline rank.

The order is that of torch.distributed.pipelining's own schedule of the name; what is listed here is what runs, and
what a simulator replays. An action prints as torch prints it: ``0F1`` is stage 0, forward, micro-batch 1; ``B`` is the
whole backward pass, ``I`` the part for a stage's inputs, ``W`` the part for its weights.

| schedule               | stages of a rank | source                                                           |
|------------------------|------------------|------------------------------------------------------------------|
| gpipe                  | 1                | Huang et al. 2019, "GPipe", section 2.3                          |
| 1f1b                   | 1                | Narayanan et al. 2021, "PipeDream-2BW", section 2 (flush)        |
| interleaved-1f1b       | 2 or more        | Narayanan et al. 2021, "Megatron-LM", section 2.2.2              |
| interleaved-zero-bubble| 1 or more        | Qi et al. 2024, "Zero Bubble Pipeline Parallelism", ZB1P         |
| zbv-zero-bubble        | 2                | Qi et al. 2024, section 6                                        |
| dualpipev              | 2                | DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.1                   |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

from autopar.errors import Problem

Pass = Literal["F", "B", "I", "W"]


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


@dataclass(frozen=True, slots=True)
class Action:
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


@lru_cache(maxsize=64)
def actions(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Per pipeline rank, its actions in the order in which they run. Needs no process group."""
    if schedule == "gpipe":
        return tuple(_one_stage(rank, micro_batches, micro_batches) for rank in range(pp))
    if schedule == "1f1b":
        return tuple(_one_stage(rank, pp - rank, micro_batches) for rank in range(pp))
    found = []
    for _, order in sorted(_torch_order(schedule, pp, virtual_stages, micro_batches).items()):
        parts = [part for action in order if action is not None for part in (action.sub_actions or (action,))]
        found.append(tuple(Action(p.stage_index, p.computation_type.value, p.microbatch_index) for p in parts))
    return tuple(found)


def _one_stage(stage: int, ahead: int, micro_batches: int) -> tuple[Action, ...]:
    """The order of a rank with one stage that runs at most `ahead` forward passes before the backward of the first.

    torch's class runs so too, but the order that it publishes counts micro-batches from 1 on the last rank.
    """
    order: list[Action] = []
    for micro_batch in range(micro_batches + ahead):
        if micro_batch < micro_batches:
            order.append(Action(stage, "F", micro_batch))
        if ahead <= micro_batch + 1 <= micro_batches + ahead - 1:
            order.append(Action(stage, "B", micro_batch + 1 - ahead))
    return tuple(order)


def _torch_order(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> dict[int, list[Any]]:
    """torch's own action lists by rank, None where a rank waits."""
    import torch
    from torch.distributed.pipelining.schedules import get_schedule_class

    num_stages = pp * virtual_stages
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=num_stages,
            is_first=stage == 0,
            is_last=stage == num_stages - 1,
            group_rank=0,
            group_size=pp,
            has_backward=True,
            device=torch.device("cpu"),
            submod=torch.nn.Module(),
            stage_index_to_group_rank={},
        )
        for stage in range(num_stages)
        if rank_of_stage(schedule, pp, stage) == 0
    ]
    found: Any = get_schedule_class(SCHEDULES[schedule].torch_name)
    # messages are inserted when the runtime takes the order; here that would be nearly all of the time
    bare = type(found.__name__, (found,), {"_prepare_schedule_with_comms": lambda self, *given, **options: None})
    made: Any = bare(stages, micro_batches, scale_grads=False)
    order: dict[int, list[Any]] = made.pipeline_order
    return order


def live_micro_batches(order: Sequence[Action]) -> int:
    """The most (stage, micro-batch) pairs of one rank whose activations are held at once: from F to B or W."""
    live = most = 0
    for action in order:
        live += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        most = max(most, live)
    return most
