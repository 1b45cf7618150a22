"""What of a plan is not searched because it was asked for, beside the dimensions of the space."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import PlanError

EVERY_BLOCK = 1_000_000
# words of --fix that have one value: those of a plan or its degrees that candidates do not have
PINS = ("sequence_parallel", "per_micro_batch", "recompute", "recompute_blocks", "cut_at", "regather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """`recompute_blocks` of every stage are computed again, or of each its own number (None: the fewest that fit),
    stages begin before the calls `cuts` (None: where the slowest is fastest); with `regather` what is gathered for
    products is gathered again in backward, without it is kept (None: what is better); `degrees` are words that plans
    have as they are."""

    recompute_blocks: int | tuple[int, ...] | None = None
    cuts: tuple[int, ...] | None = None
    regather: bool | None = None
    degrees: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def num_stages(self) -> int | None:
        """Stages of every plan, where what is pinned says how many. Raises `PlanError` where it says two numbers."""
        counts = {"cut_at": len(self.cuts) + 1} if self.cuts is not None else {}
        if isinstance(self.recompute_blocks, tuple):
            counts["recompute_blocks"] = len(self.recompute_blocks)
        if len(set(counts.values())) > 1:
            said = " and ".join(f"{word} {count}" for word, count in counts.items())
            raise PlanError(f"the numbers of stages differ: {said}; recompute_blocks has one number for every stage")
        return next(iter(counts.values()), None)


def blocks_asked_for(fix: Mapping[str, Any]) -> int | tuple[int, ...] | None:
    """How many blocks of every stage, or of each stage, recompute under `fix`, which has one value of each word."""
    if fix.get("recompute") == "none":
        return 0
    if "recompute_blocks" in fix:
        blocks: int | tuple[int, ...] = fix["recompute_blocks"]
        return blocks
    return EVERY_BLOCK if "recompute" in fix else None
