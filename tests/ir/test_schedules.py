"""Schedules as data: every pass once, in an order that can run, with the activations that the formulas say."""

import pytest

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
