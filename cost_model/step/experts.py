"""Expert parallelism: a rank's part of a block's work if experts are divided over ranks."""

from dataclasses import replace
from typing import Any

from autopar.cost_model.machine.fitted_constants import Mechanisms
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.work.block_work import Family
from autopar.cost_model.work.operator_cost import EXPERT_PRODUCTS


def with_experts(family: Family[Any], layouts: Layouts, constants: Mechanisms) -> Family[Any]:
    """The family with its expert products divided over ranks.

    A rank has 1/ep of the experts, and each of its experts gets the tokens of ep ranks.
    """

    def divided(one: Any) -> Any:
        if one.kind != "matmul" or not one.name.startswith(EXPERT_PRODUCTS):
            return one
        return replace(one, count=one.count / layouts.ep, m=one.m * layouts.ep * constants.expert_imbalance)

    def of_variants(variants: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
        return tuple((name, replace(work, products=tuple(map(divided, work.products)))) for name, work in variants)

    blocks = tuple((role, of_variants(v) if role.startswith("moe_layer") else v) for role, v in family.blocks)
    return replace(family, blocks=blocks)
