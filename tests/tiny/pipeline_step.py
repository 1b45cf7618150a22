"""The step of a pipeline with equal ranks, in closed form."""

from typing import Any

import numpy as np

from autopar.cost_model.pipeline.closed_forms import bubble_s


def step_s(schedule: str, *, micro_batches: Any, forward_s: Any, backward_s: Any, **pipeline: Any) -> Any:
    """Seconds of a step: n(F+B) + `bubble_s`."""
    idle = bubble_s(schedule, micro_batches=micro_batches, forward_s=forward_s, backward_s=backward_s, **pipeline)
    return micro_batches * (np.asarray(forward_s) + backward_s)[()] + idle
