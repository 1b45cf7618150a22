"""A captured model as a search prices it: its blocks' expressions, and the fields of a layout that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autopar.cost_model.pricing import evaluated
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.work.block_work import BlockWork, Family, free_symbols
from autopar.cost_model.work.polynomials import Polynomial
from autopar.ir.sharding import splits_samples

if TYPE_CHECKING:
    from autopar.cost_model.work.program_costs import ProgramWorks

_BLOCK_FIELDS = ("tp", "sequence_parallel", "cp", "micro_batch")


@dataclass(frozen=True, eq=False, kw_only=True)
class ScreenedModel:
    """The numbers of a model's blocks for any layouts of one tensor degree. Experts are not divided yet."""

    blocks: Callable[[Layouts], Family[Any]]
    parameters: Callable[[Layouts], Family[Any]]  # as `blocks`, with the numbers of parameters alone
    block_fields: tuple[str, ...]  # of layouts; prices of blocks depend on no other


def model_of_program(works: ProgramWorks) -> ScreenedModel:
    """The blocks of a captured program, for layouts of the tensor degree that its labels are for."""
    bare = _parameters_only(works.family)
    # all variants of a role are one work
    names, of_parameters = (
        free_symbols(tuple(each.block(role, "tp") for role in each.roles)) for each in (works.family, bare)
    )
    return ScreenedModel(
        blocks=lambda layouts: evaluated(works, works.family, layouts, names),
        parameters=lambda layouts: evaluated(works, bare, layouts, of_parameters),
        block_fields=_block_fields(works.family, names),
    )


def _parameters_only(family: Family[Polynomial]) -> Family[Polynomial]:
    """The family without anything but how many parameters its blocks have."""

    def of_work(work: BlockWork[Polynomial]) -> BlockWork[Polynomial]:
        saved = ("saved_eager_bytes", "saved_fused_bytes", "saved_operand_bytes", "input_bytes")
        nothing: dict[str, Any] = dict.fromkeys(saved, Polynomial())
        return replace(work, products=(), eager=(), fused=(), sent=(), selected=None, **nothing)

    blocks = tuple((role, tuple((name, of_work(work)) for name, work in pairs)) for role, pairs in family.blocks)
    return replace(family, blocks=blocks)


def _block_fields(family: Family[Polynomial], names: Sequence[str]) -> tuple[str, ...]:
    works = [work for _, variants in family.blocks for _, work in variants]
    sums = any(splits_samples(sent.mesh_dim) and sent.of != "parameter" for work in works for sent in work.sent)
    has_experts = any(role.startswith("moe_layer") for role in family.roles)
    return (
        *_BLOCK_FIELDS,
        *(["ep", "etp"] if has_experts or sums or "ep" in names else []),
        *(["dp"] if sums or "d" in names else []),
        *(["data_stride"] if sums else []),
    )
