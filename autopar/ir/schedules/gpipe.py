"""GPipe: all forward passes, then all backward passes.

idle = (p-1)(F+B)
"""

from typing import Any

from autopar.ir.schedules.action import in_turns, pass_number
from autopar.ir.schedules.schedule import PassCounts, PassSeconds, Schedule


def one_stage_order(stage: int, ahead: int, micro_batches: int) -> list[int]:
    """The order of a rank with one stage that runs at most `ahead` forward passes before the first backward pass."""
    forward, backward = (pass_number(stage, kind) * micro_batches for kind in ("F", "B"))
    return in_turns(
        (0, range(forward, forward + micro_batches)), (ahead - 1, range(backward, backward + micro_batches))
    )


def _two_flow_shops(seconds: PassSeconds) -> Any:
    """The forward passes and then the backward passes: each the sum of all stages and (n-1) times the slowest."""
    later = seconds.micro_batches - 1
    forward = seconds.forward + later * seconds.slowest_forward
    return forward + (seconds.backward + later * seconds.slowest_backward)


SCHEDULE = Schedule(
    name="gpipe",
    torch_name="GPipe",
    source='Huang et al. 2019, "GPipe", section 2.3',
    published=(2018, 11),
    rank_order=lambda rank, p, v, n: one_stage_order(rank, n, n),
    critical_paths=lambda p, v, n: [PassCounts(p - 1, p - 1, p - 1)],
    in_flight=lambda p, v, n, r: n * v,
    warm_up=lambda p, v, n, r: n * v,
    step_bound=_two_flow_shops,
    step_bound_is_exact=True,
)
