"""Scaled dot product attention."""

from collections.abc import Mapping
from math import prod
from typing import Any

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import aligned, rule_from, slot_of
from autopar.rules.registry import rule
from autopar.rules.rule import RING, Call, Dim, Rule, Slot, Step


def _flops(sizes: Mapping[str, int]) -> float:
    """Two products over all pairs of positions; a causal mask is not counted as saving any."""
    pairs = prod(size for name, size in sizes.items() if name not in ("e", "f"))
    return 2.0 * pairs * (sizes.get("e", 1) + sizes.get("f", 1))


@rule(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(call: Call) -> Rule:
    """``"b h q e, b h k e, b h k f -> b h q f"`` with e and k whole. Under a causal mask, q is split by a rewrite.

    The head width e sets the scale, so it is whole. With grouped queries h is ``(g r)`` in queries and g in keys
    and values: a rank's r heads of a group meet its own key head. The rewrite needs the positions of a rank's queries
    (`autopar.lowering.context_attention`). It has no dropout, and as many queries as keys. Without a mask of its own
    and without dropout, q and k may be split together: keys and values travel (`autopar.lowering.ring_attention`).
    """
    query, key, value = (slot_of(a) for a in call.args[:3])
    mask = call.named("attn_mask")
    causal, dropout = bool(call.named("is_causal", False)), call.named("dropout_p", 0.0)
    grouped = bool(call.kwargs.get("enable_gqa", False))
    rank = len(call.output.shape)
    if rank < 2 or (grouped and rank < 3):
        raise RuleError("attention over fewer than two dimensions")
    batch: list[Dim] = [(f"b{d}",) for d in range(rank - 2)]
    shared = list(batch)
    sizes: dict[str, int] = {}
    if grouped:
        heads, groups = call.operands[query].shape[-3], call.operands[key].shape[-3]
        if call.operands[value].shape[-3] != groups or heads % groups:
            raise RuleError("grouped attention whose keys and values differ in heads")
        batch[-1], shared[-1] = ("g", "r"), ("g",)
        sizes = {"g": groups, "r": heads // groups}
    specs: dict[int, list[Dim]] = {}
    layouts: list[tuple[Any, list[Dim]]] = [
        (call.args[0], [*batch, ("q",), ("e",)]),
        (call.args[1], [*shared, ("k",), ("e",)]),
        (call.args[2], [*shared, ("k",), ("f",)]),
        (mask, [*batch, ("q",), ("k",)]),
    ]
    for argument, layout in layouts:
        if isinstance(argument, Slot):
            specs[argument.index] = aligned(layout, call.operands[argument.index].shape)
    output = [*batch, ("q",), ("f",)]
    options: dict[str, Any] = {"sizes": sizes, "whole": {"e", "k"}, "linear": [{value}], "flops": _flops}
    same = call.operands[query].shape[-2] == call.operands[key].shape[-2]
    if isinstance(mask, Slot) or dropout or not same:
        options["whole"] |= {"q"} if causal else set()
    else:
        options |= {"travels": {"q": "k"} if rank > 2 else {}, "emit": _emit}
        options |= {"outermost": {"q"}, "even": {"q"}, "exchanged": {"q": (query, -1)}} if causal else {}
    return rule_from(call, specs, output, **options)


def _emit(local: Call) -> tuple[Step, ...]:
    causal, scale = bool(local.named("is_causal", False)), local.kwargs.get("scale")
    if (ring := local.mesh_dim("q" + RING)) is not None:
        return (Step("ring_attention", (*local.args[:3], causal, scale, ring)),)
    mesh_dim = local.mesh_dim("q")
    if mesh_dim is None or not causal:
        return (Step(local.target, local.args, local.kwargs),)
    grouped = bool(local.kwargs.get("enable_gqa", False))
    return (Step("causal_attention", (*local.args[:3], scale, grouped, mesh_dim)),)
