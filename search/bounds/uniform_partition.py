"""Cuts of equal blocks between unequal ends into stages, for many candidates at once.

The closed form of `autopar.search.pricing.stage_partition.partition`: the slowest stage is fastest, then the smallest
sum of squares wins. A middle stage has `most` blocks or one block fewer.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from autopar.ir.arrays import Floats

_NEAR = (-1.0, 0.0, 1.0)  # how far the best number of blocks of an end lies from an equal share


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenCuts:
    """Numbers of blocks: of the first stage, of the last, and of the fullest and the emptiest stage between."""

    first: Floats
    last: Floats
    most: Floats
    least: Floats
    largest: Floats  # seconds of the slowest stage; infinite if there are too few blocks


def even_cuts(blocks: Floats, stages: Floats, block_s: Floats, first_s: Floats, last_s: Floats) -> EvenCuts:
    """The best cuts of `blocks` blocks of `block_s` seconds into `stages`, between ends of `first_s` and `last_s`."""
    blocks, stages, block, first, last = np.broadcast_arrays(blocks, stages, block_s, first_s, last_s)
    share = (blocks * block + first + last) / stages
    near = [np.floor((share - end) / block) for end in (first, last)]
    best: list[Floats] = []
    for i in _NEAR:
        for j in _NEAR:
            cut = _cut(blocks, stages, block, first, last, near[0] + i, near[1] + j)
            if not best:
                best = cut
                continue
            better = (cut[0] < best[0]) | ((cut[0] == best[0]) & (cut[1] < best[1]))
            best = [np.where(better, new, old) for new, old in zip(cut, best, strict=True)]
    whole = stages <= 1
    alone = [blocks * block + first + last, np.zeros(blocks.shape), blocks, blocks, blocks, blocks]
    largest, _, *counts = (np.where(whole, a, b) for a, b in zip(alone, best, strict=True))
    names = [each.name for each in fields(EvenCuts)]
    return EvenCuts(**dict(zip(names, [*counts, largest], strict=True)))


def _cut(
    blocks: Any, stages: Any, block: Any, first: Any, last: Any, of_first: Any, of_last: Any
) -> list[Floats]:  # largest, squares, first, last, most, least
    of_first = np.clip(of_first, 0.0, blocks)
    of_last = np.where(stages == 2, blocks - of_first, np.clip(of_last, 0.0, blocks - of_first))
    rest, middle = blocks - of_first - of_last, np.maximum(stages - 2, 1)
    most, least = np.ceil(rest / middle), np.floor(rest / middle)
    full = rest - least * middle  # middle stages with one block more
    ends = [first + of_first * block, last + of_last * block]
    largest = np.maximum(np.maximum(ends[0], ends[1]), most * block)
    squares = ends[0] ** 2 + ends[1] ** 2 + block**2 * (full * most**2 + (middle - full) * least**2)
    legal = np.where(stages == 2, rest == 0, rest >= stages - 2)
    return [np.where(legal, largest, np.inf), squares, of_first, of_last, most, least]
