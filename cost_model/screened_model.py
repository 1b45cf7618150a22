"""Models as screening takes them: expressions of their blocks, and which fields of a layout those depend on.

A family of captured blocks prices any tensor degree (`model_of_row`), a captured program the one that it is labelled
for (`model_of_program`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.cost_model.pricing import evaluated
from autopar.cost_model.pricing import shape_of as shape_of_works
from autopar.cost_model.published.families import family_name, family_of, numbers_at, numbers_of, shape_of
from autopar.cost_model.published.row import Row
from autopar.cost_model.step.layouts import Layouts, Shape
from autopar.cost_model.work.block_work import BlockWork, Family, evaluate, free_symbols
from autopar.cost_model.work.polynomials import Polynomial
from autopar.ir.sharding import DATA

if TYPE_CHECKING:
    from autopar.cost_model.work.program_costs import ProgramWorks

BLOCK_FIELDS = ("tp", "sequence_parallel", "cp", "micro_batch")


@dataclass(frozen=True, eq=False, kw_only=True)
class ScreenedModel:
    """A model whose blocks are expressions; `blocks` and `parameters` give their numbers, all or those of parameters
    alone, for layouts, with experts not divided yet. `block_fields` are the fields on which prices of blocks depend.
    `tp` and `sequence_parallel` are those that a captured program's labels are for, None where any will do."""

    name: str
    shape: Shape
    blocks: Callable[[Layouts], Family[Any]]
    parameters: Callable[[Layouts], Family[Any]]
    block_fields: tuple[str, ...]
    tp: int | None = None
    sequence_parallel: bool | None = None


def model_of_program(works: ProgramWorks) -> ScreenedModel:
    """A captured program, for layouts of the tensor degree that it is labelled for."""
    bare = parameters_only(works.family)
    # all variants of a role are one work
    names, of_parameters = (
        free_symbols(tuple(one.block(role, "tp") for role in one.roles)) for one in (works.family, bare)
    )
    degrees = dict(zip(works.mesh.names, works.mesh.degrees, strict=True))
    return ScreenedModel(
        name=works.family.name,
        shape=shape_of_works(works),
        blocks=lambda layouts: evaluated(works, works.family, layouts, names),
        parameters=lambda layouts: evaluated(works, bare, layouts, of_parameters),
        block_fields=_block_fields(works.family, names),
        tp=int(np.prod([n for name, n in degrees.items() if name != DATA], initial=1)),
        sequence_parallel=works.sequence_parallel,
    )


def model_of_row(row: Row) -> ScreenedModel:
    """The model of a row's columns, by the family of captured blocks that it is of."""
    family, numbers = family_of(family_name(row)), numbers_of(row)
    bare = parameters_only(family)
    names, of_parameters = free_symbols(family), free_symbols(bare)
    return ScreenedModel(
        name=row.model or row.id,
        shape=shape_of([row]),
        blocks=lambda layouts: evaluate(family, numbers_at(numbers, layouts, names)),
        parameters=lambda layouts: evaluate(bare, numbers_at(numbers, layouts, of_parameters)),
        block_fields=_block_fields(family, names),
    )


def parameters_only(family: Family[Polynomial]) -> Family[Polynomial]:
    """The family without anything but how many parameters its blocks have."""

    def of_work(work: BlockWork[Polynomial]) -> BlockWork[Polynomial]:
        bare = replace(work, products=(), eager=(), fused=(), sent=())
        nothing = Polynomial()
        return replace(bare, saved_eager_bytes=nothing, saved_fused_bytes=nothing, input_bytes=nothing)

    blocks = tuple((role, tuple((name, of_work(work)) for name, work in found)) for role, found in family.blocks)
    return replace(family, blocks=blocks)


def _block_fields(family: Family[Polynomial], names: Sequence[str]) -> tuple[str, ...]:
    works = [work for _, variants in family.blocks for _, work in variants]
    sums = any(sent.mesh_dim == DATA and sent.of != "parameter" for work in works for sent in work.sent)
    has_experts = any(role.startswith("moe_layer") for role in family.roles)
    return (
        *BLOCK_FIELDS,
        *(["ep"] if has_experts else []),
        *(["dp"] if sums or "d" in names else []),
        *(["data_stride"] if sums else []),
    )
