"""Every registered schedule: its order can run, torch runs it, and its closed forms agree with the replayed order."""

import ast
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from equal_stages import equal_stages
from torch.distributed.pipelining.schedules import get_schedule_class

from autopar._torch import private
from autopar.cost_model.pipeline.closed_forms import bubble_s, pass_seconds, unequal_step_s
from autopar.cost_model.pipeline.simulator import StageSeconds, replay_of, replayed
from autopar.cost_model.step.context import Passes
from autopar.ir.degrees import Degrees, degrees_from
from autopar.ir.schedules.action import Action, action_of, peak_in_flight
from autopar.ir.schedules.registry import (
    SCHEDULE_NAMES,
    SCHEDULES,
    actions,
    by_name,
    numbered_actions,
    rank_of_stage,
    schedule_problems,
)
from autopar.planning.options import PlanOptions
from autopar.search.bounds.pipeline import PipelineRun, lower_bound

ROOT = Path(__file__).parent.parent.parent
# seconds of F, I and W of a stage: balanced, as trained, and with each of them the longest
SECONDS = [(1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (1.0, 0.6, 1.4), (1.7, 1.0, 0.8), (0.4, 1.0, 1.0), (1.0, 2.0, 0.0)]

every_schedule = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)


def sizes(schedule: str) -> list[tuple[int, int, int]]:
    """Ranks, stages of each and micro-batches, below, at and above the numbers at which orders change."""
    known, found = SCHEDULES[schedule], []
    for p in (2, 3, 4, 6, 8):
        for v in range(known.least_stages, (known.most_stages or 4) + 1):
            for n in sorted({1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p, 4 * p}):
                if p * v * n <= 512 and not schedule_problems(schedule, p, v, n):
                    found.append((p, v, n))
    assert len(found) >= 15
    return found


@every_schedule
def test_it_says_what_it_is(schedule: str) -> None:
    known = SCHEDULES[schedule]
    assert known.name == schedule and known.source and known.published[0] >= 2018
    assert 1 <= known.least_stages <= (known.most_stages or known.least_stages)
    assert known.placement == "loop" or known.least_stages == known.most_stages == 2


@every_schedule
def test_it_prints_and_parses(schedule: str) -> None:
    asked: Any = {"pp": 2, "schedule": schedule}
    assert degrees_from(asked).schedule == PlanOptions(**asked).schedule == schedule
    p, v, n = sizes(schedule)[-1]
    printed = [[str(action) for action in order] for order in actions(schedule, p, v, n)]
    assert printed == [[str(private.pipeline_action(text)) for text in order] for order in printed]
    numbers = numbered_actions(schedule, p, v, n)
    assert printed == [[str(action_of(number, n)) for number in order] for order in numbers]


# ---- the order ----


@every_schedule
def test_every_pass_once_in_an_order_that_can_run(schedule: str) -> None:
    """Ranks take turns; a pass waits for what it needs, and none waits forever."""
    for p, v, n in sizes(schedule):
        orders = [list(order) for order in actions(schedule, p, v, n)]
        for rank, order in enumerate(orders):
            assert all(rank_of_stage(schedule, p, action.stage) == rank for action in order)
        done: set[Action] = set()
        while any(orders):
            ready = [order for order in orders if order and can_run(order[0], p * v, done)]
            assert ready, (p, v, n, [str(order[0]) for order in orders if order])
            for order in ready:
                assert order[0] not in done
                done.add(order.pop(0))
        passes = {kind: {(a.stage, a.micro_batch) for a in done if a.kind == kind} for kind in "FBIW"}
        every = {(stage, micro_batch) for stage in range(p * v) for micro_batch in range(n)}
        assert passes["F"] == passes["B"] | passes["I"] == every
        assert passes["W"] == passes["I"] and not passes["B"] & passes["I"]
        assert bool(passes["I"]) == SCHEDULES[schedule].splits_backward


def can_run(action: Action, stages: int, done: set[Action]) -> bool:
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "W":
        return Action(stage, "I", micro_batch) in done
    if action.kind == "F":
        return stage == 0 or Action(stage - 1, "F", micro_batch) in done
    later = any(Action(stage + 1, kind, micro_batch) in done for kind in ("B", "I"))
    return Action(stage, "F", micro_batch) in done and (stage == stages - 1 or later)


