"""Pipelines in closed form, over arrays of candidates: idle time, messages waited for, micro-batches in flight.

With p ranks of v stages each, n micro-batches, and F, B seconds of one micro-batch's forward and whole backward pass
through *all stages of one rank*, of B the part W for the weights and I = B - W for the inputs:

    step   = n(F+B) + idle                                                                      `step_s`
    idle   = (p-1)(F+B)                                gpipe, 1f1b                              `bubble_s`
             (p-1 + (v-1)·max(0, p-n)) (F+B)/v         interleaved-1f1b
             (p-1)·max(F, I, F+I-W)/v   for n ≥ p      interleaved-zero-bubble; ZB-H1's (p-1)(F+B-2W) where W ≤ F, I
             the largest of a few sums                 zbv-zero-bubble, dualpipev               `_zbv`, `_dualpipev`

*Idle* is what the slowest rank does not compute between the step's begin and its end. The papers on zero bubbles count
only what lies between the first and the last pass of a rank: that is 0 under zbv with F = I = W, while the step still
takes (p-1)F/2 longer than n(F+B), because the last rank begins so much later (Qi et al. hide it in the next step).

Sources: Huang et al. 2019, "GPipe", section 2.3; Narayanan et al. 2021, "Efficient large-scale language model training
on GPU clusters", sections 2.2.1-2.2.2; Qi et al. 2024, "Zero bubble pipeline parallelism", tables 1-2 and section 6,
whose T_B is I here; DeepSeek-AI 2025, DualPipe's README, table of bubbles (its F&B, two passes that overlap, is in no
action list). For the orders that torch publishes the sums are the critical paths of those orders, found and proved by
replaying them (`autopar.cost_model.pipeline.simulator`, tests); they are exact where a docstring says so.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError, did_you_mean
from autopar.ir.schedules import SCHEDULES

_Number = float | NDArray[Any]
Sum = tuple[_Number, _Number, _Number]  # how many passes F, I and W of one stage


def bubble_s(
    schedule: str,
    *,
    pp: _Number,
    virtual_stages: _Number = 1,
    micro_batches: _Number,
    forward_s: _Number,
    backward_s: _Number,
    weight_s: _Number = 0.0,
) -> _Number:
    """Idle seconds of a step with equal ranks and messages that take no time.

    Exact for gpipe, 1f1b, interleaved-1f1b and dualpipev; for interleaved-zero-bubble with n ≥ p or v = 1; for
    zbv-zero-bubble with n ≥ 2p-1 or F = I = W. Elsewhere a lower bound. Raises InputError for an unknown schedule.
    """
    p, v, n = np.broadcast_arrays(pp, virtual_stages, micro_batches)
    stage = (_over(forward_s, v), _over(backward_s, v) - _over(weight_s, v), _over(weight_s, v))
    idle: _Number = np.where(p > 1, _largest(_sums(schedule)(p, v, n), stage), 0.0)[()]
    return idle


def step_s(
    schedule: str,
    *,
    pp: _Number,
    virtual_stages: _Number = 1,
    micro_batches: _Number,
    forward_s: _Number,
    backward_s: _Number,
    weight_s: _Number = 0.0,
) -> _Number:
    """Seconds of a step with equal ranks: n(F+B) + `bubble_s`."""
    idle = bubble_s(
        schedule,
        pp=pp,
        virtual_stages=virtual_stages,
        micro_batches=micro_batches,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
    )
    return micro_batches * (np.asarray(forward_s) + backward_s)[()] + idle


def zb_h2_bubble_s(*, pp: _Number, forward_s: _Number, backward_s: _Number, weight_s: _Number) -> _Number:
    """ZB-H2's (p-1)(F+B-3W), of which we have no order: it holds twice 1F1B's activations (Qi et al., table 2)."""
    idle: _Number = np.maximum(0.0, (pp - 1) * (np.asarray(forward_s) + backward_s - 3 * np.asarray(weight_s)))
    return idle


# ---- unequal ranks ----


def unequal_step_s(
    schedule: str,
    *,
    micro_batches: _Number,
    forward_s: NDArray[Any],
    backward_s: NDArray[Any],
    weight_s: NDArray[Any] | float = 0.0,
    virtual_stages: _Number = 1,
) -> _Number:
    """Seconds of a step whose ranks differ; the last axis of the seconds are the ranks, each the sum of its stages.

    The slowest rank works without a pause and the others' mean fills and empties the pipeline: n·max + `bubble_s` of
    the mean of the others. Under 1f1b that is the sum over stages + (n-1)·the largest, an upper bound, exact where all
    are equal or the last is the slowest (`unequal_1f1b_lower_s` is the other bound); gpipe's forward and backward
    passes are two such flow shops after one another, which is exact (Huang et al., section 2.3).
    """
    forward, backward = np.asarray(forward_s, float), np.asarray(backward_s, float)
    weight = np.broadcast_to(np.asarray(weight_s, float), backward.shape)
    if schedule == "gpipe":
        each = [one.sum(-1) + (micro_batches - 1) * one.max(-1) for one in (forward, backward)]
        whole: _Number = (each[0] + each[1])[()]
        return whole
    slowest = np.argmax(forward + backward, axis=-1)[..., None]
    ranks = forward.shape[-1]

    def others(one: NDArray[Any]) -> NDArray[Any]:
        mean: NDArray[Any] = (one.sum(-1) - np.take_along_axis(one, slowest, -1)[..., 0]) / max(1, ranks - 1)
        return mean

    idle = bubble_s(
        schedule,
        pp=ranks,
        virtual_stages=virtual_stages,
        micro_batches=micro_batches,
        forward_s=others(forward),
        backward_s=others(backward),
        weight_s=others(weight),
    )
    busy: _Number = micro_batches * (forward + backward).max(-1)
    return busy + idle


def unequal_1f1b_lower_s(*, micro_batches: _Number, forward_s: NDArray[Any], backward_s: NDArray[Any]) -> _Number:
    """A lower bound of 1f1b with unequal stages, often exact: three paths through each rank k (0 the first).

    Before its first backward pass rank k runs p-k forward passes, so that of the others' times overlap with its own
    either (n-1) backward and (n-p+k) forward passes, or the reverse; or it never waits, from its first pass on.
    """
    forward, backward = np.asarray(forward_s, float), np.asarray(backward_s, float)
    both, ranks = forward + backward, forward.shape[-1]
    n = np.asarray(micro_batches)[..., None]
    left = np.maximum(0, n - ranks + np.arange(ranks))
    whole = both.sum(-1, keepdims=True)
    turned = whole + np.maximum((n - 1) * backward + left * forward, (n - 1) * forward + left * backward)
    busy = np.cumsum(both, -1) + (n - 1) * both
    lower: _Number = np.maximum(turned, busy).max(-1)
    return lower


# ---- messages ----


def exposed_messages(schedule: str, *, pp: _Number, virtual_stages: _Number = 1, micro_batches: _Number) -> _Number:
    """How many message times a step waits for when sends run beside passes and are shorter than a stage's pass.

    gpipe waits while the pipeline fills and empties, 2(p-1). Under 1f1b rank 0 has p micro-batches in flight, whose
    way to the last rank and back holds 2(p-1) messages, so that one waits again every p micro-batches: about 2(p-1)/p
    per micro-batch. Interleaved stages have enough in flight to hide all but one micro-batch's way, 2(pv-1), where n is
    a multiple of p. Exact for those three. For the others: the messages of one micro-batch's way, in v order without
    the turn that stays on a rank; a lower bound, simulate for more.
    """
    p, v, n = np.broadcast_arrays(pp, virtual_stages, micro_batches)
    _sums(schedule)
    if schedule == "1f1b":
        turns, rest = np.divmod(n - 1, p)
        count = 2 * (p - 1) * (turns + 1) + np.maximum(0, 2 * (rest - 1))
    elif SCHEDULES[schedule].order == "v":
        count = v * 2 * (p - 1)
    else:
        count = 2 * (p * v - 1)
    exposed: _Number = np.where(p > 1, count, 0)[()]
    return exposed


def blocking_message_s(
    *, pp: _Number, virtual_stages: _Number = 1, micro_batches: _Number, message_s: _Number
) -> _Number:
    """Seconds that an inner rank spends in sends that it waits for: v forward and v backward per micro-batch."""
    p, v, n = np.broadcast_arrays(pp, virtual_stages, micro_batches)
    waited: _Number = np.where(p > 1, 2 * v * n * np.asarray(message_s), 0.0)[()]
    return waited


# ---- memory ----


def live_stage_micro_batches(
    schedule: str, *, pp: _Number, virtual_stages: _Number = 1, micro_batches: _Number, rank: _Number = 0
) -> _Number:
    """The most (stage, micro-batch) pairs whose activations a rank holds at once, from F to B or W.

    Divided by v this is in micro-batches of the whole rank: n under gpipe, min(n, p - rank) under 1f1b, interleaved
    p(1 + (p-1)/(pv)) on the first rank (Korthikanti et al. 2022, section 4.2), p under ZB-H1 on every rank, PP + 1
    stages' worth under dualpipev. `autopar.ir.schedules.live_micro_batches` counts the same on an action list.
    """
    p, v, n, r = np.broadcast_arrays(pp, virtual_stages, micro_batches, rank)
    _sums(schedule)
    in_round = n // np.maximum(1, n // p)
    most = {
        "gpipe": n * v,
        "1f1b": p - r,
        "interleaved-1f1b": (v - 1) * in_round + 2 * (p - 1 - r) + 1,
        "interleaved-zero-bubble": (v - 1) * in_round + p,
        "zbv-zero-bubble": np.minimum(2 * p, n + r + 1),
        "dualpipev": 2 * p + 1,
    }[schedule]
    live: _Number = np.minimum(n * v, most)[()]
    return live


def warm_up_passes(
    schedule: str, *, pp: _Number, virtual_stages: _Number = 1, micro_batches: _Number, rank: _Number = 0
) -> _Number:
    """Forward passes of one stage that a rank runs before its first backward pass."""
    p, v, n, r = np.broadcast_arrays(pp, virtual_stages, micro_batches, rank)
    _sums(schedule)
    in_round = n // np.maximum(1, n // p)
    first = {
        "gpipe": n * v,
        "1f1b": p - r,
        "interleaved-1f1b": (v - 1) * in_round + 2 * (p - 1 - r) + 1,
        "interleaved-zero-bubble": (v - 1) * in_round + p - r,
        "zbv-zero-bubble": np.minimum(n, 2 * p - r - 1) + np.minimum(n, r + 1),
        "dualpipev": 2 * p + (r == p - 1),
    }[schedule]
    passes: _Number = np.minimum(n * v, first)[()]
    return passes


# ---- critical paths: passes F, I, W of one stage beyond the n·v of each that every rank runs ----


def _flush(p: Any, v: Any, n: Any) -> Sequence[Sum]:
    return [(p - 1, p - 1, p - 1)]


def _interleaved(p: Any, v: Any, n: Any) -> Sequence[Sum]:
    """With fewer micro-batches than ranks, each further turn of the pipeline waits for the p-n that are missing."""
    late = p - 1 + (v - 1) * np.maximum(0, p - n)
    return [(late, late, late)]


def _interleaved_zero_bubble(p: Any, v: Any, n: Any) -> Sequence[Sum]:
    """The order is fixed: rank r runs its weight parts r backward passes later, and gains W only where W ≤ F, I.

    F alone: the last rank begins (p-1) forward passes late; I alone: the first gets its last gradient so late.
    """
    missing = np.maximum(0, p - n)
    late = p - 1 + (v - 1) * missing
    saved = np.where(n < p, v * n - 1, p - 1)
    return [(late, missing, 0), (v * missing, p - 1, 0), (late, late, -saved), (late, p - 1, 1 - n)]


def _zbv(p: Any, v: Any, n: Any) -> Sequence[Sum]:
    """torch's order is made for F = I = W and kept whatever they are, so that every imbalance opens other gaps.

    Eight paths bind when n ≥ 2p-1; with fewer micro-batches k = 2p-1-n of the warm-up's passes are missing, and those
    given are lower bounds, of which (k, k, 0) is exact for F = I = W.
    """
    d, k = p - 1, np.maximum(0, 2 * p - 1 - n)
    steady = [
        (0, 1, p - 2),
        (1, 0, p - 2),
        (0, d, 0),
        (2 * d - 1, 2 - p, 0),
        (0, 2 * d, -2 * d),
        (2 * d, -d, -1),
        (2 * d, 0, -2 * d - 1),
        (2 * d - 1, 1, -2 * d),
    ]
    short = [(d, 0, 0), (0, d, 0), (k, k, 0), (2 * np.maximum(0, k - d), 2 * d, -2 * np.maximum(0, d - k))]
    short += short[:1] * (len(steady) - len(short))
    return [
        (np.where(k > 0, a[0], b[0]), np.where(k > 0, a[1], b[1]), np.where(k > 0, a[2], b[2]))
        for a, b in zip(short, steady, strict=True)
    ]


def _dualpipev(p: Any, v: Any, n: Any) -> Sequence[Sum]:
    """Six paths; n ≥ 2p, which the schedule asks for."""
    d = p - 1
    return [(d, 0, 0), (-1, d, 0), (d, d, -d), (-1, 2 * d, -d), (2 * d, 0, -2 * d), (2 * d, -d, -d)]


_SUMS: Mapping[str, Callable[[Any, Any, Any], Sequence[Sum]]] = {
    "gpipe": _flush,
    "1f1b": _flush,
    "interleaved-1f1b": _interleaved,
    "interleaved-zero-bubble": _interleaved_zero_bubble,
    "zbv-zero-bubble": _zbv,
    "dualpipev": _dualpipev,
}


def _sums(schedule: str) -> Callable[[Any, Any, Any], Sequence[Sum]]:
    if schedule not in _SUMS:
        raise InputError(f"no closed form of schedule {schedule!r}; {did_you_mean(schedule, tuple(_SUMS))}")
    return _SUMS[schedule]


def _largest(sums: Sequence[Sum], stage: Sum) -> NDArray[Any]:
    found = [sum((count * seconds for count, seconds in zip(one, stage, strict=True)), np.zeros(())) for one in sums]
    largest: NDArray[Any] = np.maximum.reduce(np.broadcast_arrays(*found))
    return largest


def _over(seconds: _Number, stages: NDArray[Any]) -> NDArray[Any]:
    divided: NDArray[Any] = np.asarray(seconds, float) / stages
    return divided
