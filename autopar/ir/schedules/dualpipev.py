"""DualPipeV: two stages on a rank in v order, forward and backward passes in pairs, weights' parts to fill the bubble.

    idle = the largest of six sums

DeepSeek overlaps the two passes of a pair. An action list cannot say so: here they run one after the other. The table
of bubbles in DualPipe's README counts overlapped pairs, so its figures differ.
"""

from collections import deque
from typing import Any

from autopar.ir.schedules.action import Pass, pass_number
from autopar.ir.schedules.schedule import PassCounts, Schedule


def _rank_order(rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[int]:
    """The eight steps of DeepSeek's own DualPipeV."""
    first, second = rank, 2 * pp - 1 - rank
    order: list[int] = []
    done = dict.fromkeys(((stage, is_forward) for stage in (first, second) for is_forward in (True, False)), 0)
    weights: deque[int] = deque()

    def run(stage: int, kind: Pass) -> None:
        micro_batch = done[stage, kind == "F"]
        order.append(pass_number(stage, kind) * micro_batches + micro_batch)
        done[stage, kind == "F"] = micro_batch + 1
        if kind == "I":
            weights.append(pass_number(stage, "W") * micro_batches + micro_batch)

    def run_weights() -> None:
        if weights:
            order.append(weights.popleft())

    def run_all(*passes: tuple[int, Pass], times: int) -> None:
        for _ in range(times):
            for stage, kind in passes:
                run(stage, kind)

    run_all((first, "F"), times=2 * (pp - rank - 1))
    run_all((first, "F"), (second, "F"), times=rank + 1)
    for _ in range(pp - rank - 1):
        run(second, "I")
        run_weights()
        run(second, "F")
    run_all((first, "F"), (second, "B"), (second, "F"), (first, "B"), times=micro_batches - 2 * pp + rank + 1)
    run_all((second, "B"), (second, "F"), (first, "B"), times=pp - rank - 1)
    whole = (rank + 1) // 2  # of the last passes, those whose backward is not split: one more of the second stage
    for step in range(rank + 1):
        run(second, "B" if step < whole + (rank + 1) % 2 else "I")
        run(first, "B" if step < whole else "I")
    for _ in range(pp - rank - 1):
        run_weights()
        run(first, "I")
    while weights:
        run_weights()
    return order


def _too_few(pp: int, micro_batches: int) -> tuple[str, str] | None:
    if micro_batches >= 2 * pp:
        return None
    return f"needs as many micro-batches as stages, {2 * pp}", f"use {2 * pp}"


def _critical_paths(p: Any, v: Any, n: Any) -> list[PassCounts]:
    d = p - 1
    paths = [(d, 0, 0), (-1, d, 0), (d, d, -d), (-1, 2 * d, -d), (2 * d, 0, -2 * d), (2 * d, -d, -d)]
    return [PassCounts(*path) for path in paths]


SCHEDULE = Schedule(
    name="dualpipev",
    torch_name="DualPipeV",
    source='DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1, and the code of DualPipe',
    published=(2024, 12),
    least_stages=2,
    most_stages=2,
    placement="v",
    splits_backward=True,
    rank_order=_rank_order,
    refusal=_too_few,
    critical_paths=_critical_paths,
    in_flight=lambda p, v, n, r: 2 * p + 1,
    warm_up=lambda p, v, n, r: 2 * p + (r == p - 1),
)
