"""Closed forms of pipelines: what published formulas say of them, and that they are arrays' as well as numbers'."""

from typing import Any

import numpy as np
import pytest
from pipeline_step import step_s

from autopar.cost_model.pipeline.closed_forms import bubble_s, unequal_step_s
from autopar.errors import InputError
from autopar.ir.schedules.registry import SCHEDULES

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

ranks = st.integers(2, 64)
counts = st.integers(1, 512)
passes_s = st.floats(1e-3, 10.0)
parts = st.floats(0.0, 1.0)


@given(ranks, counts, passes_s, passes_s)
def test_gpipe_and_1f1b(p: int, n: int, forward: float, backward: float) -> None:
    """Huang et al. 2019, section 2.3: a fraction (p-1)/(n+p-1) of the step."""
    for schedule in ("gpipe", "1f1b"):
        idle = bubble_s(schedule, pp=p, micro_batches=n, forward_s=forward, backward_s=backward)
        whole = step_s(schedule, pp=p, micro_batches=n, forward_s=forward, backward_s=backward)
        assert idle == pytest.approx((p - 1) * (forward + backward))
        assert whole == pytest.approx((n + p - 1) * (forward + backward))
        assert idle / whole == pytest.approx((p - 1) / (n + p - 1))


@given(ranks, st.integers(1, 8), st.integers(1, 8), passes_s, passes_s)
def test_interleaved_divides_the_bubble(p: int, v: int, rounds: int, forward: float, backward: float) -> None:
    """Narayanan et al. 2021, section 2.2.2, and at v = 1 it is 1F1B."""
    n = p * rounds
    given_ = {"pp": p, "micro_batches": n, "forward_s": forward, "backward_s": backward}
    idle = bubble_s("interleaved-1f1b", virtual_stages=v, **given_)
    assert idle == pytest.approx((p - 1) * (forward + backward) / v)
    assert bubble_s("interleaved-1f1b", virtual_stages=1, **given_) == pytest.approx(bubble_s("1f1b", **given_))


@given(ranks, counts, passes_s, passes_s, parts)
def test_zb_h1(p: int, n: int, forward: float, other: float, part: float) -> None:
    """Qi et al. 2024, table 2: (p-1)(F+B-2W) where W ≤ F and W ≤ I; 1F1B at W = 0; never more idle than 1F1B."""
    weight = part * min(forward, other)
    given_ = {"pp": p, "micro_batches": max(n, p), "forward_s": forward, "backward_s": other + weight}
    idle = bubble_s("interleaved-zero-bubble", weight_s=weight, **given_)
    assert idle == pytest.approx((p - 1) * (forward + other + weight - 2 * weight))
    assert idle <= bubble_s("1f1b", **given_) * (1 + 1e-9)
    without = bubble_s("interleaved-zero-bubble", **given_)
    assert without == pytest.approx(bubble_s("1f1b", **given_))


@given(ranks, st.integers(1, 4), passes_s)
def test_balanced_v_schedules_begin_late_only(p: int, rounds: int, one: float) -> None:
    """With F = I = W the last rank begins p-1 forward passes of a stage late, and nothing else is idle."""
    given_ = {"pp": p, "virtual_stages": 2, "forward_s": 2 * one, "backward_s": 4 * one, "weight_s": 2 * one}
    for schedule in ("zbv-zero-bubble", "dualpipev"):
        assert bubble_s(schedule, micro_batches=2 * p * rounds, **given_) == pytest.approx((p - 1) * one)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 16), st.integers(1, 3), passes_s, passes_s, parts)
def test_the_share_of_the_bubble_falls_with_micro_batches(
    schedule: str, p: int, v: int, forward: float, backward: float, part: float
) -> None:
    kind = SCHEDULES[schedule]
    v = min(max(v, kind.least_stages), kind.most_stages or v + 1)
    n = 2 * p * np.arange(1, 9)
    given_ = {"pp": p, "virtual_stages": v, "forward_s": forward, "backward_s": backward, "weight_s": part * backward}
    idle, whole = (f(schedule, micro_batches=n, **given_) for f in (bubble_s, step_s))
    assert np.all(idle >= 0)
    assert np.all(np.diff(idle / whole) <= 0)
    assert np.all(np.diff(whole) > 0)
    assert bubble_s(schedule, **{**given_, "pp": 1}, micro_batches=n).tolist() == [0.0] * 8


@given(st.integers(2, 12), counts, st.data())
def test_unequal_stages(p: int, n: int, data: "st.DataObject") -> None:
    """Sum over stages + (n-1)·the largest; that of equal stages is the closed form."""
    both = data.draw(st.lists(st.tuples(passes_s, passes_s), min_size=p, max_size=p))
    forward, backward = (np.array(each) for each in zip(*both, strict=True))
    most = unequal_step_s("1f1b", micro_batches=n, forward_s=forward, backward_s=backward)
    assert most == pytest.approx((forward + backward).sum() + (n - 1) * (forward + backward).max())
    gpipe = unequal_step_s("gpipe", micro_batches=n, forward_s=forward, backward_s=backward)
    assert gpipe == pytest.approx(forward.sum() + (n - 1) * forward.max() + backward.sum() + (n - 1) * backward.max())


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 12), st.integers(1, 4), passes_s, passes_s, parts)
def test_unequal_of_equal_ranks_is_the_closed_form(
    schedule: str, p: int, rounds: int, forward: float, backward: float, part: float
) -> None:
    v, n = SCHEDULES[schedule].least_stages, 2 * p * rounds
    equal = step_s(
        schedule,
        pp=p,
        virtual_stages=v,
        micro_batches=n,
        forward_s=forward,
        backward_s=backward,
        weight_s=part * backward,
    )
    one = np.ones((3, p))  # three candidates at once
    found = unequal_step_s(
        schedule,
        virtual_stages=v,
        micro_batches=n,
        forward_s=forward * one,
        backward_s=backward * one,
        weight_s=part * backward * one,
    )
    assert found == pytest.approx(equal)


def in_flight(schedule: str, **run: Any) -> Any:
    return SCHEDULES[schedule].most_in_flight(**run)


def test_activations_in_flight() -> None:
    """Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022: p(1 + (p-1)/(pv)) interleaved on the first rank."""
    p, v, n, rank = 8, 3, 32, np.arange(8)
    assert in_flight("gpipe", pp=p, micro_batches=n) == n
    assert in_flight("1f1b", pp=p, micro_batches=n, rank=rank).tolist() == (p - rank).tolist()
    assert in_flight("1f1b", pp=p, micro_batches=3, rank=rank).tolist() == [3, 3, 3, 3, 3, 3, 2, 1]
    interleaved = in_flight("interleaved-1f1b", pp=p, virtual_stages=v, micro_batches=n)
    assert interleaved / v == pytest.approx(p * (1 + (p - 1) / (p * v)))
    # warm-up passes and one: (v - 1)·p + 2·(p - 1 - i) + 1 chunks (Megatron-LM, section 2.2.2)
    of_ranks = in_flight("interleaved-1f1b", pp=p, virtual_stages=v, micro_batches=n, rank=rank)
    assert of_ranks.tolist() == ((v - 1) * p + 2 * (p - 1 - rank) + 1).tolist()
    assert in_flight("interleaved-zero-bubble", pp=p, micro_batches=n, rank=rank).tolist() == [p] * p
    assert in_flight("dualpipev", pp=p, virtual_stages=2, micro_batches=n) == 2 * p + 1


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(InputError, match="no closed form of schedule '1f1d'; did you mean '1f1b'"):
        bubble_s("1f1d", pp=2, micro_batches=2, forward_s=1.0, backward_s=2.0)
