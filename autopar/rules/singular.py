"""Operators that are not finite, or have no finite derivative, where an operand is zero.

Uneven shards are padded with zeros, and results from padding must stay finite: infinity times a cotangent of zero is
not zero. So the factors of such an operand are split evenly or not at all.
"""

from autopar.rules.rule import Call, Rule, Slot

_OPERANDS = {
    "div": (1,),
    "true_divide": (1,),
    "remainder": (1,),
    "fmod": (1,),
    "floor_divide": (1,),
    "addcdiv": (2,),
    "xlogy": (1,),
    "atan2": (0, 1),
    "hypot": (0, 1),
    "pow": (0,),
    "_weight_norm": (0,),
    "angle": (0,),
}
_ONLY = """
    acosh digamma inverse lgamma linalg_cholesky linalg_det linalg_inv linalg_inv_ex linalg_vector_norm log log10 log2
    logit multinomial norm reciprocal rsqrt sqrt std
"""
_SINGULAR = _OPERANDS | dict.fromkeys(_ONLY.split(), (0,))


def even_factors(call: Call, rule: Rule) -> frozenset[str]:
    """Factors of a rule that no padding may be part of."""
    name = str(getattr(call.target, "_opname", ""))
    if name == "pow" and len(call.args) > 1 and isinstance(call.args[1], (int, float)) and call.args[1] >= 1:
        return frozenset()
    slots = [call.args[k] for k in _SINGULAR.get(name, ()) if k < len(call.args)]
    return frozenset(f for s in slots if isinstance(s, Slot) for dim in rule.inputs[s.index] for f in dim)