@every_schedule
def test_the_order_is_that_of_torch(schedule: str) -> None:
    """With one stage on a rank torch counts micro-batches from 1 on some ranks: there only passes are compared.

    Such classes refuse fewer micro-batches than ranks, which torch's runtime of action lists takes.
    """
    known, compared = SCHEDULES[schedule], 0
    if known.torch_name is None:
        pytest.skip("torch has no class for it")
    for pp in (1, 2, 3, 4, 5, 8, 16):
        for v in range(known.least_stages, (known.most_stages or 4) + 1):
            for count in (*range(1, 20), 32, 33, 48):
                is_refused = known.most_stages == 1 and count < pp
                if not is_refused and not schedule_problems(schedule, pp, v, count):
                    ours = [[str(action) for action in order] for order in actions(schedule, pp, v, count)]
                    theirs = torch_orders(known.torch_name, schedule, pp, v, count)
                    if known.most_stages == 1:
                        ours, theirs = (
                            [[text.rstrip("0123456789") for text in order] for order in orders]
                            for orders in (ours, theirs)
                        )
                    assert ours == theirs, (pp, v, count)
                    compared += 1
    assert compared >= 80


def torch_orders(torch_name: str, schedule: str, pp: int, v: int, count: int) -> list[list[str]]:
    """Of every rank, the actions of torch's own schedule as they print, without the ones in which it waits."""
    found: Any = get_schedule_class(torch_name)
    # messages are inserted when the runtime takes the order; here that would be nearly all of the time
    bare = type(found.__name__, (found,), {"_prepare_schedule_with_comms": lambda self, *given, **options: None})
    stages = stages_of_rank(schedule, pp, v, 0)
    made: Any = bare(stages if SCHEDULES[schedule].most_stages != 1 else stages[0], count, scale_grads=False)
    return [
        [
            str(part)
            for action in order
            if action is not None
            for part in (action.sub_actions or (action,))
            if part.computation_type.value in "FBIW"
        ]
        for _, order in sorted(made.pipeline_order.items())
    ]


def stages_of_rank(schedule: str, pp: int, v: int, rank: int) -> list[Any]:
    """What torch asks of the stages of a rank before it runs them."""
    ranks = {stage: rank_of_stage(schedule, pp, stage) for stage in range(pp * v)}
    return [
        SimpleNamespace(
            stage_index=stage,
            num_stages=pp * v,
            is_first=stage == 0,
            is_last=stage == pp * v - 1,
            group_rank=rank,
            group_size=pp,
            has_backward=True,
            device=torch.device("cpu"),
            submod=torch.nn.Module(),
            stage_index_to_group_rank=ranks,
        )
        for stage, owner in ranks.items()
        if owner == rank
    ]


@every_schedule
def test_the_runtime_of_torch_takes_the_order(schedule: str) -> None:
    """torch adds messages to the list of every rank, and no rank waits for one that is not sent."""
    for p, v, n in [one for one in sizes(schedule) if one[0] in (2, 4)][::4]:
        order = {
            rank: [private.pipeline_action(str(action)) for action in own]
            for rank, own in enumerate(actions(schedule, p, v, n))
        }
        messages = []
        for rank in range(p):
            runtime: Any = private.pipeline_runtime(stages_of_rank(schedule, p, v, rank), n, lambda out, target: out)
            runtime._prepare_schedule_with_comms(order)
            lowered = runtime.pipeline_order_with_comms[rank]
            kinds = [action.computation_type.value for action in lowered]
            assert [kind for kind in kinds if kind in "FBIW"] == [a.computation_type.value for a in order[rank]]
            messages += kinds
        crossing = sum(rank_of_stage(schedule, p, s) != rank_of_stage(schedule, p, s + 1) for s in range(p * v - 1))
        for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
            assert messages.count(kind) == crossing * n


# ---- the closed forms ----


