"""Selective recomputation by a list of modules: the bytes that it frees, and the operators that it runs again.

The modules are those of Megatron's ``--recompute-modules`` (Megatron Core, TransformerConfig.recompute_modules):

    core_attn       attention; its fused kernel saves no scores, so this frees only scores that are written
    layernorm       the norms before attention and before the feed-forward layer; this frees their outputs
    mla_up_proj     the products of latent attention that widen queries, keys and values; this frees their results
    moe_act         the activation function of the experts; this frees its output
    mlp             the feed-forward layer of a block without experts
    moe             the layer of experts, with its exchanges
    shared_experts  the experts of every token

A block may lack a module. Then the module frees nothing. The products of a block are in the order of the forward pass.
The products before attention make queries, keys and values. The first product after it makes the output of attention.
The others are the feed-forward layer. A product of this layer reads the hidden width, and its result is saved. Or it
reads the output of the activation function, and this output is saved.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost_model.machine.engine import Module
from autopar.cost_model.step.experts import has_experts, is_expert_product
from autopar.cost_model.work.block_work import BlockWork, Operator, memory_operator
from autopar.ir.arrays import Floats

SAVED_BYTES = 2.0  # of an element that a module saves


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSavings:
    """What the backward pass of one block computes again."""

    results_bytes: Floats  # freed, in 16 bits
    operands_bytes: Floats  # freed; inputs of products alone, which may be saved in the precision of the product
    operators: tuple[Operator[Any], ...]
    sends: bool  # ranks exchange again what the feed-forward layer sends


def module_savings(work: BlockWork[Any], role: str, hidden: Floats, modules: Collection[Module]) -> ModuleSavings:
    """What a list of modules frees in a block of a role, and runs again."""
    before, feed_forward = _around_attention(work)
    experts = [op for op in feed_forward if is_expert_product(op)]
    others = [op for op in feed_forward if not is_expert_product(op)]
    if has_experts(role):
        layer = (experts if "moe" in modules else []) + (others if {"moe", "shared_experts"} & set(modules) else [])
    else:
        layer = others if "mlp" in modules else []
    wider = [op for op in before if np.all(op.k != hidden)] if "mla_up_proj" in modules else []
    attention = [op for op in work.products if op.kind == "attention"] if "core_attn" in modules else []
    activated = layer + (experts if "moe_act" in modules and "moe" not in modules else [])
    rows = experts[:1] if "moe" in modules else []  # the rows that were sent to the experts
    norms = 2 * work.input_bytes if "layernorm" in modules else 0.0
    activation = sum(np.where(_reads(op, hidden), _result(op), _operand(op)) for op in activated)
    moved = np.asarray(2 * norms + activation)
    pointwise = memory_operator("pointwise", moved, 0.0 * moved, (1, 0), 0.0 * moved)  # of norms and activations
    results = [_result(op) for op in wider] + [np.where(_reads(op, hidden), _result(op), 0.0) for op in layer]
    operands = [np.where(_reads(op, hidden), 0.0, _operand(op)) for op in activated]
    return ModuleSavings(
        results_bytes=np.asarray(sum(results)),
        operands_bytes=np.asarray(sum(operands) + sum(_operand(op) for op in rows) + norms),
        operators=(*layer, *wider, *attention, *([pointwise] if np.any(moved > 0) else [])),
        sends=bool(rows if has_experts(role) else layer),
    )


def _around_attention(work: BlockWork[Any]) -> tuple[list[Operator[Any]], list[Operator[Any]]]:
    """The products before attention, and the products of the feed-forward layer."""
    kinds = [op.kind for op in work.products]
    if "attention" not in kinds:
        return [], []
    at = kinds.index("attention")
    return list(work.products[:at]), list(work.products[at + 2 :])


def _reads(op: Operator[Any], hidden: Floats) -> Any:
    return np.asarray(op.k == hidden)


def _result(op: Operator[Any]) -> Any:
    return SAVED_BYTES * op.count * op.m * op.n


def _operand(op: Operator[Any]) -> Any:
    return SAVED_BYTES * op.count * op.m * op.k
