"""The Pareto front of a search: plans that no other plan beats in step time, memory and devices together.

The front has the exactly priced plans that no priced plan beats. It also has the screened candidates whose lower bounds
no priced plan and no other bound beats. A screened candidate is two points: with the least recomputation that fits, and
with full recomputation.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir.arrays import Floats
from autopar.search.driver.search import SearchState
from autopar.search.pricing.exact import PricedPlan
from autopar.search.pricing.objective import Goal
from autopar.search.result.result import Contender, degrees_in_plain

MOST_BOUNDS = 60  # reported screened points of the front, spread evenly over it


def front_of(search: SearchState) -> tuple[Contender, ...]:
    """The front, in the order of step times."""
    goal = search.goal
    fitting = {index: plan for index, plan in search.exact.items() if plan.fits}
    plans = [*fitting.values(), *(plan for plan in (search.refined.best, search.kept) if plan is not None)]
    best = search.best
    if best is None:
        return ()
    values = np.array([[plan.seconds, plan.peak_bytes, plan.degrees.world_size] for plan in plans])
    exact = [plans[i] for i in not_beaten(values)]
    points, which = _bounds(search, list(search.exact))
    told = np.array([[plan.seconds, plan.peak_bytes, plan.degrees.world_size] for plan in exact])
    left = np.flatnonzero(~_beaten_by(points, told))
    kept = left[not_beaten(points[left])] if len(left) else left
    if len(kept) > MOST_BOUNDS:
        kept = kept[np.unique(np.linspace(0, len(kept) - 1, MOST_BOUNDS).round().astype(int))]
    rows = [contender_of(goal, plan) for plan in exact]
    rows += [_of_bound(search, points[i], int(which[i])) for i in kept]
    rows = [replace(row, slower=row.step_s / best.seconds - 1) for row in rows]
    return tuple(sorted(rows, key=lambda row: (row.step_s, row.peak_bytes, row.num_devices)))


def not_beaten(points: Floats) -> NDArray[np.int64]:
    """Rows that no other row equals or beats in every column, in the order of the first column."""
    kept: list[int] = []
    # fewest devices first, so that only an earlier row can beat a row
    counts = np.unique(points[:, 2]) if len(points) else ()
    for count in counts:
        mine = np.flatnonzero(points[:, 2] == count)
        mine = mine[np.lexsort((points[mine, 1], points[mine, 0]))]
        least = np.minimum.accumulate(np.concatenate([[np.inf], points[mine, 1]]))[:-1]
        mine = mine[points[mine, 1] < least]
        mine = mine[~_beaten_by(points[mine], points[kept])] if kept else mine
        kept += mine.tolist()
    indices = np.array(kept, dtype=np.int64)
    return indices[np.argsort(points[indices, 0], kind="stable")] if kept else indices


def _beaten_by(points: Floats, others: Floats) -> NDArray[np.bool_]:
    """Which points another point equals or beats in every column."""
    left = np.arange(len(points))
    for other in others:
        left = left[np.any(points[left] < other, axis=1)]
    is_left = np.ones(len(points), dtype=bool)
    is_left[left] = False
    return is_left


def _bounds(search: SearchState, priced: Sequence[int]) -> tuple[Floats, NDArray[np.int64]]:
    """Points of the screened candidates without an exact price, and the candidate of each point."""
    screened, devices = search.screened, search.candidates.num_devices
    capacity = search.goal.by_devices(search.candidates, lambda part: part.on.capacity_bytes)
    usable = screened.fits.copy()
    usable[priced] = False
    some = np.flatnonzero(usable)
    held = np.where(screened.level > 0, np.minimum(capacity, screened.without_bytes), screened.without_bytes)
    every = some[screened.recomputed_bytes[some] < held[some]]
    rows = [
        np.stack([screened.seconds[some], held[some], devices[some]], axis=1),
        np.stack([screened.recomputed_seconds[every], screened.recomputed_bytes[every], devices[every]], axis=1),
    ]
    return np.concatenate(rows), np.concatenate([some, every])


def contender_of(goal: Goal, plan: PricedPlan) -> Contender:
    """A priced plan by its figures alone."""
    return Contender(
        degrees=degrees_in_plain(plan.degrees, plan.cuts, regather=plan.regather),
        step_s=plan.seconds,
        peak_bytes=plan.peak_bytes,
        num_devices=plan.degrees.world_size,
        value=goal.value(plan),
    )


def _of_bound(search: SearchState, point: Floats, index: int) -> Contender:
    step_s, peak = float(point[0]), float(point[1])
    degrees = search.candidates.degrees(index, recompute=step_s > search.screened.seconds[index])
    return Contender(
        degrees=degrees_in_plain(degrees, ()),
        step_s=step_s,
        peak_bytes=peak,
        num_devices=degrees.world_size,
        value=search.goal.value_of(step_s, peak, degrees),
        is_exact=False,
    )