@every_schedule
def test_idle_time_is_what_the_replay_shows(schedule: str) -> None:
    """Exactly if the schedule says so, else a lower bound."""
    known, exact = SCHEDULES[schedule], 0
    for p, v, n in sizes(schedule):
        replay = replay_of(schedule, p, v, n)
        for forward, inputs, weights in SECONDS:
            whole = {"forward_s": v * forward, "backward_s": v * (inputs + weights), "weight_s": v * weights}
            idle = bubble_s(schedule, pp=p, virtual_stages=v, micro_batches=n, **whole)
            stages = equal_stages(p * v, forward_s=forward, backward_s=inputs + weights, weight_s=weights)
            found, busy = replayed(replay, stages), n * v * (forward + inputs + weights)
            assert found.busy_s == pytest.approx(np.full(p, busy))
            if known.is_exact(p, v, n, forward == inputs == weights):
                assert found.step_s == pytest.approx(busy + idle, rel=1e-12), (p, v, n, forward, inputs, weights)
                exact += 1
            else:
                assert busy <= (busy + idle) * (1 - 1e-12) <= found.step_s <= p * busy
    assert exact >= len(SECONDS) * len(sizes(schedule)) / 3


@every_schedule
def test_micro_batches_in_flight_are_those_of_the_order(schedule: str) -> None:
    known = SCHEDULES[schedule]
    for p, v, n in sizes(schedule):
        run: Any = {"pp": p, "virtual_stages": v, "micro_batches": n, "rank": np.arange(p)}
        orders = actions(schedule, p, v, n)
        counted = [peak_in_flight(order) for order in orders]
        assert known.most_in_flight(**run).tolist() == counted, (p, v, n)
        first = [next(i for i, a in enumerate(order) if a.kind != "F") for order in orders]
        assert known.warm_up_passes(**run).tolist() == first, (p, v, n)


@every_schedule
def test_formulas_of_many_candidates_are_those_of_each(schedule: str) -> None:
    known = SCHEDULES[schedule]
    some = np.array(sizes(schedule))
    run: Any = {"pp": some[:, 0], "virtual_stages": some[:, 1], "micro_batches": some[:, 2]}
    seconds = {"forward_s": 1.0, "backward_s": 2.1, "weight_s": 0.9}
    idle = bubble_s(schedule, **run, **seconds)
    assert np.shape(idle) == (len(some),) and np.all(np.asarray(idle) >= 0)
    for i, (p, v, n) in enumerate(sizes(schedule)):
        one = {"pp": p, "virtual_stages": v, "micro_batches": n}
        assert np.asarray(idle)[i] == bubble_s(schedule, **one, **seconds)
        for formula in (known.most_in_flight, known.warm_up_passes):
            assert formula(**run)[i] == formula(**one)
    assert bubble_s(schedule, **{**run, "pp": 1}, **seconds).tolist() == [0.0] * len(some)  # type: ignore[union-attr]


@every_schedule
def test_its_own_bound_is_never_above_the_replay(schedule: str) -> None:
    known, some = SCHEDULES[schedule], random.Random(7)
    if known.step_bound is None:
        return
    for p, v, n in sizes(schedule):
        assert v == 1
        forward, backward = (np.array([some.uniform(0.5, 2.0) for _ in range(p)]) for _ in range(2))
        for message in (0.0, 0.1):
            whole = replayed(replay_of(schedule, p, v, n), unequal(forward, backward, message)).step_s
            bound = known.step_bound(replace(pass_seconds(n, forward, backward), messages=2 * (p - 1) * message))
            assert bound <= whole * (1 + 1e-12), (p, n, message)
            if known.step_bound_is_exact and message == 0:
                assert bound == pytest.approx(whole, rel=1e-12)
                assert bound == unequal_step_s(schedule, micro_batches=n, forward_s=forward, backward_s=backward)


def unequal(forward: Any, backward: Any, message: float) -> StageSeconds:
    stages = equal_stages(len(forward), forward_s=0.0, backward_s=0.0, message_s=message)
    weights = 0.4 * backward
    return replace(stages, forward_s=forward, backward_s=backward, input_s=backward - weights, weight_s=weights)  # type: ignore[arg-type]


