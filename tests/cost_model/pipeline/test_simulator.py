"""Replayed pipelines: equal to closed forms that are exact, bounded by the others; a deadlock is refused."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from equal_stages import equal_stages
from numpy.typing import NDArray
from pipeline_step import step_s
from work import lines_run

from autopar.cost_model.pipeline.closed_forms import bubble_s, unequal_step_s
from autopar.cost_model.pipeline.simulator import (
    Simulation,
    StageSeconds,
    most_held,
    replay_of,
    replayed,
)
from autopar.ir.schedules.action import pass_number
from autopar.ir.schedules.registry import SCHEDULES, rank_of_stage, schedule_problems

ONE_STAGE = [(s, p, 1, n) for s in ("gpipe", "1f1b") for p in range(2, 17) for n in (1, 2, p - 1, p, p + 1, 3 * p)]
SEVERAL = [
    (schedule, p, v, n)
    for schedule, kind in SCHEDULES.items()
    if kind.most_stages != 1
    for p in (2, 3, 4, 6, 8, 16)
    for v in ((2,) if kind.most_stages else (1, 2, 4))
    for n in (1, 2, p - 1, p, 2 * p - 1, 2 * p, 2 * p + 1, 4 * p)
    if p * v * n <= 512 and v >= kind.least_stages and not schedule_problems(schedule, p, v, n)
]
CASES = sorted({*ONE_STAGE, *SEVERAL})


@pytest.mark.parametrize("p, n", [(2, 4), (3, 6), (4, 8), (8, 16)])
def test_critical_paths_of_any_seconds(p: int, n: int) -> None:
    """The sums of the closed forms are all critical paths that there are, whatever F, I and W."""
    some = random.Random(p)
    for schedule in ("interleaved-zero-bubble", "zbv-zero-bubble", "dualpipev"):
        replay = replay_of(schedule, p, 2, n)
        for _ in range(20):
            forward, inputs, weights = (some.expovariate(1) ** some.choice((0.3, 1, 2)) for _ in range(3))
            found = replayed(
                replay, equal_stages(2 * p, forward_s=forward, backward_s=inputs + weights, weight_s=weights)
            )
            whole = {"forward_s": 2 * forward, "backward_s": 2 * (inputs + weights), "weight_s": 2 * weights}
            assert found.step_s == pytest.approx(
                step_s(schedule, pp=p, virtual_stages=2, micro_batches=n, **whole), rel=1e-12
            )


@pytest.mark.parametrize("p, n", [(2, 3), (4, 7), (4, 16), (8, 16)])
def test_zbv_has_no_gap_when_balanced(p: int, n: int) -> None:
    """Qi et al. 2024, section 6: no rank is idle between its first and its last pass where F = I = W."""
    found = replayed(replay_of("zbv-zero-bubble", p, 2, n), equal_stages(2 * p, forward_s=1, backward_s=2, weight_s=1))
    assert gaps_s(found) == pytest.approx(np.zeros(p))
    assert found.step_s - found.busy_s - found.sending_s == pytest.approx(np.full(p, p - 1.0))
    unequal = replayed(
        replay_of("zbv-zero-bubble", p, 2, n), equal_stages(2 * p, forward_s=1, backward_s=3, weight_s=1)
    )
    assert gaps_s(unequal).max() > 0


def gaps_s(found: Simulation) -> NDArray[np.float64]:
    """The idle seconds of every rank between its first and its last pass."""
    spans = [end[-1] - start[0] for start, end in zip(found.starts_s, found.ends_s, strict=True)]
    return np.array(spans) - found.busy_s - found.sending_s


@pytest.mark.parametrize("schedule, p, v, n", [case for case in CASES if case[1] in (2, 3, 4, 8)])
def test_messages(schedule: str, p: int, v: int, n: int) -> None:
    """Messages much shorter than a pass: as many are waited for as the closed form says."""
    replay, message = replay_of(schedule, p, v, n), 1e-3
    without = replayed(replay, equal_stages(p * v, forward_s=1.0, backward_s=2.0, weight_s=1.0)).step_s
    seconds = equal_stages(p * v, forward_s=1.0, backward_s=2.0, weight_s=1.0, message_s=message)
    waited = (replayed(replay, seconds).step_s - without) / message
    if schedule in ("gpipe", "1f1b") or (schedule == "interleaved-1f1b" and n % p == 0):
        assert waited == pytest.approx(messages_waited_for(schedule, p, v, n), abs=1e-6)
    assert waited <= 2 * n * v * p
    blocking = replayed(replay, seconds, messages="blocking")
    assert blocking.step_s >= without + waited * message - 1e-9
    most = 2 * v * n * message
    assert blocking.sending_s.max() <= most + 1e-9
    if p > 2 and SCHEDULES[schedule].placement == "loop":
        assert blocking.sending_s[1] == pytest.approx(most)
    every = list(blocking.messages())
    crossing = sum(rank_of_stage(schedule, p, s) != rank_of_stage(schedule, p, s + 1) for s in range(p * v - 1))
    assert len(every) == 2 * n * crossing
    assert all(m.end_s - m.start_s == pytest.approx(message) and m.from_rank != m.to_rank for m in every)


def messages_waited_for(schedule: str, p: int, v: int, n: int) -> int:
    """gpipe waits while the pipeline fills and empties. Interleaved stages hide all but one micro-batch's way.

    Under 1f1b rank 0 has p micro-batches in flight, whose way to the last rank and back holds 2(p-1) messages, so that
    one waits again every p micro-batches.
    """
    if schedule == "1f1b":
        turns, rest = divmod(n - 1, p)
        return 2 * (p - 1) * (turns + 1) + max(0, 2 * (rest - 1))
    return 2 * (p * v - 1)


def unequal_stages(forward: list[float], backward: list[float], messages: float = 0.0) -> StageSeconds:
    inputs = [0.6 * b for b in backward]
    return StageSeconds(
        forward_s=forward,
        backward_s=backward,
        input_s=inputs,
        weight_s=[b - i for b, i in zip(backward, inputs, strict=True)],
        forward_message_s=[messages] * (len(forward) - 1),
        backward_message_s=[messages] * (len(forward) - 1),
    )


@pytest.mark.parametrize("p, n", [(2, 1), (2, 5), (3, 8), (4, 2), (4, 12), (8, 24)])
def test_unequal_stages(p: int, n: int) -> None:
    """gpipe is exact; 1f1b is never above its closed form, and on it if the last stage is the slowest."""
    some = random.Random(17 * p + n)
    for _ in range(10):
        forward, backward = ([some.uniform(0.5, 2.0) for _ in range(p)] for _ in range(2))
        seconds = unequal_stages(forward, backward)
        given = {"micro_batches": n, "forward_s": np.array(forward), "backward_s": np.array(backward)}
        assert replayed(replay_of("gpipe", p, 1, n), seconds).step_s == pytest.approx(unequal_step_s("gpipe", **given))
        found = replayed(replay_of("1f1b", p, 1, n), seconds).step_s
        assert found <= unequal_step_s("1f1b", **given) * (1 + 1e-12)
        forward[-1] = backward[-1] = 2.5
        given |= {"forward_s": np.array(forward), "backward_s": np.array(backward)}
        last = replayed(replay_of("1f1b", p, 1, n), unequal_stages(forward, backward)).step_s
        assert last == pytest.approx(unequal_step_s("1f1b", **given))


@pytest.mark.parametrize("schedule, p, v, n", [case for case in CASES if case[1] == 4])
def test_longer_passes_or_messages_never_end_sooner(schedule: str, p: int, v: int, n: int) -> None:
    some, replay = random.Random(n), replay_of(schedule, p, v, n)
    forward, backward = ([some.uniform(0.5, 2.0) for _ in range(p * v)] for _ in range(2))
    base = replayed(replay, unequal_stages(forward, backward, 0.01))
    longest = max(sum(forward) + sum(backward), base.busy_s.max())
    assert base.step_s >= longest - 1e-9 or SCHEDULES[schedule].splits_backward
    for stage in range(p * v):
        slower = [*forward[:stage], forward[stage] + 0.1, *forward[stage + 1 :]]
        assert replayed(replay, unequal_stages(slower, backward, 0.01)).step_s >= base.step_s
    assert replayed(replay, unequal_stages(forward, backward, 0.3)).step_s >= base.step_s


@pytest.mark.parametrize("schedule, p, v, n", [case for case in CASES if case[1] == 4])
def test_the_time_line_is_one_that_can_be(schedule: str, p: int, v: int, n: int) -> None:
    """Passes of a rank do not overlap, and begin after what they need, messages included."""
    found = replayed(
        replay_of(schedule, p, v, n),
        equal_stages(p * v, forward_s=1.0, backward_s=1.9, weight_s=0.8, message_s=0.05),
    )
    ends: dict[tuple[int, str, int], float] = {}
    intervals = list(found.timeline())
    for one in intervals:
        kind = {"F": "F", "W": "W"}.get(one.action.kind, "I")
        ends[one.action.stage, kind, one.action.micro_batch] = one.end_s
    assert len(intervals) == sum(map(len, found.replay.orders))
    free = [0.0] * p
    for one in intervals:
        a = one.action
        assert one.start_s >= free[one.rank]
        free[one.rank] = one.end_s
        needed = []
        if a.kind == "F" and a.stage > 0:
            needed = [(a.stage - 1, "F", a.micro_batch)]
        elif a.kind == "W":
            needed = [(a.stage, "I", a.micro_batch)]
        elif a.kind in "BI":
            needed = [(a.stage, "F", a.micro_batch)]
            needed += [(a.stage + 1, "I", a.micro_batch)] if a.stage < p * v - 1 else []
        for stage, kind, micro_batch in needed:
            message = 0.05 * (rank_of_stage(schedule, p, stage) != one.rank)
            assert one.start_s >= ends[stage, kind, micro_batch] + message - 1e-9
    assert max(one.end_s for one in intervals) == found.step_s


def test_one_sender_sends_one_message_after_another() -> None:
    """Where messages last longer than passes the link is the bottleneck: n forward messages, one backward pass."""
    n = 6
    found = replayed(replay_of("gpipe", 2, 1, n), equal_stages(2, forward_s=1.0, backward_s=1.0, message_s=5.0))
    starts = [m.start_s for m in found.messages() if m.from_rank == 0]
    assert starts == [1.0 + 5.0 * i for i in range(n)]
    assert found.step_s == 1.0 + 5.0 * n + 1.0 + 1.0 + 5.0 * n + 1.0


@pytest.mark.parametrize("v", [1, 2, 3])
def test_messages_over_a_boundary_of_ranks(v: int) -> None:
    """One message per boundary, micro-batch and direction, v times interleaved."""
    p, n = 4, 8
    found = replayed(
        replay_of("interleaved-1f1b" if v > 1 else "1f1b", p, v, n), equal_stages(p * v, forward_s=1.0, backward_s=2.0)
    )
    crossing = [(m.from_rank, m.to_rank) for m in found.messages()]
    for rank in range(p - 1):
        assert crossing.count((rank, rank + 1)) == crossing.count((rank + 1, rank)) == v * n
    around = (v - 1) * n
    assert crossing.count((p - 1, 0)) == crossing.count((0, p - 1)) == around


def test_bytes_held() -> None:
    """1f1b holds min(n, p - i) micro-batches of stage i."""
    held = np.array([8.0, 4.0, 2.0, 1.0])
    assert [(rows @ held).max() for rows in most_held("1f1b", 4, 1, 8)] == [32.0, 12.0, 4.0, 1.0]


def test_a_deadlock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 wants micro-batch 0's gradient before it runs micro-batch 1, rank 1 the reverse."""
    each = [
        [action(0, *text) for text in ("F0", "B0", "F1", "B1")],
        [action(1, *text) for text in ("F0", "F1", "B0", "B1")],
    ]
    stuck = replace(SCHEDULES["1f1b"], name="stuck", rank_order=lambda rank, p, v, n: each[rank])
    monkeypatch.setitem(SCHEDULES, "stuck", stuck)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="ranks of stuck wait for each other"):
        replay_of("stuck", 2, 1, 2)


def action(stage: int, kind: Any, micro_batch: str) -> int:
    return pass_number(stage, kind) * 2 + int(micro_batch)


def test_the_bubble_is_what_no_rank_of_1f1b_works() -> None:
    found = replayed(replay_of("1f1b", 4, 1, 8), equal_stages(4, forward_s=1.0, backward_s=2.0))
    idle = found.step_s - found.busy_s
    assert idle == pytest.approx(np.full(4, bubble_s("1f1b", pp=4, micro_batches=8, forward_s=1, backward_s=2)))


def test_work_of_a_replay_grows_with_its_actions_alone() -> None:
    """16 times the actions, on four times the ranks: each is visited once, with as much to do."""
    found, work = [], []
    for pp, micro_batches in ((16, 128), (64, 512)):
        replay_of.cache_clear()
        seconds = equal_stages(pp, forward_s=1.0, backward_s=2.0, message_s=1e-3)
        lines = lines_run(lambda: found.append(replayed(replay_of("1f1b", pp, 1, micro_batches), seconds)))  # noqa: B023
        work.append(lines / sum(map(len, found[-1].replay.orders)))
    assert work[1] < 1.1 * work[0] and work[0] < 100
    assert found[1].step_s > (512 + 63) * 3.0
