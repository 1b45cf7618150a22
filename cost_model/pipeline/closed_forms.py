"""Step times of pipelines in closed form, as numbers or as arrays of candidates.

With p ranks of v stages each, n micro-batches, and F, B seconds of one micro-batch's forward and whole backward pass
through *all stages of one rank*, of B the part W for the weights and I = B - W for the inputs:

    step = n(F+B) + idle        `bubble_s`

*Idle* is the time in which the slowest rank does not compute, from the step's begin to its end. Every schedule states
the paths through its passes that can be the longest (`autopar.ir.schedules`). Tests find and prove them by replaying
the schedule (`autopar.cost_model.pipeline.simulator`).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError, did_you_mean
from autopar.ir.schedules.registry import SCHEDULE_NAMES, SCHEDULES
from autopar.ir.schedules.schedule import PassSeconds, Schedule

_Number = float | NDArray[Any]


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

    Exact if the schedule's `is_exact` says so, else a lower bound. Raises `InputError` for an unknown schedule.
    """
    p, v, n = np.broadcast_arrays(pp, virtual_stages, micro_batches)
    forward, backward, weight = (np.asarray(seconds, float) / v for seconds in (forward_s, backward_s, weight_s))
    stage = (forward, backward - weight, weight)
    paths = [
        sum((count * seconds for count, seconds in zip(path, stage, strict=True)), np.zeros(()))
        for path in _known(schedule).critical_paths(p, v, n)
    ]
    idle: _Number = np.where(p > 1, np.maximum.reduce(np.broadcast_arrays(*paths)), 0.0)[()]
    return idle


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

    The slowest rank works without a pause and the mean of the others fills and empties the pipeline: n·max + `bubble_s`
    of that mean. Under 1F1B this is the sum over stages + (n-1)·the largest. That is an upper bound, and exact if all
    ranks are equal or the last one is the slowest. A schedule whose own bound is exact is priced by that bound.
    """
    forward, backward = np.asarray(forward_s, float), np.asarray(backward_s, float)
    weight = np.broadcast_to(np.asarray(weight_s, float), backward.shape)
    known = _known(schedule)
    if known.step_bound is not None and known.step_bound_is_exact:
        whole: _Number = known.step_bound(pass_seconds(micro_batches, forward, backward))[()]
        return whole
    slowest = np.argmax(forward + backward, axis=-1)[..., None]
    ranks = forward.shape[-1]

    def others(busy: NDArray[Any]) -> NDArray[Any]:
        mean: NDArray[Any] = (busy.sum(-1) - np.take_along_axis(busy, slowest, -1)[..., 0]) / max(1, ranks - 1)
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


def pass_seconds(micro_batches: _Number, forward_s: NDArray[Any], backward_s: NDArray[Any]) -> PassSeconds:
    """The arguments of a bound with one stage on a rank, from seconds whose last axis counts the ranks."""
    return PassSeconds(
        pp=forward_s.shape[-1],
        micro_batches=micro_batches,
        forward=forward_s.sum(-1),
        backward=backward_s.sum(-1),
        slowest_forward=forward_s.max(-1),
        slowest_backward=backward_s.max(-1),
        first_forward=forward_s[..., 0],
        first_backward=backward_s[..., 0],
        messages=0.0,
    )


def _known(schedule: str) -> Schedule:
    if schedule not in SCHEDULES:
        raise InputError(f"no closed form of schedule {schedule!r}; {did_you_mean(schedule, SCHEDULE_NAMES)}")
    return SCHEDULES[schedule]