@every_schedule
@pytest.mark.parametrize("waits", (0.0, 1.0), ids=("overlapped", "blocking"))
def test_the_bound_of_searches_is_never_above_the_replay(schedule: str, waits: float) -> None:
    """With the cuts that the bound assumes: equal blocks between a first and a last call of other seconds."""
    block, first, last = (1.0, 1.3, 0.7), (0.3, 0.2, 0.2), (1.6, 1.1, 0.9)
    for p, v, n in sizes(schedule):
        for blocks in (p * v, 2 * p * v + 1):
            for message in (0.0, 0.05):
                run = PipelineRun(
                    schedule=np.array([SCHEDULE_NAMES.index(schedule)]),
                    pp=np.array([float(p)]),
                    virtual=np.array([float(v)]),
                    micro_batches=np.array([float(n)]),
                    counts=(("layer", blocks),),
                )
                cuts: list[Any] = []
                bound = lower_bound(run, waits=waits, used=cuts)(
                    {"layer": passes(block), "first": passes(first), "last": passes(last)}, np.array([message])
                )
                counts = counts_of(cuts[0], p * v, blocks)
                ends = [first, *[(0.0, 0.0, 0.0)] * (p * v - 2), last]
                f, i, w = ([c * block[k] + end[k] for c, end in zip(counts, ends, strict=True)] for k in range(3))
                stages = equal_stages(p * v, forward_s=0.0, backward_s=0.0, message_s=message)
                backward = [a + b for a, b in zip(i, w, strict=True)]
                stages = replace(stages, forward_s=f, backward_s=backward, input_s=i, weight_s=w)
                found = replayed(replay_of(schedule, p, v, n), stages, messages="blocking" if waits else "overlapped")
                least = float(np.asarray(n * bound.busy + bound.idle + bound.messages).max())
                assert least <= found.step_s * (1 + 1e-9), (p, v, n, blocks, message, counts)


def passes(seconds: tuple[float, float, float]) -> Passes:
    forward, inputs, weights = seconds
    return Passes(forward=np.array([forward]), backward=np.array([inputs + weights]), weight=np.array([weights]))


def counts_of(cuts: Any, stages: int, blocks: int) -> list[int]:
    """Blocks of every stage: the middle ones that have one more come first."""
    first, last, most, least = (int(np.asarray(x).flat[0]) for x in (cuts.first, cuts.last, cuts.most, cuts.least))
    middle, rest = stages - 2, blocks - first - last
    full = rest - least * middle
    assert stages > 2 or rest == 0
    return [first, *[most] * full, *[least] * (middle - full), last]


# ---- the registry ----


def test_two_of_one_name_are_refused() -> None:
    known = list(SCHEDULES.values())
    assert tuple(by_name(reversed(known))) == SCHEDULE_NAMES
    with pytest.raises(AssertionError, match="two schedules are called 1f1b"):
        by_name([*known, SCHEDULES["1f1b"]])


def test_what_a_schedule_does_not_take() -> None:
    (problem,) = schedule_problems("interleaved-1f1b", 4, 2, 9)
    assert (problem.path, problem.suggestion) == ("micro_batches", "nearest: 8 or 10")
    (problem,) = schedule_problems("zbv-zero-bubble", 4, 1, 8)
    assert (problem.path, problem.suggestion) == ("virtual_stages", "use 2")
    (problem,) = schedule_problems("dualpipev", 4, 2, 7)
    assert (problem.path, problem.suggestion) == ("micro_batches", "use 8")
    assert not schedule_problems("1f1b", 4, 1, 1) and schedule_problems("1f1b", 4, 2, 4)


def test_degrees_ask_the_registry() -> None:
    assert Degrees().schedule in SCHEDULES
    assert [Degrees(pp=2, schedule=name).splits_backward for name in SCHEDULES] == [
        known.splits_backward for known in SCHEDULES.values()
    ]
    assert not any(Degrees(schedule=name).splits_backward for name in SCHEDULES)


def test_no_other_module_names_a_schedule() -> None:
    """A schedule's name in other code would be a fact about the schedule that does not live with it."""
    files = [path for name in ("autopar", "cost_model", "search", "runtime") for path in (ROOT / name).rglob("*.py")]
    home = ROOT / "autopar" / "ir" / "schedules"
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in files
        if home not in path.parents and any(name in path.read_text() for name in SCHEDULES)
        for node in constants(ast.parse(path.read_text()))
        if node.value in SCHEDULES
    ]
    assert len(files) > 300 and not found, found


def constants(tree: ast.AST) -> Iterator[ast.Constant]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
