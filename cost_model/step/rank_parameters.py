"""The repeated blocks and the parameters of one pipeline rank, for many layouts at once."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.step.context import repeated_roles
from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.cost_model.work.block_work import Family
from autopar.ir.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParameters:
    """Elements of parameters on one rank, trained and frozen. ZeRO divides experts over fewer data-parallel ranks."""

    dense: Floats
    expert: Floats
    frozen_dense: Floats  # of `dense`: without gradient and optimizer state
    frozen_expert: Floats  # of `expert`

    @property
    def whole(self) -> Floats:
        """Dense and expert elements together."""
        return np.asarray(self.dense + self.expert)

    @property
    def trained(self) -> "RankParameters":
        """The elements that have gradients."""
        dense, expert = self.dense - self.frozen_dense, self.expert - self.frozen_expert
        return replace(self, dense=dense, expert=expert, frozen_dense=0 * dense, frozen_expert=0 * expert)

    @property
    def frozen(self) -> "RankParameters":
        """The elements that have none."""
        return replace(self, dense=self.frozen_dense, expert=self.frozen_expert)

    def sharded(self, layouts: Layouts, stage: int) -> Floats:
        """The elements of one data-parallel rank, if ZeRO divides them from `stage` on."""
        dense = np.where(layouts.zero >= stage, layouts.shard, 1.0)
        replicas = layouts.shard * layouts.expert_replicas / layouts.ep
        expert = np.where(layouts.zero >= stage, np.maximum(replicas, 1), 1.0)
        return np.asarray(self.dense / dense + self.expert / expert)


def block_parameters(family: Family[Any], layouts: Layouts, role: str) -> RankParameters:
    """Elements of one block."""
    work = family.block(role, "tp")
    ep = layouts.ep if role.startswith("moe_layer") else 1.0
    return RankParameters(
        dense=np.asarray(work.parameters_split + work.parameters_whole),
        expert=np.asarray(work.parameters_expert / ep),
        frozen_dense=np.asarray(0.0 if work.frozen_dense is None else work.frozen_dense),
        frozen_expert=np.asarray(0.0 if work.frozen_expert is None else work.frozen_expert / ep),
    )


def rank_parameters(
    family: Family[Any], shape: Shape, layouts: Layouts, blocks: Floats, *, has_first: Any, has_last: Any
) -> RankParameters:
    """Elements of a rank with `blocks` repeated blocks, with or without the first and the last block."""
    repeated = [
        (share * blocks, block_parameters(family, layouts, role)) for role, share in repeated_roles(shape).items()
    ]
    ends = [block_parameters(family, layouts, role) if role in family.roles else None for role in ("first", "last")]

    def elements(name: str, *, has_ends: bool) -> Floats:
        total = sum((count * getattr(block, name) for count, block in repeated), np.zeros(1))
        if not has_ends:
            return np.asarray(total)
        counts = [0.0 if end is None else getattr(end, name) for end in ends]
        first, last = (np.where(has, n, 0.0) for has, n in zip((has_first, has_last), counts, strict=True))
        return np.asarray(total + np.where(shape.is_tied, np.maximum(first, last), first + last))  # tied: counts once

    return RankParameters(
        **{name: elements(name, has_ends=name.endswith("dense")) for name in RankParameters.__slots__}
    )


def first_and_last(
    family: Family[Any], shape: Shape, layouts: Layouts, blocks: Floats
) -> tuple[RankParameters, RankParameters]:
    """Elements of the first and of the last pipeline rank, each with `blocks` repeated blocks."""
    alone = layouts.pp == 1
    return (
        rank_parameters(family, shape, layouts, blocks, has_first=True, has_last=alone),
        rank_parameters(family, shape, layouts, blocks, has_first=alone, has_last=True),
    )


def blocks_per_rank(blocks: Floats, layouts: Layouts, engine: Engine) -> tuple[Floats, Floats]:
    """Blocks of the fullest middle rank, and of the rank that has the head."""
    pp = layouts.pp
    even = np.ceil(blocks / pp)
    if not engine.balances_ends:
        return np.where(pp > 1, even, blocks), np.where(pp > 1, even, blocks)
    slots = (blocks + 2) / pp  # embedding and head take the place of a block each
    uneven = (pp > 1) & (np.mod(blocks, pp) != 0)
    return np.where(uneven, np.ceil(slots), even), np.where(uneven, np.ceil(slots) - 1, even)
