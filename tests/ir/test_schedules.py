"""Schedules as data: every pass once, in an order that can run, with the activations that the formulas say."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from autopar.ir.schedules import SCHEDULES, Action, actions, live_micro_batches, rank_of_stage, schedule_problems

CASES = [
    ("gpipe", 2, 1, 4),
    ("gpipe", 4, 1, 3),
    ("1f1b", 2, 1, 1),
    ("1f1b", 4, 1, 2),
    ("1f1b", 4, 1, 9),
    ("interleaved-1f1b", 2, 2, 4),
    ("interleaved-1f1b", 4, 3, 8),
    ("interleaved-zero-bubble", 2, 1, 4),
    ("interleaved-zero-bubble", 4, 2, 8),
    ("zbv-zero-bubble", 2, 2, 3),
    ("zbv-zero-bubble", 4, 2, 8),
    ("dualpipev", 2, 2, 4),
    ("dualpipev", 4, 2, 10),
]


@pytest.mark.parametrize("schedule, pp, virtual_stages, count", CASES)
def test_every_pass_once_in_an_order_that_can_run(schedule: str, pp: int, virtual_stages: int, count: int) -> None:
    """Ranks take turns; a pass waits for what it needs, and none waits forever."""
    stages = pp * virtual_stages
    orders = [list(order) for order in actions(schedule, pp, virtual_stages, count)]
    for rank, order in enumerate(orders):
        assert all(rank_of_stage(schedule, pp, action.stage) == rank for action in order)
    done: set[Action] = set()
    while any(orders):
        ready = [order for order in orders if order and can_run(order[0], stages, done)]
        assert ready, [str(order[0]) for order in orders if order]
        for order in ready:
            assert order[0] not in done
            done.add(order.pop(0))
    backward = {(a.stage, a.micro_batch) for a in done if a.kind == "B"}
    split = {(a.stage, a.micro_batch) for a in done if a.kind == "I"}
    every = {(stage, micro_batch) for stage in range(stages) for micro_batch in range(count)}
    assert {(a.stage, a.micro_batch) for a in done if a.kind == "F"} == every
    assert {(a.stage, a.micro_batch) for a in done if a.kind == "W"} == split
    assert backward | split == every and not backward & split
    assert bool(split) == SCHEDULES[schedule].splits_backward


def can_run(action: Action, stages: int, done: set[Action]) -> bool:
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "W":
        return Action(stage, "I", micro_batch) in done
    if action.kind == "F":
        return stage == 0 or Action(stage - 1, "F", micro_batch) in done
    later = any(Action(stage + 1, kind, micro_batch) in done for kind in ("B", "I"))
    return Action(stage, "F", micro_batch) in done and (stage == stages - 1 or later)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("gpipe", "1f1b")])
def test_orders_are_those_of_torch(schedule: str) -> None:
    kind, compared = SCHEDULES[schedule], 0
    for pp in (1, 2, 3, 4, 5, 8, 16):
        for virtual_stages in range(kind.least_stages, (kind.most_stages or 4) + 1):
            for count in (*range(1, 20), 32, 33, 48):
                if not schedule_problems(schedule, pp, virtual_stages, count):
                    found = actions(schedule, pp, virtual_stages, count)
                    printed = [[str(action) for action in order] for order in found]
                    assert printed == torch_orders(schedule, pp, virtual_stages, count), (pp, virtual_stages, count)
                    compared += 1
    assert compared >= 80


def torch_orders(schedule: str, pp: int, virtual_stages: int, count: int) -> list[list[str]]:
    """Of every rank, the actions of torch's own schedule as they print, without those in which it waits."""
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
    made: Any = bare(stages, count, scale_grads=False)
    return [
        [str(part) for action in order if action is not None for part in (action.sub_actions or (action,))]
        for _, order in sorted(made.pipeline_order.items())
    ]


@pytest.mark.parametrize("pp, count", ((2, 1), (2, 4), (4, 2), (4, 3), (4, 9), (8, 16)))
def test_live_micro_batches(pp: int, count: int) -> None:
    """min(n, p - i) under 1F1B, n under GPipe (Narayanan et al. 2021, section 2.2)."""
    assert [live_micro_batches(order) for order in actions("1f1b", pp, 1, count)] == [
        min(count, pp - rank) for rank in range(pp)
    ]
    assert [live_micro_batches(order) for order in actions("gpipe", pp, 1, count)] == [count] * pp


@pytest.mark.parametrize("pp, virtual_stages, count", ((2, 2, 4), (4, 2, 8), (4, 3, 12)))
def test_live_micro_batches_of_interleaved_stages(pp: int, virtual_stages: int, count: int) -> None:
    """Warm-up passes and one: (v - 1)·p + 2·(p - 1 - i) + 1 chunks (Megatron-LM, section 2.2.2)."""
    found = [live_micro_batches(order) for order in actions("interleaved-1f1b", pp, virtual_stages, count)]
    wanted = [(virtual_stages - 1) * pp + 2 * (pp - 1 - rank) + 1 for rank in range(pp)]
    assert found == [min(w, virtual_stages * count) for w in wanted]


def test_what_a_schedule_does_not_take() -> None:
    (problem,) = schedule_problems("interleaved-1f1b", 4, 2, 9)
    assert (problem.path, problem.suggestion) == ("micro_batches", "nearest: 8 or 10")
    (problem,) = schedule_problems("zbv-zero-bubble", 4, 1, 8)
    assert (problem.path, problem.suggestion) == ("virtual_stages", "use 2")
    (problem,) = schedule_problems("dualpipev", 4, 2, 7)
    assert (problem.path, problem.suggestion) == ("micro_batches", "use 8")
    assert not schedule_problems("1f1b", 4, 1, 1) and schedule_problems("1f1b", 4, 2, 4)
