"""The step of a pipeline with equal ranks, in closed form, and the micro-batches that a rank holds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.cost_model.pipeline.closed_forms import bubble_s
from autopar.ir.schedules.action import Action


def step_s(schedule: str, *, micro_batches: Any, forward_s: Any, backward_s: Any, **pipeline: Any) -> Any:
    """Seconds of a step: n(F+B) + `bubble_s`."""
    idle = bubble_s(schedule, micro_batches=micro_batches, forward_s=forward_s, backward_s=backward_s, **pipeline)
    return micro_batches * (np.asarray(forward_s) + backward_s)[()] + idle


def peak_in_flight(order: Sequence[Action]) -> int:
    """The most (stage, micro-batch) pairs of one rank whose activations are held at once: from F to B or W."""
    live = most = 0
    for action in order:
        live += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        most = max(most, live)
    return most
