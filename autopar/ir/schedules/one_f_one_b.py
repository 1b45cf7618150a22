"""1F1B: a rank runs as many forward passes as ranks follow it, then backward and forward passes in turn.

idle = (p-1)(F+B)
"""

from typing import Any

from autopar.ir.schedules.elementwise import maximum
from autopar.ir.schedules.gpipe import one_stage_order
from autopar.ir.schedules.schedule import PassCounts, PassSeconds, Schedule


def _first_rank_waits(seconds: PassSeconds) -> Any:
    """All passes of one micro-batch, and the passes of the first rank that cannot run beside them.

    The first rank runs p forward passes before its first backward pass. So n-1 passes of one kind and n-p of the other
    kind lie outside the way of that micro-batch.
    """
    n, forward, backward = seconds.micro_batches, seconds.first_forward, seconds.first_backward
    left = maximum(0, n - seconds.pp)
    turned = maximum((n - 1) * backward + left * forward, (n - 1) * forward + left * backward)
    return seconds.forward + seconds.backward + seconds.messages + turned


SCHEDULE = Schedule(
    name="1f1b",
    torch_name="1F1B",
    source='Narayanan et al. 2021, "PipeDream-2BW", section 2 (flush)',
    published=(2020, 6),
    rank_order=lambda rank, p, v, n: one_stage_order(rank, p - rank, n),
    critical_paths=lambda p, v, n: [PassCounts(p - 1, p - 1, p - 1)],
    in_flight=lambda p, v, n, r: p - r,
    warm_up=lambda p, v, n, r: p - r,
    step_bound=_first_rank_waits,
)
